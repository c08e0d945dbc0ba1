"""verl's FSDP2 engine on one or more gloo ranks, a process each (verl_engine.py), and the batches it is given."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from ranks import RAYS, run_ranks
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from qarl.config.level import Level
from qarl.config.lora import LoraConfig
from qarl.lora.layers import Adapters
from qarl.quant import get_scheme
from qarl.tbpo import TBPOConfig, reduce_metrics, tbpo_loss
from qarl.trainer.batch import Batch
from qarl.trainer.policy import Policy

QUANT = {
    "scheme": "w4a16",
    "group_size": 32,
    "ignore": ["lm_head"],
    "align": "model",
    "mismatch_limit": 100.0,
}


BANDS = {
    "seq_clip_ratio_high": 0.02,
    "neg_seq_clip_ratio_low": 0.02,
    "neg_seq_clip_ratio_high": 0.02,
}


OURS = {"optimizer_impl": "qarl.optim.muon_adamw", "optimizer": "MuonAdamW", "weight_decay": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "muon": {"eps": 1e-8, "seed": 5, "muon_lr": 2e-3, "muon_momentum": 0.9},
    "adamw": {"eps": 1e-8, "seed": 5},
}
"""Optimizers of QaRL, as verl is told of them."""


EMPTY = 5


def make_rows(model: str) -> dict[str, torch.Tensor]:
    """Eight responses of 1 to 24 tokens to prompts of 2 to 6, one of them with an empty mask; log-probs of the trainer
    with a little noise, so that ratios lie inside and outside their bands."""
    random = torch.Generator().manual_seed(1)
    prompts = torch.tensor([2, 3, 6, 4, 5, 2, 3, 4])
    lengths = torch.tensor([1, 24, 2, 12, 16, 4, 3, 20])
    total, width = int((prompts + lengths).max()), int(lengths.max())
    ids = torch.randint(3, 64, (8, total), generator=random)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    mask[EMPTY] = False
    responses = torch.zeros(8, width, dtype=torch.int64)
    for i in range(8):
        ids[i, prompts[i] + lengths[i] :] = 2
        responses[i, : lengths[i]] = ids[i, prompts[i] : prompts[i] + lengths[i]]
    rows = {
        "input_ids": ids,
        "responses": responses,
        "response_mask": mask,
        "prompt_lengths": prompts,
    }
    rows |= {"response_lengths": lengths, "advantages": torch.randn(8, generator=random)}
    rows["advantages"][3] = 0.0
    with torch.no_grad():
        exact = load_policy(model).response_log_probs(as_batch(rows), slice(0, 8), temperature=1.0)
    rows["old_log_probs"] = (exact + 0.03 * torch.randn(exact.shape, generator=random)) * mask
    rows["rollout_log_probs"] = (exact + 0.1 * torch.randn(exact.shape, generator=random)) * mask
    return rows


def short_rows() -> dict[str, torch.Tensor]:
    """64 responses of 1 to 16 tokens. Without a common row length the bits of some depend on the rows beside them."""
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 17, (64,), generator=random)
    lengths[0] = 16
    ids = torch.randint(3, 64, (64, 19), generator=random)
    mask = torch.arange(16)[None, :] < lengths[:, None]
    ids[:, 3:] = ids[:, 3:].masked_fill(~mask, 2)
    rows = {
        "input_ids": ids,
        "responses": ids[:, 3:] * mask,
        "response_mask": mask,
        "response_lengths": lengths,
    }
    rows |= {
        "prompt_lengths": torch.full((64,), 3),
        "advantages": torch.randn(64, generator=random),
    }
    return rows | {
        "old_log_probs": torch.zeros(64, 16),
        "rollout_log_probs": torch.full((64, 16), -1.0),
    }


LORA = {"r": 8, "alpha": 16}


def load_policy(model: str, scheme: str = "w4a16", lora: dict[str, int] | None = None) -> Policy:
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    adapters = partial(Adapters, config=LoraConfig(**cast(Any, lora or {})), seed=42, base=model)
    options: dict[str, Any] = {"align": Level.MODEL, "adapters": adapters if lora else None}
    policy = Policy(loaded, get_scheme(scheme, group_size=32), ("lm_head",), **options)
    if policy.adapters:
        draw_b(policy.adapters)
    return policy


@torch.no_grad()
def draw_b(adapters: Adapters, seed: int = 7) -> None:
    """Make B random instead of zero, also if FSDP2 has sharded it."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapters.layers.values():
        b = layer.lora_B
        drawn = (torch.randn(b.shape, generator=generator) / 8).bfloat16().to(b.dtype)
        b.copy_(
            distribute_tensor(drawn, b.device_mesh, b.placements)
            if isinstance(b, DTensor)
            else drawn
        )


def as_batch(rows: dict[str, torch.Tensor]) -> Batch:
    names = ("input_ids", "prompt_lengths", "responses", "response_mask")
    zeros = torch.zeros(8)
    tensors: dict[str, Any] = {name: rows[name] for name in names}
    tensors |= dict.fromkeys(("rollout_log_probs", "rewards", "advantages"), zeros)
    tensors["response_lengths"] = rows["response_mask"].sum(1)
    return Batch(**tensors, weight_version=0)


def local_update(
    model: str,
    rows: dict[str, torch.Tensor],
    scheme: str = "w4a16",
    lora: dict[str, int] | None = None,
) -> tuple[float, dict, dict, Policy]:
    """The local backend's loss, gradients and metrics of the rows, in one micro-batch, and its policy."""
    policy = load_policy(model, scheme, lora)
    log_probs = policy.response_log_probs(as_batch(rows), slice(0, 8), temperature=1.0)
    names = ("old_log_probs", "rollout_log_probs", "advantages", "response_mask")
    arguments: list[Any] = [*(rows[name] for name in names), TBPOConfig(**cast(Any, BANDS))]
    loss, statistics = tbpo_loss(log_probs, *arguments)
    loss.backward()
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, reduce_metrics([statistics]), policy


def assert_same_gradients(
    gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Within one BF16 step of the largest element, because gradients of parts are rounded before they are added."""
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        difference, gradient = gradients[name].float() - gradient.float(), gradient.float()
        assert float(difference.abs().max()) <= 2**-7 * float(gradient.abs().max()), name
        assert float(difference.norm()) <= 2**-7 * float(gradient.norm()), name


def run_engine(
    folder: Path,
    world: int,
    model: str,
    rows: dict[str, torch.Tensor],
    jobs: list[dict],
    *,
    timeout: float = 300,
) -> list[dict]:
    inputs, output = folder / f"jobs{world}.pt", folder / f"output{world}.pt"
    torch.save({"model": model, "rows": rows, "jobs": jobs}, inputs)
    run_ranks("verl_engine.py", world, inputs, output, timeout=timeout, **RAYS)
    return torch.load(output, weights_only=False)
