"""The benchmark: `python -m qarl.bench kernels | steps | trainer | publish | against | plan`."""
