"""Every buffer of the trainer's model has the dtype and the bits that transformers gives it."""

from __future__ import annotations

import pytest
import torch
from accelerate import init_empty_weights
from random_models import save_random_model
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.proofs.families import rotary_rows
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.families import ALIGNED, MEASURED
from qarl.quant import get_scheme
from qarl.quant.meta_model import check_buffers, restore_buffers, wrong_buffers
from qarl.trainer.policy import Policy

SIZES = {
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 64,
    "moe_intermediate_size": 32,
}


def load(folder: object, dtype: torch.dtype = torch.bfloat16):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def built(family: str):
    """A model of the family's own default config, but small: even parameters that are thrown away are allocated."""
    config = AutoConfig.for_model(family)
    for key in SIZES.keys() & vars(config).keys():
        setattr(config, key, SIZES[key])
    if getattr(config, "num_key_value_heads", 1) is None:  # nemotron's own default does not build
        config.num_key_value_heads = config.num_attention_heads
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", [*ALIGNED, *MEASURED])
def test_each_family_after_a_cast(family):
    """verl loads in the masters' dtype and casts the module; the mend gives back bits, not only the dtype."""
    model = built(family)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert before, "a family without buffers tests nothing"
    assert not wrong_buffers(model)
    model.to(torch.bfloat16)
    changed = {name for name, buffer in model.named_buffers() if buffer.dtype != before[name].dtype}
    assert set(restore_buffers(model)) == changed
    for name, buffer in model.named_buffers():
        assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name]), name
    check_buffers(model)


@pytest.mark.parametrize("rotary", ["default, rope_theta", "linear", "dynamic", "yarn", "llama3"])
def test_each_kind_of_rotary_embedding(tmp_path, rotary):
    folder = save_random_model(tmp_path / "model", "qwen3", **rotary_rows()[f"rotary {rotary}"])
    expected = dict(load(folder).named_buffers())
    for dtype in (torch.float32, torch.bfloat16):
        model = load(folder, torch.float32).to(dtype)
        restore_buffers(model)
        for name, buffer in model.named_buffers():
            assert buffer.dtype == expected[name].dtype and torch.equal(buffer, expected[name]), (
                dtype,
                name,
            )


def test_a_changed_bit_is_noticed(tmp_path):
    model = load(save_random_model(tmp_path / "model", "qwen3"))
    frequencies = model.model.rotary_emb.inv_freq
    frequencies[3] = torch.nextafter(frequencies[3], torch.tensor(9.0))
    assert restore_buffers(model) == ["model.rotary_emb.inv_freq"]


def test_a_policy_refuses_a_model_that_was_cast(tmp_path):
    model = load(save_random_model(tmp_path / "model", "qwen3"), torch.float32).to(torch.bfloat16)
    with pytest.raises(UserError, match=r"rotary_emb\.\w*inv_freq is not what"):
        Policy(model, get_scheme("w4a16", group_size=32), ("lm_head",), align=Level.LINEARS)


def test_a_rounded_buffer_of_the_checkpoint_is_refused(tmp_path):
    """Its bits are lost. A wider one is rounded, as from_pretrained(dtype=torch.bfloat16) rounds it."""
    model = load(save_random_model(tmp_path / "model", "qwen3"))
    fresh = type(model).__init__

    class WithBias(type(model)):
        def __init__(self, config):
            fresh(self, config)
            self.register_buffer("bias", torch.ones(3, dtype=torch.float32))

    model.__class__ = WithBias
    model.register_buffer("bias", torch.full((3,), 1.1, dtype=torch.float64))
    assert restore_buffers(model) == ["bias"]
    assert torch.equal(model.bias, torch.full((3,), 1.1, dtype=torch.float64).float())
    model.bias = model.bias.bfloat16()
    with pytest.raises(UserError, match="bias"):
        restore_buffers(model)
