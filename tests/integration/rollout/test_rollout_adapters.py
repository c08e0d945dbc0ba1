"""Adapters in a real vLLM: what it multiplies by after each publish, against a vLLM that loads base and adapter from
disk, and each way in which others lose an adapter in silence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, SCHEME, greedy, load_model
from fresh_vllm import greedy_in_a_fresh_vllm
from safetensors import SafetensorError
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from qarl.checkpoint.model_files import ModelFiles, save_model
from qarl.config.lora import FOLDER, LoraConfig
from qarl.errors import UserError
from qarl.lora.adapter import Adapter
from qarl.lora.layers import Adapters
from qarl.quant import packed_state_dict
from qarl.rollout.adapter_spec import AdapterSpec
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.publish import adapter_folder
from qarl.rollout.publish.adapters import EngineAdapter
from qarl.rollout.publish.writers import WritePlan
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.wire import encode_publish

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]


@pytest.fixture(scope="module")
def model(pristine_model) -> Any:
    return load_model(pristine_model)


@pytest.fixture(scope="module")
def adapters(model) -> Adapters:
    return Adapters(model, LoraConfig(r=8, alpha=16), seed=0, base="base")


@pytest.fixture(scope="module")
def engine(pristine_model, adapters) -> Iterator[RolloutEngine]:
    spec = AdapterSpec(adapters.rank, adapters.targets)
    config = EngineConfig(
        str(pristine_model),
        SCHEME,
        ("lm_head",),
        max_model_len=320,
        kv_cache_gib=0.25,
        adapters=spec,
    )
    with RolloutEngine(config) as engine:
        yield engine


@pytest.fixture
def based(engine, model) -> RolloutEngine:
    """The engine with the base, and without a current adapter."""
    engine.publish(packed_state_dict(model), version=0)
    return engine


def changed(adapters: Adapters, seed: int) -> Adapter:
    """The adapter after an update."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapters.layers.values():
            for weight in (layer.lora_A, layer.lora_B):
                weight.add_((torch.randn(weight.shape, generator=generator) / 8).bfloat16())
    return adapters.adapter()


def test_an_engine_needs_base_and_adapter(engine, model, adapters):
    with pytest.raises(UserError, match="its base has not been published"):
        engine.publish_adapter(adapters.adapter(), version=1)
    engine.publish(packed_state_dict(model), version=1)
    with pytest.raises(UserError, match="only the base") as error:
        engine.generate(PROMPTS, SamplingConfig(4))
    assert "refuses to generate" in error.value.what and engine.weight_version is None


def test_after_each_publish_the_engine_is_a_fresh_one_with_base_and_adapter(
    based, model, adapters, tmp_path
):
    from transformers import AutoTokenizer

    seen = []
    for count in range(1, 101):
        adapter = changed(adapters, count)
        report = based.publish_adapter(adapter, version=count)
        assert (report.bytes, based.weight_version) == (adapter.nbytes, count)
        if count not in (1, 2, 10, 100):
            continue
        seen.append(greedy(based))
        files = ModelFiles.of(model, AutoTokenizer.from_pretrained(based.config.model))
        folder = tmp_path / str(count)
        save_model(
            folder,
            files,
            packed_state_dict(model),
            scheme=SCHEME,
            ignore=("lm_head",),
            adapter=adapter,
        )
        fresh = greedy_in_a_fresh_vllm(
            folder, PROMPTS, max_tokens=24, max_model_len=320, adapter=Path(folder / FOLDER)
        )
        assert fresh == seen[-1]
    assert len({str(outputs) for outputs in seen}) == 4, "the adapters changed nothing"


def test_layerwise_reload_writes_the_base_under_its_adapters(based, pristine_model, adapters):
    """As on a GPU, where nothing writes into a linear directly."""
    adapter = changed(adapters, 3)
    other = list(packed_state_dict(load_model(pristine_model, noise_seed=1)))

    def outputs(tensors: Any, version: int) -> Any:
        based.publish(tensors, version=version)
        based.publish_adapter(adapter, version=version)
        return greedy(based)

    directly = based.weights.plan
    expected = [outputs(other, 1), outputs(packed_state_dict(load_model(pristine_model)), 2)]
    based.weights.plan = WritePlan(
        based.model(), directly.vllm_config, based.expected, direct=False
    )
    try:
        assert all(
            target.stored is None
            for target in based.weights.plan.by_owner.values()
            if target.name.endswith("proj")
        )
        assert outputs(other, 3) == expected[0] != expected[1]
    finally:
        based.weights.plan = directly


