"""Log-probs and entropies of TRL's batches, against TRL's own method and against numbers by hand."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl")

from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from qarl.config.level import Level
from qarl.schemes import get_scheme
from qarl.trainer.policy import Policy
from qarl.trl.log_probs import as_batch, log_probs_of_rows

PAD = 2
ROWS = [([5, 6, 7], [8, 9, 10, 1]), ([11], [12, 1]), ([13, 14], [15, 16, 17])]


def trls_rows() -> tuple[torch.Tensor, torch.Tensor, int]:
    """As TRL pads them: prompts on the left, responses on the right."""
    width, keep = max(len(p) for p, _ in ROWS), max(len(r) for _, r in ROWS)
    ids = [[PAD] * (width - len(p)) + p + r + [PAD] * (keep - len(r)) for p, r in ROWS]
    mask = [[0] * (width - len(p)) + [1] * len(p + r) + [0] * (keep - len(r)) for p, r in ROWS]
    return torch.tensor(ids), torch.tensor(mask), keep


def test_log_probs_and_entropies_are_trls(pristine_model: Path) -> None:
    """In FP32 without quantization, both sides compute the same numbers up to rounding."""
    models = [
        AutoModelForCausalLM.from_pretrained(pristine_model, dtype=torch.float32) for _ in range(2)
    ]
    ids, mask, keep = trls_rows()
    temperature = 0.7
    grpo_trainer.add_fused_lm_head(
        models[0], temperature=temperature, outputs=("log_probs", "entropy")
    )
    trls = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext, is_main_process=True))
    expected, entropies, _ = GRPOTrainer._get_per_token_logps_and_entropies(
        trls, models[0], ids, mask, keep, compute_entropy=True
    )
    policy = Policy(models[1], get_scheme("bf16"), (), align=Level.OFF)
    batch = as_batch(ids, mask, keep)
    log_probs, our_entropies = log_probs_of_rows(
        policy, batch, slice(0, 3), temperature=temperature, entropies=True
    )
    valid = mask[:, -keep:].bool()
    torch.testing.assert_close(log_probs[valid], expected[valid], rtol=0, atol=2e-6)
    assert our_entropies is not None
    torch.testing.assert_close(our_entropies[valid], entropies[valid], rtol=0, atol=2e-6)
    assert not log_probs[~valid].any()


def test_micro_batches_do_not_change_the_bits(pristine_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(pristine_model, dtype=torch.bfloat16)
    policy = Policy(model, get_scheme("w8a8"), ("lm_head",), align=Level.MODEL)
    batch = as_batch(*trls_rows())
    whole, _ = log_probs_of_rows(policy, batch, slice(0, 3), temperature=1.0, entropies=False)
    parts = [
        log_probs_of_rows(policy, batch, slice(i, i + 1), temperature=1.0, entropies=False)[0]
        for i in range(3)
    ]
    assert torch.equal(whole, torch.cat(parts))
