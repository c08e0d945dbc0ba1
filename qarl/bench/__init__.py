"""Speed per quantization scheme, of kernels and of whole training steps: `python -m qarl.bench PART`."""
