"""verl's FSDP2 engine with QaRL's layers and loss, on one and two gloo ranks without Ray, against the local backend."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from cpu_features import needs_w4a16_cpu
from fsdp_ranks import BANDS, QUANT, as_batch, load_policy, make_rows, run_engine, short_rows
from random_models import save_random_model
from transformers import AutoModelForCausalLM

from qarl.checkpoint.compressed_tensors import read_tensors
from qarl.checkpoint.export import ExportRequest, export
from qarl.errors import UserError
from qarl.quant import get_scheme, packed_state_dict
from qarl.quant.quantize import quantize
from qarl.tbpo import TBPOConfig, reduce_metrics, tbpo_loss
from qarl.trainer.policy import Policy

pytest.importorskip("verl")
pytestmark = needs_w4a16_cpu


def local_update(model: str, rows: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor], dict, Policy]:
    """The local backend's loss, gradient and metrics, in one micro-batch."""
    policy = load_policy(model)
    log_probs = policy.response_log_probs(as_batch(rows), slice(0, 8), temperature=1.0)
    loss, statistics = tbpo_loss(
        log_probs,
        rows["old_log_probs"],
        rows["rollout_log_probs"],
        rows["advantages"],
        rows["response_mask"],
        TBPOConfig(**BANDS),
    )
    loss.backward()
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, reduce_metrics([statistics]), policy


JOBS = [
    {"quant": QUANT, "bands": BANDS, "lr": 0.0, "micro": 4},
    {"quant": QUANT, "bands": BANDS, "lr": 0.0, "micro": 1},
    # Log-probs in one batching, updates in another, at learning rate 0: the bands are narrower than kernel noise.
    {"quant": QUANT, "bands": BANDS, "lr": 0.0, "micro": 1, "log_prob_micro": 4, "steps": 2},
    {"quant": QUANT, "bands": BANDS, "lr": 1e-2, "micro": 2},
]
PACKED = {
    "tokens": {**JOBS[0], "remove_padding": True, "tokens": 40},
    "tokens_without_learning": {**JOBS[2], "remove_padding": True, "tokens": 40},
}
"""Micro-batches of at most 40 tokens. With two ranks the second one has more tokens, and needs one more of them."""

