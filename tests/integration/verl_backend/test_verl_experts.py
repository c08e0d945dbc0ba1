"""A mixture of experts in verl's FSDP2 engine, on one and two gloo ranks without Ray, against the local backend."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cpu_features import needs_w4a16_cpu
from fsdp_ranks import (
    BANDS,
    QUANT,
    as_batch,
    assert_same_gradients,
    load_policy,
    local_update,
    make_rows,
    run_engine,
)
from random_models import save_random_model
from same_bytes import same_bytes

from qarl.align.router import recorded_routing
from qarl.checkpoint.export import ExportRequest, export
from qarl.checkpoint.model_files import read_tensors
from qarl.quant import get_scheme, packed_state_dict, quantize
from qarl.quant.experts import matrices, stacked, unstacked

pytest.importorskip("verl")
pytestmark = [needs_w4a16_cpu, pytest.mark.verl]

SCHEMES = ("w4a16", "bf16", "w8a8", "fp8")
JOBS = [
    {"quant": QUANT | {"scheme": scheme}, "bands": BANDS, "lr": lr, "micro": 1}
    for scheme in SCHEMES
    for lr in (0, 0.01)
]
REPLAYED = {"lr": 0, "micro": 1, "log_prob_micro": 2, "remove_padding": True}
REPLAYED |= {
    "quant": {"scheme": "w4a16", "group_size": 32, "ignore": ["lm_head"], "align": "linears"}
}
RECOMPUTED = [job | {"gradient_checkpointing": True} for job in JOBS[::2]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_random_model(tmp_path_factory.mktemp("model"), "qwen3_moe"))


@pytest.fixture(scope="module")
def rows(model: str) -> dict[str, torch.Tensor]:
    return make_rows(model)


@pytest.fixture(scope="module")
def routed(model: str, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`rows` from an engine: with its experts [8, tokens, layers, k], and its log-probs."""
    policy = load_policy(model)
    with torch.no_grad(), recorded_routing(policy.model) as record:
        exact = policy.response_log_probs(as_batch(rows), slice(0, 8), temperature=1.0)
    lengths = (
        rows["prompt_lengths"] + rows["response_mask"].sum(1)
    ).tolist()  # the local backend skips masked tokens
    experts = torch.nn.utils.rnn.pad_sequence(
        record.experts()[: sum(lengths)].split(lengths), batch_first=True
    )
    experts = torch.nn.functional.pad(
        experts, (0, 0, 0, 0, 0, rows["input_ids"].shape[1] - experts.shape[1])
    )
    return rows | {"routed_experts": experts, "rollout_log_probs": exact}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("engine")
    return {world: folder / f"checkpoint{world}" for world in (1, 2)}


@pytest.fixture(scope="module")
def results(
    checkpoints: dict[int, Path],
    model: str,
    rows: dict[str, torch.Tensor],
    routed: dict[str, torch.Tensor],
) -> dict[int, list[dict[str, Any]]]:
    by_world = {}
    for world, checkpoint in checkpoints.items():
        replays = REPLAYED | {"rows": routed}
        jobs = [
            JOBS[0],
            {**JOBS[1], "checkpoint": str(checkpoint)},
            *JOBS[2:],
            *RECOMPUTED,
            replays,
        ]
        by_world[world] = run_engine(checkpoint.parent, world, model, rows, jobs)
    return by_world


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_loss_gradient_and_publish_are_those_of_the_local_backend(
    results: Any, model: str, rows: dict[str, torch.Tensor], scheme: str, world: int
) -> None:
    loss, gradients, _, policy = local_update(model, rows, scheme)
    outcome = results[world][2 * SCHEMES.index(scheme)]
    assert outcome["loss"] == pytest.approx(loss, rel=1e-5)
    assert any("gate_up_proj" in name for name in gradients)
    assert_same_gradients(outcome["gradients"], gradients)
    published = dict(packed_state_dict(policy.model, stacks=True))
    assert outcome["published"].keys() == published.keys()
    assert all(same_bytes(tensor, outcome["published"][name]) for name, tensor in published.items())
    assert set(outcome["made"]) == {0 if scheme == "bf16" else 1}  # BF16: nothing to quantize
    assert not outcome["made_again"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradient_checkpointing_gives_the_same_gradients(
    results: Any, scheme: str, world: int
) -> None:
    number = SCHEMES.index(scheme)
    plain, recomputed = (
        results[world][job]["gradients"] for job in (2 * number, len(JOBS) + number)
    )
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


@pytest.mark.parametrize("world", [1, 2])
def test_micro_batches_of_the_update_replay_their_own_tokens(results: Any, world: int) -> None:
    """The last micro-batch of the pass for old log-probs has another number of tokens."""
    metrics = results[world][-1]["metrics"][0]
    assert (
        metrics["mismatch/abs_mean"][0] < 0.05 and metrics["mismatch/other_experts_frac"][0] < 0.1
    )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_update_publishes_the_new_experts_one_by_one(
    results: Any, scheme: str, world: int
) -> None:
    before, after = (results[world][2 * SCHEMES.index(scheme) + i] for i in (0, 1))
    moved = 0
    for name, master in after["masters"].items():
        for _, expert, rows in matrices(name, tuple(master.shape)) if ".experts." in name else ():
            weight = master[expert, rows].bfloat16()
            wire = (
                {"weight": weight}
                if scheme == "bf16"
                else quantize(weight, get_scheme(scheme, 32)).tensors
            )
            for leaf, tensor in wire.items():
                if leaf != "weight_shape":
                    new, old = (
                        outcome["published"][f"{name}.{leaf}"][expert, rows]
                        for outcome in (after, before)
                    )
                    assert same_bytes(new, tensor)
                    moved += not same_bytes(old, tensor)
    assert moved > 8


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_comes_back_and_exports_what_was_published(
    results: Any, checkpoints: dict[int, Path], tmp_path: Path, world: int
) -> None:
    outcome = results[world][1]
    published = outcome["published"]
    assert outcome["loaded"].keys() == published.keys()
    assert all(torch.equal(outcome["loaded"][name], tensor) for name, tensor in published.items())
    step = tmp_path / "run" / "checkpoints" / "global_step_1"
    shutil.copytree(checkpoints[world], step / "actor")
    torch.save({}, step / "data.pt")
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"quant": QUANT}))
    for kind in ("quantized", "fp32"):
        export(ExportRequest(tmp_path / "run", tmp_path / kind, format=kind))
    exported, masters = (dict(read_tensors(tmp_path / kind)) for kind in ("quantized", "fp32"))
    exported = dict(stacked(exported.items()))
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in published.items())
    assert all(
        torch.equal(masters[name], master) for name, master in unstacked(outcome["masters"].items())
    )
