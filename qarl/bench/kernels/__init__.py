"""`python -m qarl.bench kernels`: seconds of single products and quantizers, every kernel that can serve here."""
