"""A publish into whole models of the locked vLLM, as on a GPU: the bytes of a fresh load, at the old addresses.

The models are vLLM's own, on a platform that answers as a GPU of compute capability 8.0 (Marlin) or 9.0 (Machete,
CUTLASS). Every publish goes through QaRL's `StreamReceiver` as on a GPU, which writes experts itself and uses vLLM's
layerwise reload. Experts are also published by the reload alone. Before each publish they lose everything, as in sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_lock import pretend, required
from gpu_lock_models import (
    build,
    differing,
    engine_config,
    fresh,
    load,
    named_tensors,
    process_groups,
    stand_in_operators,
    tensors_of,
)
from random_models import save_random_model
from random_moe import IGNORE, wire_tensors
from same_bytes import same_bytes

from qarl.quant.experts import stacked
from qarl.rollout.kernel_request import kernel_request
from qarl.rollout.publish import graph_addresses, writers
from qarl.rollout.publish.experts import holds_experts
from qarl.rollout.publish.manifest import check_same_layers, expected_manifest
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.wire import encode_publish
from qarl.schemes import get_scheme
from qarl.schemes.kernel_choice import KernelChoice

required()

SIZES = {"hidden_size": 256, "intermediate_size": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", SIZES),
    "tied head": ("qwen3", SIZES | {"tie": True}),
    "biases": ("qwen2", SIZES),
    "llama": ("llama", SIZES),
    "experts": ("qwen3_moe", SIZES | {"moe_intermediate_size": 256}),
}
CASES = [
    (model, scheme, group_size, capability)
    for scheme, group_size, capability in (
        ("bf16", 128, (9, 0)),
        ("w4a16", 128, (9, 0)),
        ("w4a16", 128, (8, 0)),
        ("w4a16", 32, (9, 0)),
        ("w8a8", 128, (9, 0)),
        ("fp8", 128, (9, 0)),
        ("fp8", 128, (8, 9)),
    )
    for model in MODELS
    if (model, scheme) != ("experts", "w8a8")  # this vLLM cannot serve them
]
RELOADED = [case for case in CASES if case[0] == "experts"]
OWN = [
    *(
        (model, scheme, 128, (9, 0), KernelChoice.QARL, True)
        for model in ("biases", "experts")
        for scheme in ("w4a16", "w8a8", "fp8")
    ),
    *(("biases", "w4a16", group, (9, 0), KernelChoice.MACHETE, True) for group in (64, 128)),
]
"""With `quant.kernels`: QaRL's kernels in vLLM's layers."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_random_model(tmp_path_factory.mktemp("models") / "model", family, **sizes)
        for name, (family, sizes) in MODELS.items()
    }


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parameters here are in the CPU's memory, so the plan must be told what it finds on a GPU by itself."""
    stand_in_operators()
    monkeypatch.setattr(writers, "_is_on_cpu", lambda module: False)
    yield


def experts_tensors(model: torch.nn.Module) -> dict[str, graph_addresses.TensorSlot]:
    """All tensors of the layers' experts: parameters, and what their methods and kernels have."""
    tensors = graph_addresses.tensor_slots(
        {name: module for name, module in model.named_modules() if holds_experts(module)}
    )
    return {path: place for path, place in tensors.items() if not path.endswith("weight_shape")}


