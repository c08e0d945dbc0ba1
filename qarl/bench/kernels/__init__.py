"""`python -m qarl.bench kernels`: time single products and quantizers with every kernel that works on this machine."""
