"""Model families that can be trained, and their highest level of alignment.

vLLM's class for a family may compute a different model than transformers. For example, only one side applies a
multiplier, a router rounds differently, or a publish does not reach a layer. So QaRL trains only families for which
trainer and engine were compared on a random model. It refuses all other families before anything runs.
"""

from __future__ import annotations

from typing import Any

from qarl.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families with levels `model` and `exact`. `qarl.align.model_config` has a verdict on each key of their configs."""

LARGEST_SHARE = 0.1
"""Trainer and engine agree on a family if its mean |δ| (`qarl.metrics.step_metrics`) at level `linears` is at most this
fraction of its mean |δ| at `off`, in W4A16. An absolute limit would not work, because a family that scales its logits
down has a small δ even if the two sides compute different models. Llama's fraction is 0.03."""
SHOWN = {
    "arcee": 7.3e-3,
    "cohere": 3.1e-4,
    "cwm": 7.6e-3,
    "ernie4_5": 7.1e-3,
    "exaone4": 8.2e-3,
    "falcon": 3.0e-3,
    "gemma": 8.0e-4,
    "gemma2": 5.2e-3,
    "gemma3_text": 5.5e-3,
    "granite": 1.5e-2,
    "jais2": 6.0e-3,
    "mistral": 7.9e-3,
    "nemotron": 1.8e-2,
    "seed_oss": 7.8e-3,
}
"""Family -> mean |δ| at `linears` in W4A16, in nats per token, from benchmarks/results/families_cpu.json. Llama has
7.3e-3 in that file. A test compares this table with the file."""


WITHOUT_ADAPTERS = ("falcon",)
"""Families of `SHOWN` whose class in vLLM is no `SupportsLoRA`, so the engine would not start. A test asks vLLM."""
PADDED = ("falcon", "nemotron")
"""Families of `SHOWN` whose attention is not chosen by transformers' AttentionInterface, so it cannot be told the rows
of a pack (`qarl.align.packed_attention`). In a pack of Falcon, rows would even see each other."""


def check_rows(hf_config: Any, packed: bool) -> None:
    """Raise UserError if rows would be packed although this family's attention does not stop at the end of a row."""
    if packed and hf_config.model_type in PADDED:
        raise UserError(
            f"rows of {hf_config.model_type} cannot be packed",
            where="model.use_remove_padding",
            why="transformers' class for this family computes attention over the whole pack",
            fix="set model.use_remove_padding=false; rows are then padded, and actor.use_dynamic_bsz must be false",
        )


def check_adapters(hf_config: Any) -> None:
    """Raise UserError if vLLM serves no adapters of this family."""
    if hf_config.model_type in WITHOUT_ADAPTERS:
        raise UserError(
            f"a model of the family {hf_config.model_type} cannot have adapters",
            where="lora.r",
            why="vLLM's class for this family serves none",
            fix="set lora.r=0 to train all weights",
        )


def check_family(hf_config: Any) -> None:
    """Raise UserError if this family was not compared between trainer and engine."""
    family = hf_config.model_type
    if family in FAMILIES or family in SHOWN:
        return
    raise UserError(
        f"models of the family {family} are refused, because trainer and rollout engine were never compared on one",
        where="model.path: config.json: model_type",
        why="vLLM's class for this family may compute a different model than transformers; then the policy that learns "
        "would differ from the policy that samples",
        fix=f"train a model of {', '.join(FAMILIES)}, or of a family with a measured mismatch: {', '.join(SHOWN)}; "
        "python -m benchmarks.proofs families measures other families",
    )


def shown_mismatch(hf_config: Any) -> str | None:
    """Return a sentence with the measured mismatch of a family in `SHOWN`, or None for other families."""
    mismatch = SHOWN.get(hf_config.model_type)
    if mismatch is None:
        return None
    return (
        f"for the family {hf_config.model_type}, a random model was compared only at level linears: "
        f"mean |δ| {mismatch:.0e} nats per token in W4A16"
    )
