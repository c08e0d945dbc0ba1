"""FP32 logits in vLLM: which releases compute them for models that generate.

vLLM 0.29 casts lm_head's operands in `LogitsProcessor._apply_head` if the model's config has `head_dtype`. On NVIDIA
and AMD GPUs it instead accumulates the product of BF16 operands in FP32 and does not round it. vLLM 0.24 reads the key
only for pooling models, so it would sample from BF16 logits without a word.
"""

from __future__ import annotations

from qarl.errors import UserError
from qarl.vllm_versions.release import installed_version, release_of

FP32_HEAD = {"head_dtype": "float32"}
"""Entry of vLLM's `hf_overrides`."""
FIRST = (0, 29)
"""The first release that was read and computes FP32 logits."""


def check_head_dtype(head_dtype: str, version: str | None = None) -> None:
    """Raise UserError if `head_dtype` is fp32 and vLLM would ignore it. `version`: default is the installed vLLM's."""
    if head_dtype != "fp32":
        return
    version = version or installed_version()
    if release_of(version) >= FIRST:
        return
    raise UserError(
        "model.head_dtype=fp32 needs vLLM 0.29 or newer",
        where="model.head_dtype",
        why=f"vLLM {version or 'is not installed'}: an older release has no FP32 lm_head for models that generate",
        fix="set model.head_dtype=model, or install a newer vLLM",
    )
