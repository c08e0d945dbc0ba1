"""Model families: those that are aligned, and those of which a mismatch at `linears` was shown.

A family that vLLM serves with its own class may still be another model there: a multiplier that one side applies,
a router that rounds otherwise, a layer that a publish does not reach. So a family is trained only if trainer and
engine were compared on a random model of it; the rest is refused by name before anything runs.
"""

from __future__ import annotations

from typing import Any

from qarl.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Every key of their configs has a verdict, and levels `model` and `exact` are built for them."""

LARGEST_SHARE = 0.1
"""A family agrees if its mean |δ| at `linears` is at most this fraction of its mean |δ| at `off`, where W4A16 alone
causes the mismatch. It is a fraction because a family that scales its logits down has a small δ whatever the mistake.
Llama's fraction is 0.03."""
SHOWN = {
    "arcee": 7.5e-3,
    "cohere": 2.8e-4,
    "cwm": 7.7e-3,
    "ernie4_5": 7.1e-3,
    "exaone4": 8.1e-3,
    "falcon": 3.1e-3,
    "gemma": 9.9e-4,
    "gemma2": 5.0e-3,
    "gemma3_text": 5.0e-3,
    "granite": 1.5e-2,
    "jais2": 6.1e-3,
    "mistral": 7.8e-3,
    "nemotron": 1.7e-2,
    "seed_oss": 7.0e-3,
}
"""Family -> mean |δ| at `linears` in W4A16, in nats a token, of benchmarks/results/families_cpu.json, where Llama's is
8e-3. A test holds the two together."""


def check_family(hf_config: Any) -> None:
    """UserError for a family that was never compared with the engine."""
    family = hf_config.model_type
    if family in FAMILIES or family in SHOWN:
        return
    raise UserError(
        f"models of the family {family} are refused: trainer and rollout engine were never shown to agree on one",
        where="model.path: config.json: model_type",
        why="vLLM has its own class for them; a part that one side alone has would train another policy than the one "
        "that samples",
        fix=f"train a model of {', '.join(FAMILIES)}, or of a family with a measured mismatch: {', '.join(SHOWN)}; "
        "scripts/config_mismatch.py families measures others",
    )


def shown_mismatch(hf_config: Any) -> str | None:
    """The measured mismatch of a family outside `FAMILIES`, in words."""
    found = SHOWN.get(hf_config.model_type)
    if found is None:
        return None
    return (
        f"of the family {hf_config.model_type} random models were compared at linears alone: "
        f"mean |δ| {found:.0e} nats a token in W4A16"
    )
