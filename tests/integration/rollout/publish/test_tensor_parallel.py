"""Publishes to one worker of several: it must hold what vLLM's own loader gives that worker from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from random_models import save_random_model
from random_moe import IGNORE, near, save_checkpoint, save_random_moe, wire_tensors
from torch import nn

pytest.importorskip("vllm")

from worker_models import distributed_vllm, multiplied, worker_model

from qarl.checks.check import RunInputs
from qarl.checks.layers import split_errors
from qarl.config import load_config
from qarl.errors import UserError
from qarl.process import configure_vllm_process
from qarl.quant import Scheme, get_scheme
from qarl.quant.experts import stacked
from qarl.rollout.publish.manifest import expected_manifest
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.wire import DeltaSender, encode_publish

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]
SIZES: dict[str, Any] = {"vocab_size": 70, "intermediate_size": 256}
"""70 tokens are padded to 128, of which 4 workers hold 32, 32, 6 and 0 that exist."""


class Checkpoints(NamedTuple):
    scheme: Scheme
    folders: tuple[Path, Path]
    tensors: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    configure_vllm_process()
    with distributed_vllm():
        yield


def save_dense(folder: Path) -> Path:
    """A Llama, whose every linear has a bias."""
    return save_random_model(folder, "llama", attention_bias=True, mlp_bias=True, **SIZES)


def save_mixture(folder: Path) -> Path:
    """A Qwen2-MoE: routed experts, a shared expert, biases of q, k and v."""
    sizes = {
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_hidden_layers": 1,
    }
    return save_random_moe(folder, "qwen2_moe", **SIZES, **sizes)


@pytest.fixture(scope="module", params=["bf16", "w4a16", "w8a8", "fp8"])
def scheme(request: pytest.FixtureRequest) -> Scheme:
    return get_scheme(request.param, 32)


@pytest.fixture(scope="module", params=[save_dense, save_mixture], ids=["dense", "experts"])
def checkpoints(
    request: pytest.FixtureRequest, scheme: Scheme, tmp_path_factory: Any
) -> Checkpoints:
    root = tmp_path_factory.mktemp("models")
    like = request.param(root / "like")
    first = wire_tensors(like, scheme)
    tensors = first, near(first, wire_tensors(like, scheme, noise_seed=1))
    folders = tuple(save_checkpoint(root / str(i), like, scheme, tensors[i]) for i in range(2))
    return Checkpoints(scheme, (folders[0], folders[1]), tensors)


def receiver_of(model: nn.Module, config: Any, scheme: Scheme) -> StreamReceiver:
    expected = expected_manifest(config.model_config.hf_config, scheme, IGNORE)
    return StreamReceiver(EngineWeights(model, config, expected, kv_caches=list))


def check_equal(written: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert written.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(written[name], wanted[name])] == []


@pytest.mark.parametrize(("rank", "workers"), [(0, 2), (1, 2), (3, 4)])
def test_a_worker_holds_what_vllms_loader_gives_it(
    checkpoints: Checkpoints, rank: int, workers: int
) -> None:
    """A, B, A, B, the last two as deltas. With 4 workers, two share a key-value head."""
    model, config = worker_model(checkpoints.folders[0], rank, workers)
    first, second = (
        multiplied(model),
        multiplied(worker_model(checkpoints.folders[1], rank, workers)[0]),
    )
    assert all(torch.isfinite(tensor).all() for tensor in first.values())
    assert any(not torch.equal(first[name], second[name]) for name in first)
    receiver, sender = receiver_of(model, config, checkpoints.scheme), DeltaSender()
    if not (
        checkpoints.scheme.name == "w8a8" and torch.cpu._is_amx_tile_supported()
    ):  # vLLM packs int8 for AMX
        assert all(target.stored is not None for target in receiver.weights.plan.by_owner.values())
    for version, which in enumerate((1, 0, 1, 0, 1)):
        tensors = checkpoints.tensors[which]
        stream = encode_publish(stacked(tensors.items()), version=version)
        if version >= 2:
            fingerprint = receiver.fingerprint
            stream = sender.stream(
                stacked(tensors.items()), version=version, receivers=[fingerprint]
            )
        receiver.feed(stream)
        assert sender.tally.known == (version > 2)
        check_equal(multiplied(model), (first, second)[which])


@pytest.mark.parametrize(
    ("family", "sizes", "workers", "splits"),
    [
        ("qwen3", {"intermediate_size": 256}, 4, True),
        ("qwen3", {"intermediate_size": 192}, 4, False),  # 48 inputs of down_proj, groups of 32
        (
            "qwen3",
            {"num_attention_heads": 6, "hidden_size": 192, "head_dim": 16, "intermediate_size": 64},
            2,
            False,
        ),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 64},
            4,
            False,
        ),  # 16 inputs of an expert's down_proj
        ("qwen2_moe", {"shared_expert_intermediate_size": 96}, 2, False),
    ],
)
def test_a_run_is_refused_if_vllm_cannot_split_the_model(
    family: str, sizes: dict[str, Any], workers: int, splits: bool, tmp_path: Path
) -> None:
    """`qarl.checks.layers.split_errors` before anything is loaded, and vLLM in its worker."""
    scheme = get_scheme("w4a16", 32)
    folder = (save_random_moe if "moe" in family else save_random_model)(
        tmp_path / "model", family, **sizes
    )
    config = load_config(
        [
            f"config={ROOT / 'configs/quickstart_moe.yaml'}",
            *(
                "backend=verl",
                f"model.path={folder}",
                "trainer.n_gpus_per_node=4",
                "quant.group_size=32",
            ),
            f"rollout.tensor_model_parallel_size={workers}",
        ]
    )
    with nullcontext() if splits else pytest.raises(UserError, match="along their inputs"):
        run = RunInputs(config)
        for error in split_errors(config, run.hf_config, run.quantized):
            raise error
    overrides = {"quantization_config": scheme.quantization_config(list(IGNORE))}
    with nullcontext() if splits else pytest.raises((UserError, ValueError, AssertionError)):
        worker_model(folder, 0, workers, load_format="dummy", hf_overrides=overrides)
