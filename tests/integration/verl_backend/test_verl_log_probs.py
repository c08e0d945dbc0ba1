"""After an optimizer step, the log-probs of verl's engine are those of a local policy with the same masters.

verl casts the whole model to the masters' dtype, so BF16 masters are a way of their own through its engine. Every pair
of two columns occurs in `PAIRS`, every row in the slow test. test_align_engine.py compares the local policy with vLLM.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cpu_features import needs_w4a16_cpu
from fsdp_ranks import BANDS, OURS, QUANT, SETTINGS, as_batch, make_rows, run_engine
from random_models import save_random_model
from transformers import AutoModelForCausalLM

from qarl.config.level import Level
from qarl.quant import get_scheme
from qarl.quant.meta_model import wrong_buffers
from qarl.trainer.policy import Policy

pytest.importorskip("verl")
pytestmark = needs_w4a16_cpu

SCHEMES = ("w4a16", "w8a8", "fp8", "bf16")
Row = tuple[str, str, str, str, bool]
"""Family, scheme, dtype of the masters, optimizer, whether rows are packed."""


def row(scheme: str, family: int, masters: int, optimizer: int, packed: int) -> Row:
    chosen = ("fp32", "bf16")[masters], ("muon", "adamw")[optimizer], bool(packed)
    return ("qwen3", "qwen3_moe")[family], scheme, *chosen


PAIRS = [
    row(scheme, r ^ (s & 1) ^ (s >> 1), r, r ^ (s & 1), r ^ (s >> 1))
    for s, scheme in enumerate(SCHEMES)
    for r in (0, 1)
]
ALL = [row(scheme, *bits) for scheme in SCHEMES for bits in product((0, 1), repeat=4)]


UNQUANTIZED = {"quant": None, "steps": 1, "lr": 0.0}
"""verl's own forward, and an update that changes nothing."""


def job(wanted: Row) -> dict[str, Any]:
    _, scheme, masters, optimizer, packed = wanted
    engine = {"model_dtype": masters, "use_no_sync_for_gradient_accumulation": False}
    optim = OURS | {"override_optimizer_config": SETTINGS[optimizer]}
    common = {
        "quant": QUANT | {"scheme": scheme},
        "bands": BANDS,
        "lr": 1e-3,
        "micro": 2,
        "log_prob_micro": 4,
    }
    return common | {"engine": engine, "optim": optim, "remove_padding": packed, "steps": 2}


def differences(folder: Any, rows_wanted: list[Row], world: int) -> dict[Row, float]:
    """Run two steps of each row on `world` ranks. Return the largest |difference| of a log-prob after them."""
    largest: dict[Row, float] = {}
    for family in sorted({row[0] for row in rows_wanted}):
        model = str(save_random_model(folder / family, family))
        batch, chosen = make_rows(model), [row for row in rows_wanted if row[0] == family]
        results = run_engine(folder, world, model, batch, [job(row) for row in chosen])
        for row, outcome in zip(chosen, results, strict=True):
            expected = local_log_probs(model, row[1], outcome["masters"], batch)
            assert not torch.equal(
                expected, local_log_probs(model, row[1], {}, batch)
            )  # the steps moved the weights
            mask = batch["response_mask"]
            parts = []
            for mine, tensor in outcome["log_probs"]:
                difference = F.pad(tensor, (0, mask.shape[1] - tensor.shape[1])) - expected[mine]
                parts.append(difference[mask[mine]].abs().max())
            largest[row] = float(torch.stack(parts).max())
    return largest


def local_log_probs(
    model: str, scheme: str, masters: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    loaded.load_state_dict(
        {name: tensor.bfloat16() for name, tensor in masters.items()}, strict=False
    )
    assert not wrong_buffers(loaded)
    policy = Policy(loaded, get_scheme(scheme, group_size=32), ("lm_head",), align=Level.MODEL)
    with torch.no_grad():
        return policy.response_log_probs(as_batch(batch), slice(0, 8), temperature=1.0)


def test_log_probs_are_the_local_backends(tmp_path):
    assert differences(tmp_path, PAIRS, 2) == dict.fromkeys(PAIRS, 0.0)


def test_bf16_masters_of_an_unquantized_engine_compute_as_fp32_masters(tmp_path):
    """Without the section `quant` the forward is verl's own. Before an update both have the weights of the file."""
    model = str(save_random_model(tmp_path / "model", "qwen3"))
    jobs = [
        job(("qwen3", "bf16", masters, "adamw", False)) | UNQUANTIZED
        for masters in ("fp32", "bf16")
    ]
    wide, narrow = run_engine(tmp_path, 1, model, make_rows(model), jobs)
    assert {tensor.dtype for tensor in narrow["masters"].values()} == {torch.bfloat16}
    assert torch.equal(narrow["log_probs"][0][1], wide["log_probs"][0][1])


# `quant` of an actor, scheme of its engine, and the level whose limit on the noise applies to it.
COMPARED = {
    "linears": ({"scheme": "w4a16", "align": "linears"}, "w4a16", "model"),
    "off": ({"scheme": "w4a16", "align": "off"}, "w4a16", "model"),
    "experts": ({"scheme": "w4a16", "align": "off"}, "w4a16", "off"),
    "experts_at_linears": ({"scheme": "w4a16", "align": "linears"}, "w4a16", "model"),
}


def test_the_first_micro_batch_is_compared_with_the_engines_arithmetic(tmp_path):
    """The engine's log-probs pass, those of another model do not."""
    models = {
        name: str(save_random_model(tmp_path / name, name)) for name in ("qwen3", "qwen3_moe")
    }
    jobs = []
    for name, (quant, scheme, _) in COMPARED.items():
        model = models["qwen3_moe" if name.startswith("experts") else "qwen3"]
        rows = make_rows(model)
        healthy = local_log_probs(model, scheme, {}, rows) * rows["response_mask"]
        rows |= {"rollout_log_probs": healthy, "old_log_probs": healthy + 1e-6}
        settings = QUANT | quant | {"mismatch_limit": None}
        jobs.append(
            {
                "model": model,
                "rows": rows,
                "quant": settings,
                "micro": 2,
                "lr": 0.0,
                "guard": healthy + 0.1,
            }
        )
    outcomes = run_engine(tmp_path, 2, models["qwen3"], jobs[0]["rows"], jobs)
    for (_, _, level), outcome in zip(COMPARED.values(), outcomes, strict=True):
        assert all(f"quant.align={level} allows" in text for text in outcome["guard"]), outcome[
            "guard"
        ]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_all_rows(tmp_path, world):
    assert differences(tmp_path, ALL, world) == dict.fromkeys(ALL, 0.0)
