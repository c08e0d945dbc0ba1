"""verl's FSDP2 engine with QaRL's layers and loss, on one and two gloo ranks without Ray, against the local backend."""

from __future__ import annotations

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from fsdp_ranks import (
    BANDS,
    QUANT,
    assert_same_gradients,
    local_update,
    make_rows,
    run_engine,
    short_rows,
)
from random_models import save_random_model

pytest.importorskip("verl")
pytestmark = needs_w4a16_cpu


JOB = {"quant": QUANT, "bands": BANDS, "lr": 0.0, "micro": 1}
JOBS = [
    JOB | {"micro": 4},
    JOB,
    # Log-probs in one batching, updates in another, at learning rate 0: the bands are narrower than kernel noise.
    JOB | {"log_prob_micro": 4, "steps": 2},
    JOB | {"lr": 1e-2, "micro": 2},
]
PACKED = [{**job, "remove_padding": True, "tokens": 40} for job in (JOBS[0], JOBS[2])]
"""Micro-batches of at most 40 tokens. With two ranks the second one has more tokens, and needs one more of them."""

SINGLE_RANK_JOBS = {
    "remove_padding": {**JOBS[0], "remove_padding": True, "gradient_checkpointing": True},
    "remove_padding_without_learning": {**JOBS[2], "remove_padding": True},
    "fp8": {**JOBS[3], "quant": QUANT | {"scheme": "fp8"}},
    "fp8_offloaded": {
        **JOBS[3],
        "quant": QUANT | {"scheme": "fp8"},
        "engine": {"param_offload": True, "optimizer_offload": True},
    },
}
"""Settings that the GPU configs switch on and a CPU would do without."""


def single(results, name: str) -> dict:
    return results[1][8 + list(SINGLE_RANK_JOBS).index(name)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_random_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def rows(model):
    return make_rows(model)


@pytest.fixture(scope="module")
def local(model, rows):
    return local_update(model, rows)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of each number of ranks' checkpoint."""
    folder = tmp_path_factory.mktemp("engine")
    return {world: folder / f"checkpoint{world}" for world in (1, 2)}


@pytest.fixture(scope="module")
def results(checkpoints, model, rows):
    folder = checkpoints[1].parent
    by_world = {}
    for world in (1, 2):
        checkpoint = {**JOBS[3], "checkpoint": str(checkpoints[world])}
        short = {**JOBS[2], "rows": (few := short_rows()), "log_prob_micro": 8, "micro": 2}
        shortest = few["response_lengths"].argsort()[:16].tolist()
        mini = {**short, "steps": 1, "update": [shortest[rank::world] for rank in range(world)]}
        single = SINGLE_RANK_JOBS.values() if world == 1 else ()
        jobs = [*JOBS[:3], checkpoint, short, mini, *PACKED, *single]
        by_world[world] = run_engine(folder, world, model, rows, jobs)
    return by_world


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("job", [0, 1, 6])
def test_loss_and_gradient_are_those_of_the_local_backend(results, local, world, job):
    """However the mini-batch is split among ranks and micro-batches."""
    outcome = results[world][job]
    assert outcome["loss"] == pytest.approx(local[0], rel=1e-5)
    assert_same_gradients(outcome["gradients"], local[1])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("job", [0, 1, 6])
def test_metrics_are_those_of_the_whole_mini_batch(results, local, world, job):
    expected = local[2]
    (metrics,) = results[world][job]["metrics"]
    for name, value in expected.items():
        assert metrics[name] == [pytest.approx(value, rel=1e-4, abs=1e-6)], name
    assert metrics["mismatch/k3"][0] > 1e-3


@pytest.mark.parametrize("world", [1, 2])
def test_without_learning_the_ratio_stays_one_though_batches_differ(results, world):
    """Job 5 updates with the shortest rows alone; two ranks do not know each other's log-probs. Job 7 has micro-batches
    by tokens, of another size in the update."""
    for job in (2, 4, 7, *([5] if world == 1 else [])):
        for metrics in results[world][job]["metrics"]:
            assert metrics["actor/seq_ratio_abs_dev_max"][0] == 0, job


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_brings_back_what_was_published(results, world):
    outcome = results[world][3]
    assert not torch.equal(
        outcome["changed"]["model.norm.weight"], outcome["published"]["model.norm.weight"]
    )
    assert outcome["loaded"].keys() == outcome["published"].keys()
    for name, tensor in outcome["published"].items():
        assert torch.equal(outcome["loaded"][name], tensor), name


@pytest.mark.parametrize("world", [1, 2])
def test_the_version_counts_training_steps_and_comes_back_with_a_checkpoint(results, world):
    assert [outcome["version"] for outcome in results[world][:5]] == [1, 1, 2, 1, 2]
    outcome = results[world][3]
    assert (outcome["changed_version"], outcome["loaded_version"]) == (2, 1)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("file", "entry"),
    [
        ("model", "model.model.norm.weight"),
        ("extra_state", "rng.cpu"),
        ("optim", "optimizer.0.exp_avg"),
    ],
)
def test_a_checkpoint_with_a_wrong_file_is_refused_with_the_entrys_name(
    results, world, file, entry
):
    """One bit of one weight; a random-number generator one number further on; one moment."""
    assert entry in results[world][3][f"damaged_{file}"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("parts", ["model_extra", "model"])
def test_parts_that_verl_was_told_to_leave_out_are_not_missed(results, world, parts):
    outcome = results[world][3]["parts"][parts]
    before, between, after = outcome["tensors"]
    assert outcome["error"] == ""
    assert not torch.equal(between["model.norm.weight"], before["model.norm.weight"])
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("world", [1, 2])
def test_the_rollouts_log_probs_as_the_trainers_are_refused(results, world):
    """verl's bypass mode."""
    assert all("rollout_correction.bypass_mode" in outcome["bypass"] for outcome in results[world])


def test_offloading_changes_no_bit_of_an_8_bit_scheme(results):
    resident, offloaded = single(results, "fp8"), single(results, "fp8_offloaded")
    assert offloaded["loss"] == resident["loss"]
    published = resident["published"]
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in published.values())
    assert offloaded["published"].keys() == published.keys()
    for name, tensor in published.items():
        assert torch.equal(
            offloaded["published"][name].view(torch.uint8), tensor.view(torch.uint8)
        ), name


def test_packed_rows_give_the_loss_of_padded_ones(results):
    """The bound on gradients is one BF16 step, as for splits: products of other sizes sum in another order."""
    plain, packed = results[1][0], single(results, "remove_padding")
    assert packed["loss"] == plain["loss"]
    assert_same_gradients(packed["gradients"], plain["gradients"])
    for metrics in single(results, "remove_padding_without_learning")["metrics"]:
        assert metrics["actor/seq_ratio_abs_dev_max"][0] == 0
