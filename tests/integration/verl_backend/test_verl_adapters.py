"""Adapters in verl: the FSDP2 engine on one and two ranks against the local backend, the server that names the adapter
of each request, and whole runs (docs/do/lora.md)."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bad_runs import row, write_rows
from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from fresh_vllm import greedy_in_a_fresh_vllm
from fsdp_ranks import (
    BANDS,
    LORA,
    QUANT,
    assert_same_gradients,
    local_update,
    make_rows,
    run_engine,
)
from pefts_adapters import TARGETS, save_pefts
from random_models import save_random_model
from safetensors.torch import load_file
from verl_runs import REWARD, quickstart, run_quickstart

from qarl.config.lora import engine_rank
from qarl.errors import UserError
from qarl.lora.adapter import with_rank
from qarl.metrics.tracker import read_metrics
from qarl.process import answer_for_vllm
from qarl.rollout.adapter_spec import spec_of_worker
from qarl.rollout.remote.records import BEGIN, COMMIT, UNIT, read_record

pytest.importorskip("verl")

from omegaconf import OmegaConf

from qarl.verl.checks import check_composed
from qarl.verl.run import verl_config

pytestmark = [needs_w4a16_cpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_random_model(tmp_path_factory.mktemp("model")))


CASES = {
    "r=8": (LORA, False),
    "r=8, tied": (LORA, True),
    "r=1: a rank has no row of A": ({"r": 1, "alpha": 2}, False),
    "r=3, begun from peft's": ({"r": 3, "alpha": 12, "path": ""}, False),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request, tmp_path_factory, model):
    """The section `lora`, and a model. verl gives all ranks the weights of one that is tied."""
    lora, tied = request.param
    if "path" in lora:
        folder = tmp_path_factory.mktemp("peft")
        save_pefts(Path(model), folder, r=lora["r"], lora_alpha=lora["alpha"])
        return lora | {"path": str(folder), "target_modules": sorted(TARGETS)}, model
    return lora, str(
        save_random_model(tmp_path_factory.mktemp("tied"), tie=True)
    ) if tied else model


@pytest.fixture(scope="module")
def rows(case):
    return make_rows(case[1])


@pytest.fixture(scope="module")
def local(case, rows):
    lora, model = case
    return local_update(model, rows, lora=lora)


@pytest.fixture(scope="module")
def results(case, rows, tmp_path_factory):
    lora, model = case
    job = {
        "quant": QUANT | {"lora": lora},
        "bands": BANDS,
        "lr": 1e-2,
        "micro": 2,
        "engine": {"model_dtype": "bf16"},
    }
    folder = tmp_path_factory.mktemp("engine")
    jobs = {world: job | {"checkpoint": str(folder / f"step{world}")} for world in (1, 2)}
    return {world: run_engine(folder, world, model, rows, [jobs[world]])[0] for world in (1, 2)}


@pytest.mark.parametrize("world", [1, 2])
def test_loss_and_gradients_are_those_of_the_local_backend(results, local, world):
    loss, gradients = results[world]["update"]
    assert loss == pytest.approx(local[0], rel=1e-5)
    assert gradients and all("lora_" in name for name in gradients)
    assert_same_gradients(gradients, local[1])


@pytest.mark.parametrize("world", [1, 2])
def test_a_publish_has_the_base_only_if_a_server_lacks_it(case, results, local, world):
    first, second = (
        [(name.split("#")[0], tensor) for name, tensor in s] for s in results[world]["streams"]
    )
    base = dict(local[3].published_tensors())
    rank = engine_rank(case[0]["r"])
    states = results[world]["states"][0]
    adapter = {name: with_rank(name, t.bfloat16(), rank) for name, t in states.items()}
    for stream, expected in (
        (first, [*base.items(), *adapter.items()]),
        (second, list(adapter.items())),
    ):
        sent = [item for item in stream if item[0] not in (BEGIN, UNIT, COMMIT)]
        assert [name for name, _ in sent] == [name for name, _ in expected]
        assert all(
            torch.equal(tensor, wanted)
            for (_, tensor), (_, wanted) in zip(sent, expected, strict=True)
        )
        begins = [read_record(name, tensor) for name, tensor in stream if name == BEGIN]
        lora, model = case
        assert begins[-1]["adapter"] == {
            "r": rank,
            "alpha": rank * lora["alpha"] / lora["r"],
            "targets": [*local[3].adapters.targets],
            "base": model,
        }
    assert "separate rollout workers" in results[world]["separate"]


@pytest.mark.parametrize("world", [1, 2])
def test_from_a_checkpoint_the_next_update_has_the_same_bits(results, world):
    saved, updated, loaded, again = results[world]["states"]
    assert any(not torch.equal(saved[name], tensor) for name, tensor in updated.items())
    assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())
    assert all(torch.equal(updated[name], tensor) for name, tensor in again.items())
    assert "differ from those that the adapter was trained on" in results[world]["another base"][0]


class Client:
    """vLLM's client of an engine."""

    answer: Any = ("version-1", 7)

    async def collective_rpc(self, method: str) -> list[Any]:
        return [self.answer]

    async def generate(self, lora_request: Any, **_: Any) -> Any:
        yield lora_request


