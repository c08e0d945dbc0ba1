"""Low-bit operators, exact references, and the choice of a kernel. Imports no subpackage of qarl but vllm_versions."""
