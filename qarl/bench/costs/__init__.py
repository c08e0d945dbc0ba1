"""What a layer costs on a GPU, by counting: kernels, copies, synchronisations and bytes. No GPU is needed."""