def wrap(model: torch.nn.Module, config: Any) -> None:
    """Give every linear of the decoder layers vLLM's own wrapper for adapters."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import from_layer, replace_submodule

    settings = LoRAConfig(max_lora_rank=8, max_loras=1)
    settings.verify_with_model_config(config.model_config)
    hf_config = config.model_config.hf_config
    for name, module in list(model.named_modules()):
        leaf = name.rpartition(".")[2]
        if leaf.endswith("_proj"):
            parts = model.packed_modules_mapping.get(leaf, [leaf])
            wrapped = from_layer(module, 1, settings, parts, hf_config)
            assert wrapped is not module, name
            replace_submodule(model, name, wrapped)


def publish(receiver: StreamReceiver, tensors: dict[str, torch.Tensor], version: int) -> None:
    receiver.feed(encode_publish(stacked(tensors.items()), version=version))


@pytest.mark.parametrize(
    ("model_name", "scheme_name", "group_size", "capability", "kernels", "direct"),
    [
        *((*case, KernelChoice.ENGINE, True) for case in CASES),
        *((*case, KernelChoice.ENGINE, False) for case in RELOADED),
        *OWN,
    ],
    ids=str,
)
def test_a_publish_is_a_fresh_load_at_the_old_addresses(
    folders: dict[str, Path],
    as_on_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    model_name: str,
    scheme_name: str,
    group_size: int,
    capability: tuple[int, int],
    kernels: KernelChoice,
    direct: bool,
) -> None:
    pretend(monkeypatch, capability)
    from qarl.rollout.vllm_plugin.own_linears import check_in_use

    scheme, folder = get_scheme(scheme_name, group_size), folders[model_name]
    config = engine_config(folder, scheme, IGNORE, kernels=kernels)
    hf_config = config.model_config.hf_config
    first, second = wire_tensors(folder, scheme), wire_tensors(folder, scheme, noise_seed=1)
    if hf_config.tie_word_embeddings:
        first.pop("lm_head.weight", None), second.pop("lm_head.weight", None)
    expected = expected_manifest(hf_config, scheme, IGNORE)
    with process_groups(config):
        models = {version: fresh(config, tensors) for version, tensors in ((1, first), (2, second))}
        engine = build(config)
        load(engine, config, first)
        assert differing(engine, models[1]) == [] and len(differing(engine, models[2])) > 10
        check_same_layers(engine, expected)
        check_in_use(engine, kernel_request(kernels, scheme_name))
        receiver = StreamReceiver(
            EngineWeights(engine, config, expected, kv_caches=list, direct=direct)
        )
        written = {
            target.name
            for target in receiver.weights.plan.by_owner.values()
            if target.stored is not None
        }
        layers = hf_config.num_hidden_layers if model_name == "experts" else 0
        assert len(written) == layers * direct, written
        before = tensors_of(engine)
        for version, tensors in ((2, second), (1, first), (2, second)):
            for place in experts_tensors(engine).values():
                place.memory.view(torch.uint8).fill_(77)
            publish(receiver, tensors, version)
            assert receiver.weights.version == version
            assert differing(engine, models[version]) == []
            theirs = experts_tensors(models[version])
            assert [
                path
                for path, place in experts_tensors(engine).items()
                if not same_bytes(place.memory, theirs[path].memory)
            ] == []
            gone = [address for address in before if address not in tensors_of(engine)]
            assert gone == [], (
                f"{len(gone)} tensors moved: {[tuple(before[a].shape) for a in gone[:4]]}"
            )


@pytest.mark.parametrize(
    ("scheme_name", "capability"),
    [("bf16", (9, 0)), ("w4a16", (9, 0)), ("w4a16", (8, 0)), ("w8a8", (9, 0)), ("fp8", (9, 0))],
)
def test_a_base_is_published_under_its_adapters(
    folders: dict[str, Path],
    as_on_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    scheme_name: str,
    capability: tuple[int, int],
) -> None:
    """Into linears that vLLM has wrapped: the bytes of a fresh load, at the old addresses."""
    pretend(monkeypatch, capability)
    scheme, folder = get_scheme(scheme_name, 128), folders["qwen3"]
    config = engine_config(folder, scheme, IGNORE)
    expected = expected_manifest(config.model_config.hf_config, scheme, IGNORE)
    first, second = wire_tensors(folder, scheme), wire_tensors(folder, scheme, noise_seed=1)
    with process_groups(config):
        wanted, engine = fresh(config, second), build(config)
        load(engine, config, first)
        wrap(engine, config)
        check_same_layers(engine, expected)
        receiver = StreamReceiver(EngineWeights(engine, config, expected, kv_caches=list))
        before = tensors_of(engine)
        publish(receiver, second, 2)
        ours = {
            name.replace(".base_layer", ""): tensor
            for name, tensor in named_tensors(engine).items()
        }
        assert [
            name
            for name, tensor in named_tensors(wanted).items()
            if not same_bytes(tensor, ours[name])
        ] == []
        assert before.keys() <= tensors_of(engine).keys()
