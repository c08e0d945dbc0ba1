"""Low-bit operators, their exact references, and the choice of a kernel. It imports no other subpackage of qarl except
vllm_versions."""
