"""Speed of the kernels, as a share of what the machine can do: `python -m qarl.bench kernels`."""