async def first(stream: Any) -> Any:
    async for item in stream:
        return item


def test_each_request_names_the_adapter_that_the_engine_has() -> None:
    from qarl.verl.adapter_server import AdaptedClient

    client = Client()
    request = asyncio.run(first(AdaptedClient(client).generate(prompt="", lora_request=None)))
    assert (request.lora_name, request.lora_int_id) == client.answer
    client.answer = "no adapter has been published to it yet"
    with pytest.raises(UserError, match="refuses to generate"):
        asyncio.run(first(AdaptedClient(client).generate(prompt="")))


def test_sleeping_servers_leave_the_base_in_host_memory(monkeypatch) -> None:
    """Level 2 would lose it, and nobody would publish it again."""
    answer_for_vllm()
    root = logging.getLogger()
    levels = [(each, each.level) for each in (root, *root.handlers)]
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    for each, level in levels:  # the import changes them, also pytest's handlers
        each.setLevel(level)
    from qarl.verl.adapter_server import load_replica

    vllm = {
        "enable_lora": True,
        "worker_extension_cls": "qarl.verl.worker_extension.QaRLWorkerExtension",
    }
    config = SimpleNamespace(engine_kwargs={"vllm": vllm})
    monkeypatch.setattr(vLLMReplica, "__init__", lambda replica: setattr(replica, "config", config))
    server = load_replica()().server_class.__ray_metadata__.modified_class
    assert server._resolve_sleep_level(None) == 1
    for name in ("_sleep_hybrid", "release_kv_cache"):
        assert "_resolve_sleep_level" in getattr(vLLMHttpServer, name).__code__.co_names


VLLM, ACTOR = "actor_rollout_ref.rollout.engine_kwargs.vllm", "actor_rollout_ref.actor"


def test_adapters_are_told_to_actor_and_engine():
    composed = verl_config(
        quickstart(**{"lora.r": 8, "lora.target_modules": ["v_proj", "q_proj"]}), on_cpu=True
    )
    engine = OmegaConf.select(composed, VLLM)
    assert (engine.enable_lora, engine.max_lora_rank, engine.max_loras) == (True, 8, 1)
    assert list(engine.lora_target_modules) == ["q_proj", "v_proj"]
    actor = composed.actor_rollout_ref.actor.fsdp_config
    assert (actor.quant.lora.r, actor.model_dtype, composed.actor_rollout_ref.model.lora_rank) == (
        8,
        "bf16",
        0,
    )


SOME_LAYERS = r".*layers[.]1[.].*(q|down)_proj"


def test_any_rank_and_an_expression_are_told_to_actor_and_engine():
    targets = [SOME_LAYERS]
    changes = {"lora.r": 12, "lora.target_modules": targets}
    composed = verl_config(quickstart(**changes), on_cpu=True)
    engine = OmegaConf.select(composed, VLLM)
    assert engine.max_lora_rank == 16
    assert list(engine.lora_target_modules) == ["down_proj", "q_proj"]
    lora = composed.actor_rollout_ref.actor.fsdp_config.quant.lora
    assert lora.r == 12 and list(lora.target_modules) == targets
    settings = SimpleNamespace(
        lora_config=SimpleNamespace(
            max_lora_rank=16, target_modules=list(engine.lora_target_modules)
        ),
        additional_config=OmegaConf.to_container(engine.additional_config),
    )
    spec = spec_of_worker(settings)
    names = [f"model.layers.{n}.self_attn.{leaf}_proj" for n in (0, 1) for leaf in "qk"]
    assert [name for name in names if spec.has(name)] == ["model.layers.1.self_attn.q_proj"]
    del engine.additional_config
    with pytest.raises(UserError, match="qarl_targets"):
        check_composed(composed)