def test_transformers_and_peft_load_the_export_and_give_nearly_the_engines_log_probs(
    based, model, adapters, tmp_path
):
    """They multiply by the same low-bit weights and the same A and B. transformers rounds elsewhere: it multiplies by
    dequantized weights, and peft adds the adapter after its own casts."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = changed(adapters, 1)
    based.publish_adapter(adapter, version=1)
    batch = based.generate(PROMPTS, SamplingConfig(24, temperature=0.0))
    files = ModelFiles.of(model, AutoTokenizer.from_pretrained(based.config.model))
    save_model(
        tmp_path / "out",
        files,
        packed_state_dict(model),
        scheme=SCHEME,
        ignore=("lm_head",),
        adapter=adapter,
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)

    def differences(loaded: Any) -> torch.Tensor:
        parts = []
        rows = zip(
            batch.prompt_token_ids, batch.response_token_ids, batch.rollout_log_probs, strict=True
        )
        for prompt, response, log_probs in rows:
            with torch.no_grad():
                logits = (
                    loaded(torch.tensor([prompt + response]))
                    .logits[0, len(prompt) - 1 : -1]
                    .float()
                )
            theirs = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            parts.append((theirs - torch.tensor(log_probs)).abs())
        return torch.cat(parts)

    alone = differences(base)
    both = differences(peft.PeftModel.from_pretrained(base, tmp_path / "out" / FOLDER))
    assert both.mean() < 1e-2 and both.max() < 1e-1  # 3.5e-3 and 2.9e-2 were measured
    assert alone.mean() > 0.1  # 0.5, without the adapter


def test_an_adapter_that_arrives_as_a_stream_is_the_one_that_was_sent(based, adapters):
    adapter = changed(adapters, 2)
    sent = {name: tensor.clone() for name, tensor in adapter.tensors.items()}
    based.publish_adapter(adapter, version=1)
    expected = greedy(based)
    based.publish_adapter(changed(adapters, 3), version=2)
    receiver = StreamReceiver(based.weights, based.adapter)
    settings = {
        "r": adapter.r,
        "alpha": adapter.alpha,
        "targets": adapter.targets,
        "base": adapter.base,
    }
    stream = list(encode_publish(sent.items(), version=3, adapter=settings))
    receiver.feed(stream[: len(stream) // 2])
    assert receiver.stale
    with pytest.raises(UserError, match="refuses to generate"):
        greedy(based)
    receiver.feed(stream[len(stream) // 2 :])
    assert (based.weight_version, greedy(based)) == (3, expected)
    for fault in ("no begin", "damaged", "lost", "cut"):
        place = (
            0
            if fault == "no begin"
            else next(i for i, (name, _) in enumerate(stream) if "lora_B" in name)
        )
        name, tensor = stream[place]
        parts = {"damaged": [(name, tensor + 1)], "cut": [(name, tensor)]}.get(fault, [])
        rest = [*stream[:place], *parts, *stream[place + 1 : -1 if fault == "cut" else None]]
        words = r"outside of a publish|damaged|did not arrive"
        with pytest.raises(UserError, match=words) if fault != "cut" else nullcontext():
            receiver.feed(rest)
        assert receiver.stale and based.weight_version is None
    based.weights.mark_stale("it slept")
    with pytest.raises(UserError, match="its base has not been published"):
        receiver.feed(stream)


def test_an_adapter_of_zeros_is_the_base_and_follows_no_other(based, adapters):
    adapter = adapters.adapter()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in adapter.tensors.items()}
    based.publish_adapter(replace(adapter, tensors=zeros), version=1)
    first = greedy(based)
    based.publish_adapter(changed(adapters, 1), version=2)
    assert greedy(based) != first
    with pytest.raises(UserError, match="every B of the adapter of version 3 is 0"):
        based.publish_adapter(replace(adapter, tensors=zeros), version=3)
    with pytest.raises(UserError, match="refuses to generate"):
        greedy(based)


def test_an_engine_that_multiplies_by_no_adapter_is_refused(based, adapters, monkeypatch):
    """It has loaded the adapter, and its layers have the right A and B."""
    monkeypatch.setattr(based.adapter, "proved", False)
    with monkeypatch.context() as change:
        change.setattr(PunicaWrapperCPU, "add_lora_linear", lambda *arguments, **options: None)
        with pytest.raises(UserError, match="as if it had no adapter"):
            based.publish_adapter(adapters.adapter(), version=1)
    with pytest.raises(UserError, match="a probe has replaced its adapter"):
        greedy(based)
    based.publish_adapter(adapters.adapter(), version=1)
    assert based.adapter.proved and greedy(based)


def test_each_version_has_an_id_and_a_name_of_its_own(based, adapters):
    names, ids = set(), set()
    for version in (1, 1, 2):
        based.publish_adapter(adapters.adapter(), version=version)
        names.add(based.adapter.request.lora_name)
        ids.add(based.adapter.request.lora_int_id)
        assert based.llm.llm_engine.list_loras() == {based.adapter.request.lora_int_id}
    assert len(names) == len(ids) == 3


def _without(adapter: Adapter, ending: str) -> Adapter:
    return replace(
        adapter,
        tensors={name: t for name, t in adapter.tensors.items() if not name.endswith(ending)},
    )


def _first(adapter: Adapter, change: Any) -> Adapter:
    name = next(iter(adapter.tensors))
    return replace(adapter, tensors=dict(adapter.tensors) | {name: change(adapter.tensors[name])})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda adapter: _without(adapter, "q_proj.lora_B.weight"), "missing"),
        (lambda adapter: _first(adapter, lambda a: a[:4]), "the engine expects"),
        (lambda adapter: _first(adapter, torch.Tensor.float), "the engine expects"),
        (lambda adapter: _first(adapter, lambda a: a * float("nan")), "NaN"),
        (
            lambda adapter: replace(
                adapter, tensors={f"x.{n}": t for n, t in adapter.tensors.items()}
            ),
            "not a tensor",
        ),
    ],
    ids=["a part is missing", "another rank", "FP32", "NaN", "other names"],
)
def test_an_adapter_that_does_not_fit_is_refused_before_vllm_sees_it(
    based, adapters, change, words
):
    based.publish_adapter(adapters.adapter(), version=1)
    before = based.adapter.present()
    with pytest.raises(UserError, match=words):
        based.publish_adapter(change(adapters.adapter()), version=2)
    assert based.adapter.present() == before
    with pytest.raises(UserError, match="version 2 did not complete"):
        greedy(based)
    based.publish_adapter(adapters.adapter(), version=3)
    assert greedy(based)


def test_an_adapter_that_cannot_be_written_does_not_lose_the_engine(based, adapters, monkeypatch):
    """Containers often have 64 MB of shared memory. Then another folder is used, and that may be full, too."""
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(free=adapters.adapter().nbytes)
    )
    folders, write = [], adapter_folder.write_adapter
    monkeypatch.setattr(
        adapter_folder, "write_adapter", lambda *args: folders.append(args[0]) or write(*args)
    )
    based.publish_adapter(adapters.adapter(), version=1)
    assert greedy(based) and not folders[0].is_relative_to("/dev/shm")

    def full(*args: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(adapter_folder, "write_adapter", full)
    with pytest.raises(UserError, match="could not be written") as error:
        based.publish_adapter(adapters.adapter(), version=2)
    assert "No space left" in str(error.value.why)
    monkeypatch.undo()
    based.publish_adapter(adapters.adapter(), version=3)
    assert greedy(based)


@pytest.mark.parametrize("fault", ["not loaded", "loaded twice", "scaled twice", "zeros"])
def test_an_adapter_that_does_not_arrive_is_an_error(based, adapters, monkeypatch, fault):
    changed(adapters, 4)
    based.publish_adapter(adapters.adapter(), version=1)
    add = based.llm.llm_engine.add_lora

    def faulty(request: Any) -> bool:
        if fault == "not loaded":
            return True
        loaded = add(request)
        name = next(iter(based.adapter._stacks))
        if fault == "loaded twice":
            request.lora_int_id += 1000
            add(request)
            request.lora_int_id -= 1000
        elif fault == "scaled twice":
            based.adapter._stacks[name][1].mul_(2)
        else:
            based.adapter._stacks[name][1].zero_()
        return loaded

    monkeypatch.setattr(based.llm.llm_engine, "add_lora", faulty)
    with pytest.raises(UserError, match="not the one that the rollout engine multiplies by"):
        based.publish_adapter(adapters.adapter(), version=2)
    monkeypatch.undo()
    with pytest.raises(UserError, match="refuses to generate"):
        greedy(based)
    based.publish_adapter(adapters.adapter(), version=3)
    assert greedy(based)


def test_a_lost_adapter_is_noticed_before_the_next_response(based, adapters):
    based.publish_adapter(adapters.adapter(), version=1)
    based.llm.llm_engine.remove_lora(based.adapter.request.lora_int_id)
    with pytest.raises(UserError, match="not the one that"):
        greedy(based)
    assert based.weight_version is None


def test_a_new_base_needs_its_adapter_again(based, model, adapters):
    based.publish_adapter(adapters.adapter(), version=1)
    based.publish(packed_state_dict(model), version=2)
    with pytest.raises(UserError, match="refuses to generate"):
        greedy(based)


def test_targets_without_a_place_in_the_engine_are_refused(engine, adapters):
    with pytest.raises(UserError, match="no place for an adapter of c_attn"):
        EngineAdapter(
            engine.llm.llm_engine, engine.model(), AdapterSpec(8, (*adapters.targets, "c_attn"))
        )
