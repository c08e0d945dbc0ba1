"""Low-bit operators, their exact references, and the choice of a kernel. Imports no subpackage except vllm_versions."""
