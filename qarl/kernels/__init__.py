"""Low-bit operators, their exact references, and the choice among them. It imports no subpackage but vllm_versions."""
