"""Low-bit operators, exact references, and the choice of a kernel. Of qarl, it imports only vllm_versions."""
