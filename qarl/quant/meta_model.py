"""Build a model without storage from its config, to get names, shapes and the buffers that it should have.

transformers and vLLM change torch's default dtype while they build a model. If the build fails, vLLM does not restore
it, and later tensors would be BF16 instead of FP32. `default_dtype_kept` restores it.

transformers computes buffers that are not in a checkpoint, such as a rotary embedding's frequencies, in FP32 while it
builds the model. A later `model.to(dtype)` rounds them: with BF16 masters verl casts the whole module
(`FSDPEngineWithLMHead._build_module`). Frequencies in BF16 turn the token at position 64 by 0.07 rad too far or too
little, and the token at position 3072 by 3.5 rad.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qarl.errors import UserError

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Value of `model.dtype` -> dtype of the weights that are not quantized, and of the activations."""


@contextmanager
def default_dtype_kept() -> Iterator[None]:
    """Restore torch's default dtype at the end of the block, also after an exception."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def unquantized_config(hf_config: Any) -> Any:
    """Return a copy of a model's config without its quantization."""
    plain = copy.deepcopy(hf_config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def meta_model(
    hf_config: Any, *, trust_remote_code: bool = False, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """Return the causal language model that `hf_config` describes, in `dtype` on the meta device.

    Raise ValueError if transformers has no class for it. Exceptions of the class itself are not caught.
    """
    from transformers import AutoModelForCausalLM

    with default_dtype_kept(), torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(hf_config), dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model


def restore_buffers(model: Any) -> list[str]:
    """Replace the buffers that something has cast or changed since transformers built `model`. Return their names.

    `model`: a transformers model, before FSDP wraps it. Buffers may be on the meta device; those get the dtype only.

    Raises:
        UserError: a buffer of the checkpoint was rounded, so its bits are lost.
    """
    wrong = wrong_buffers(model)
    for name, expected in wrong.items():
        owner, _, last = name.rpartition(".")
        module: nn.Module = model.get_submodule(owner)
        have = dict(module.named_buffers(recurse=False))[last]
        if last in module._non_persistent_buffers_set:
            setattr(module, last, expected.to(have.device))
        elif (
            have.shape == expected.shape
            and torch.promote_types(have.dtype, expected.dtype) == have.dtype
        ):
            setattr(module, last, have.to(expected.dtype))
        else:
            raise _wrong_buffer(name, have, expected)
    return list(wrong)


def check_buffers(model: Any) -> None:
    """Raise UserError if a buffer has another dtype than transformers gives it, or other bits than its config says."""
    for name, expected in wrong_buffers(model).items():
        raise _wrong_buffer(name, dict(model.named_buffers())[name], expected)


def wrong_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the buffers that `model` should have and has not, by name.

    Bits are compared unless the buffer is in the checkpoint (then the config does not say them) or on the meta device.
    """
    actual = dict(model.named_buffers())
    expected = fresh_buffers(model)
    stored = set(model.state_dict())
    wrong = {}
    for name in actual.keys() & expected.keys():
        have = actual[name]
        want = expected[name]
        known = not (have.is_meta or want.is_meta or name in stored)
        if (
            have.dtype != want.dtype
            or have.shape != want.shape
            or (known and not torch.equal(have.cpu(), want))
        ):
            wrong[name] = want
    return wrong


def fresh_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the buffers of a BF16 model that transformers builds from `model.config`, on the CPU. Parameters are not
    made."""
    from accelerate import init_empty_weights

    with default_dtype_kept(), init_empty_weights(include_buffers=False):
        torch.set_default_dtype(torch.bfloat16)  # as from_pretrained does
        fresh = type(model)(model.config)
    return dict(fresh.named_buffers())


def _wrong_buffer(name: str, have: Any, expected: torch.Tensor) -> UserError:
    built = f"transformers makes {expected.dtype} {tuple(expected.shape)}"
    return UserError(
        f"the model's buffer {name} is not what its config says",
        where=f"{name}: {have.dtype} {tuple(have.shape)}, but {built}",
        why="after the model was built, something cast it or wrote to it, so its forward would compute log-probs of "
        "another model than the rollout engine's",
        fix="load the model with from_pretrained(dtype=torch.bfloat16) and do not call .to(dtype), .half() or "
        ".bfloat16() on it",
    )