SINGLE_RANK_JOBS = {
    "gradient_checkpointing": {**JOBS[0], "gradient_checkpointing": True},
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
def padded(model, tmp_path_factory) -> str:
    """`model` with eight ids that the tokenizer has not, as likely as the eight before."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("padded") / "model")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.resize_token_embeddings(72, mean_resizing=False)
    with torch.no_grad():
        for embedding in (loaded.get_input_embeddings(), loaded.get_output_embeddings()):
            embedding.weight[64:] = embedding.weight[56:64]
    loaded.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def results(checkpoints, model, padded, rows):
    folder = checkpoints[1].parent
    found = {}
    for world in (1, 2):
        checkpoint = {**JOBS[3], "checkpoint": str(checkpoints[world])}
        short = {**JOBS[2], "rows": (few := short_rows()), "log_prob_micro": 8, "micro": 2}
        shortest = few["response_lengths"].argsort()[:16].tolist()
        mini = {**short, "steps": 1, "update": [shortest[rank::world] for rank in range(world)]}
        single = SINGLE_RANK_JOBS | {"padded": {**JOBS[0], "model": padded}} if world == 1 else {}
        jobs = [*JOBS[:3], checkpoint, short, mini, *PACKED.values(), *single.values()]
        found[world] = run_engine(folder, world, model, rows, jobs)
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("job", [0, 1, 6])
def test_loss_and_gradient_are_those_of_the_local_backend(results, local, world, job):
    """However the mini-batch is split among ranks and micro-batches. Gradients of parts are rounded to BF16 before they
    are added: one BF16 step of the largest element is the bound."""
    loss, gradients, _, _ = local
    found = results[world][job]
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["gradients"].keys() == gradients.keys()
    for name, expected in gradients.items():
        expected, actual = expected.float(), found["gradients"][name].float()
        assert float((actual - expected).abs().max()) <= 2**-7 * float(expected.abs().max()), name
        assert float((actual - expected).norm()) <= 2**-7 * float(expected.norm()), name


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
def test_micro_batches_by_tokens_hold_every_token_once_on_all_ranks(results, rows, world):
    """Each rank runs as many forwards, for FSDP's collectives, also if its own tokens need fewer."""
    lengths = rows["prompt_lengths"] + rows["response_lengths"]
    totals = [int(lengths[rank::world].sum()) for rank in range(world)]
    widths = results[world][6]["widths"]
    assert [sum(one) for one in widths] == totals
    assert len({len(one) for one in widths}) == 1 and max(map(max, widths)) <= 40
    needed = [-(-total // 40) for total in totals]
    assert len(widths[0]) == max(needed)
    assert world == 1 or min(needed) < max(needed)


@pytest.mark.parametrize("world", [1, 2])
def test_weights_are_quantized_once_an_optimizer_step(results, world):
    # Two micro-batches a rank or more: the forward of the first made them.
    assert set(results[world][1]["made"]) == {1}
    assert not any(found["made_again"] for found in results[world])  # by a second publish


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_published_is_what_the_local_quantizer_makes(results, local, world):
    expected = dict(packed_state_dict(local[3].model))
    published = results[world][0]["published"]
    assert published.keys() == expected.keys()
    for name, tensor in expected.items():
        assert published[name].dtype == tensor.dtype and torch.equal(published[name], tensor), name


@pytest.mark.parametrize("world", [1, 2])
def test_an_update_publishes_the_bf16_cast_of_the_new_masters(results, world):
    before, after = results[world][0]["published"], results[world][3]
    assert not torch.equal(before["model.norm.weight"], after["published"]["model.norm.weight"])
    for name, master in after["masters"].items():
        assert master.dtype == torch.float32
        layer = name.removesuffix(".weight")
        if f"{layer}.weight_packed" not in after["published"]:
            assert torch.equal(after["published"][name], master.bfloat16()), name
            continue
        expected = quantize(master.bfloat16(), get_scheme("w4a16", group_size=32), name=name)
        for wire_name, tensor in expected.named(layer):
            assert torch.equal(after["published"][wire_name], tensor), wire_name


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_brings_back_what_was_published(results, world):
    found = results[world][3]
    assert not torch.equal(found["changed"]["model.norm.weight"], found["published"]["model.norm.weight"])
    assert found["loaded"].keys() == found["published"].keys()
    for name, tensor in found["published"].items():
        assert torch.equal(found["loaded"][name], tensor), name


@pytest.mark.parametrize("world", [1, 2])
def test_the_version_counts_training_steps_and_comes_back_with_a_checkpoint(results, world):
    assert [found["version"] for found in results[world][:5]] == [1, 1, 2, 1, 2]
    found = results[world][3]
    assert (found["changed_version"], found["loaded_version"]) == (2, 1)


def as_run(folder: Path, checkpoint: Path) -> Path:
    """A run folder, as the verl backend leaves it, with `checkpoint` as its only one."""
    step = folder / "run" / "checkpoints" / "global_step_1"
    shutil.copytree(checkpoint, step / "actor")
    torch.save({}, step / "data.pt")
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump({"quant": QUANT}))
    return folder / "run"


@pytest.mark.parametrize("world", [1, 2])
def test_the_export_of_a_checkpoint_is_what_was_published(results, checkpoints, tmp_path, world):
    run, published = as_run(tmp_path, checkpoints[world]), results[world][3]["loaded"]
    for kind in ("quantized", "fp32"):
        export(ExportRequest(run, tmp_path / kind, format=kind))
    exported, masters = (dict(read_tensors(tmp_path / kind)) for kind in ("quantized", "fp32"))
    assert exported.keys() == published.keys()
    for name, tensor in published.items():
        assert exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor), name
    for name, master in results[world][3]["masters"].items():
        assert torch.equal(masters[name], master), name


def test_files_of_the_wrong_ranks_are_refused(results, checkpoints, tmp_path):
    """As many files as there are ranks, and not theirs."""
    run = as_run(tmp_path, checkpoints[2])
    actor = run / "checkpoints/global_step_1/actor"
    (actor / "model_world_size_2_rank_1.pt").rename(actor / "model_world_size_2_rank_2.pt")
    with pytest.raises(UserError, match="lacks the weights of rank 1"):
        export(ExportRequest(run, tmp_path / "out"))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("file", "entry"),
    [("model", "model.model.norm.weight"), ("extra_state", "rng.cpu"), ("optim", "optimizer.0.exp_avg")],
)
def test_a_checkpoint_with_a_wrong_file_is_refused_with_the_entrys_name(results, world, file, entry):
    """One bit of one weight; a random-number generator one number further on; one moment."""
    assert entry in results[world][3][f"damaged_{file}"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("parts", ["model_extra", "model"])
def test_parts_that_verl_was_told_to_leave_out_are_not_missed(results, world, parts):
    found = results[world][3]["parts"][parts]
    before, between, after = found["tensors"]
    assert found["error"] == ""
    assert not torch.equal(between["model.norm.weight"], before["model.norm.weight"])
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("world", [1, 2])
def test_the_rollouts_log_probs_as_the_trainers_are_refused(results, world):
    """verl's bypass mode."""
    assert all("rollout_correction.bypass_mode" in found["bypass"] for found in results[world])


def test_gradient_checkpointing_changes_no_bit(results):
    plain, found = results[1][0], single(results, "gradient_checkpointing")
    assert found["loss"] == plain["loss"]
    assert all(torch.equal(found["gradients"][name], tensor) for name, tensor in plain["gradients"].items())


def test_ids_without_a_token_take_no_probability(results):
    plain, found = results[1][0], results[1][-1]
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert found["metrics"][0]["mismatch/k3"] == [pytest.approx(plain["metrics"][0]["mismatch/k3"][0], rel=1e-5)]


def test_offloading_changes_no_bit_of_an_8_bit_scheme(results):
    resident, offloaded = single(results, "fp8"), single(results, "fp8_offloaded")
    assert offloaded["loss"] == resident["loss"]
    published = resident["published"]
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in published.values())
    assert offloaded["published"].keys() == published.keys()
    for name, tensor in published.items():
        assert torch.equal(offloaded["published"][name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_packed_rows_give_the_loss_of_padded_ones(results):
    """The bound on gradients is one BF16 step, as for splits: products of other sizes sum in another order."""
    plain, found = results[1][0], single(results, "remove_padding")
    assert found["loss"] == plain["loss"]
    for name, expected in plain["gradients"].items():
        expected, actual = expected.float(), found["gradients"][name].float()
        assert float((actual - expected).norm()) <= 2**-7 * float(expected.norm()), name
    for metrics in single(results, "remove_padding_without_learning")["metrics"]:
        assert metrics["actor/seq_ratio_abs_dev_max"][0] == 0