def test_the_adapter_to_begin_from_has_an_absolute_path_in_verl(tmp_path):
    (tmp_path / "begun").mkdir()
    settings = '{"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]}'
    (tmp_path / "begun" / "adapter_config.json").write_text(settings)
    composed = verl_config(
        quickstart(**{"lora.path": os.path.relpath(tmp_path / "begun")}), on_cpu=True
    )
    lora = composed.actor_rollout_ref.actor.fsdp_config.quant.lora
    assert (lora.path, lora.r, lora.alpha) == (str(tmp_path / "begun"), 3, 6)


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        (f"{ACTOR}.checkpoint.save_contents", ["model", "hf_model"], "save_contents"),
        ("actor_rollout_ref.model.lora_rank", 8, "model.lora_rank"),
        (f"{VLLM}.max_lora_rank", 16, "quant.lora.r"),
        (f"{VLLM}.enable_lora", False, "enable_lora"),
        (
            "actor_rollout_ref.rollout.checkpoint_engine.backend",
            "qarl",
            "checkpoint_engine.backend",
        ),
        (f"{ACTOR}.fsdp_config.model_dtype", "fp32", "model_dtype"),
    ],
)
def test_what_adapters_do_not_go_with_in_verl(key, value, where):
    with pytest.raises(UserError) as caught:
        verl_config(quickstart(**{"lora.r": 8}, verl={key: value}), on_cpu=True)
    assert caught.value.where.endswith(where)


def test_adapters_need_engines_of_one_worker_on_verls_command_line_too():
    composed = verl_config(quickstart(**{"lora.r": 8}), on_cpu=True)
    composed.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    composed.actor_rollout_ref.actor.fsdp_config.quant.tensor_model_parallel_size = 2
    with pytest.raises(UserError, match="tensor_model_parallel_size=2 cannot be used"):
        check_composed(composed)


RUN = {
    "lora.r": 8,
    "optim.lr": 1e-2,
    "rollout.n": 4,
    "actor.ppo_micro_batch_size_per_gpu": 2,
    "actor.log_prob_micro_batch_size_per_gpu": 4,
    "trainer.val_before_train": "false",
    "trainer.plots": "false",
    "trainer.report": "false",
}


def check_run(folder: Path, model: Path, data: Path, changes: dict[str, object]) -> Path:
    """Train, and check that δ is 0 and that the base was published once. Return the run's folder."""
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    run_dir = run_quickstart(
        folder, model, data, RUN | {"reward.function": f"{reward}:length_reward"} | changes
    )
    steps = [entry for entry in read_metrics(run_dir) if entry["step"] > 0]
    adapter = load_file(run_dir / "export" / "adapter" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    sizes = [entry["publish/mbytes"] * 1e6 for entry in steps]
    assert (
        sum(tensor.nbytes for tensor in adapter.values()) < sizes[1] < sizes[0] / 2
    )  # records are some bytes, too
    assert all(entry["mismatch/abs_max"] == 0 for entry in steps)
    return run_dir


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    write_rows(str(path), [row(f"t{3 + i} t{20 + i} t{40 + i}") for i in range(16)])
    return path


@pytest.mark.slow
@needs_vllm_cpu
@pytest.mark.parametrize(("ranks", "scheme"), [(1, "w4a16"), (2, "w8a8"), (2, "fp8"), (2, "bf16")])
def test_a_run_has_no_mismatch_and_a_fresh_vllm_loads_its_export(
    tmp_path, model, data, ranks, scheme
):
    changes = {"quant.scheme": scheme, "trainer.n_gpus_per_node": ranks}
    export = check_run(tmp_path, Path(model), data, changes) / "export"
    if (
        scheme != "w8a8" or torch.cpu._is_amx_tile_supported()
    ):  # else plain vLLM does not start (docs/do/lora.md)
        assert all(sampled(export))


@pytest.mark.slow
@needs_vllm_cpu
def test_a_run_with_any_rank_on_some_layers(tmp_path, model, data):
    changes = {"lora.r": 3, "lora.target_modules": f"['{SOME_LAYERS}']"}
    assert all(sampled(check_run(tmp_path, Path(model), data, changes) / "export"))


def sampled(export: Path) -> list[list[int]]:
    """Return the tokens of a vLLM that loads base and adapter from a folder."""
    adapter = export / "adapter"
    return greedy_in_a_fresh_vllm(
        export, [[3, 4, 5]], max_tokens=4, max_model_len=64, adapter=adapter
    )[0]


@pytest.mark.slow
@needs_vllm_cpu
@pytest.mark.parametrize(("ranks", "scheme"), [(1, "w4a16"), (2, "bf16")])
def test_attention_of_a_mixture_of_experts(tmp_path, data, ranks, scheme):
    experts = save_random_model(tmp_path / "model", "qwen3_moe")
    changes = {"quant.ignore": '["lm_head","re:.*mlp[.]gate$"]', "quant.scheme": scheme}
    run_dir = check_run(tmp_path, experts, data, changes | {"trainer.n_gpus_per_node": ranks})
    assert all(sampled(run_dir / "export"))
