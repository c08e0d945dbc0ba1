"""Model families that can be trained, and what each says of itself.

vLLM's class for a family may compute a different model than transformers. For example, only one side applies a
multiplier, a router rounds differently, or a publish does not reach a layer. So QaRL trains only families for which
trainer and engine were compared on a random model. It refuses all other families before anything runs.
"""

from __future__ import annotations

from typing import Any

from qarl.errors import UserError
from qarl.families import aligned, measured
from qarl.families.base import Family

ALIGNED = {family.name: family for family in aligned.FAMILIES}
"""Families with levels `model` and `exact`."""
MEASURED = {family.name: family for family in measured.FAMILIES}
"""Families that were compared only at level `linears`."""


def register(family: Family) -> Family:
    """Add a family with levels `model` and `exact`, and return it. A plugin can do so (`qarl.plugins`).

    Raises:
        UserError: the name belongs to another family, or the family has no levels above `linears`. At `linears` the
            keys that both sides read decide what is refused, and QaRL has read them only for families of its own.
    """
    if family_named(family.name) not in (family, Family(family.name)):
        raise UserError(
            f"there already is a family {family.name!r}",
            where="qarl.families.register",
            fix="give the model_type of the config another name",
        )
    if not family.aligned:
        raise UserError(
            f"the family {family.name!r} has no level above linears",
            where="qarl.families.register",
            why="its config keys would not be compared",
            fix="set aligned=True and say in `layers` how, or add the family to qarl/families/measured.py",
        )
    return ALIGNED.setdefault(family.name, family)


def unregister(name: str) -> None:
    """Take back `register`."""
    del ALIGNED[name]


def family_named(name: str) -> Family:
    """Return the family that transformers calls `name`. One that QaRL does not train says nothing of itself."""
    return ALIGNED.get(name) or MEASURED.get(name) or Family(name)


def family_of(hf_config: Any) -> Family:
    """Return the family of a transformers config."""
    return family_named(hf_config.model_type)


def names_with_plain_heads() -> str:
    """Return the names of the families whose logits are lm_head's unchanged output, for an error."""
    return ", ".join(name for name, family in ALIGNED.items() if family.plain_head)


def check_rows(hf_config: Any, packed: bool) -> None:
    """Raise UserError if rows would be packed although this family's attention does not stop at the end of a row."""
    if packed and not family_of(hf_config).packs:
        raise UserError(
            f"rows of {hf_config.model_type} cannot be packed",
            where="model.use_remove_padding",
            why="transformers' class for this family computes attention over the whole pack",
            fix="set model.use_remove_padding=false; rows are then padded, and actor.use_dynamic_bsz must be false",
        )


def check_adapters(hf_config: Any) -> None:
    """Raise UserError if vLLM serves no adapters of this family."""
    if not family_of(hf_config).adapters:
        raise UserError(
            f"a model of the family {hf_config.model_type} cannot have adapters",
            where="lora.r",
            why="vLLM's class for this family serves none",
            fix="set lora.r=0 to train all weights",
        )


def check_family(hf_config: Any) -> None:
    """Raise UserError if this family was not compared between trainer and engine."""
    if family_of(hf_config).trained:
        return
    raise UserError(
        f"models of the family {hf_config.model_type} are refused, because trainer and rollout engine were never "
        "compared on one",
        where="model.path: config.json: model_type",
        why="vLLM's class for this family may compute a different model than transformers; then the policy that learns "
        "would differ from the policy that samples",
        fix=f"train a model of {', '.join(ALIGNED)}, or of a family with a measured mismatch: {', '.join(MEASURED)}; "
        "python -m benchmarks.proofs families measures other families",
    )


def shown_mismatch(hf_config: Any) -> str | None:
    """Return a sentence with the mismatch of a family that was compared only at `linears`, or None for others."""
    mismatch = family_of(hf_config).linears_mismatch
    if mismatch is None:
        return None
    return (
        f"for the family {hf_config.model_type}, a random model was compared only at level linears: "
        f"mean |δ| {mismatch:.0e} nats per token in W4A16"
    )
