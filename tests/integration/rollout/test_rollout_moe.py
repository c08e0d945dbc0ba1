"""A mixture of experts in the running engine, in every scheme: its experts against the trainer's function and float64,
publishes against a freshly started vLLM, and the routing that it returns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, greedy, load_model
from expert_cases import exact, exact_bf16, exact_weight, off
from fresh_vllm import greedy_in_a_fresh_vllm
from random_moe import (
    EXPERTS,
    IGNORE,
    LAYERS,
    TOP_K,
    save_checkpoint,
    save_random_moe,
    wire_tensors,
)

from qarl.kernels.cpu.vllm_experts import CpuExperts, VllmCpuBf16Experts
from qarl.quant import Scheme, get_scheme, packed_state_dict
from qarl.quant.state_dict import prepared_codes
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig, _engine_weights

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]


class Running(NamedTuple):
    scheme: Scheme
    folder: Path
    engine: RolloutEngine
    first: dict[str, torch.Tensor]
    second: dict[str, torch.Tensor]

    def stacks(
        self, layer: int, tensors: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], ...]:
        """gate_up and down of a layer's experts, stacked by hand."""
        prefix = f"model.layers.{layer}.mlp.experts"
        leaves = [
            name.rpartition(".")[2] for name in tensors if name.startswith(f"{prefix}.0.up_proj.")
        ]
        each: list[dict[str, list[torch.Tensor]]] = [{}, {}]
        for leaf in (leaf for leaf in leaves if leaf != "weight_shape"):
            for expert in range(EXPERTS):
                gate, up, down = (
                    tensors[f"{prefix}.{expert}.{m}_proj.{leaf}"] for m in ("gate", "up", "down")
                )
                each[0].setdefault(leaf, []).append(torch.cat((gate, up)))
                each[1].setdefault(leaf, []).append(down)
        return tuple(
            {leaf: torch.stack(experts) for leaf, experts in stack.items()} for stack in each
        )


@pytest.fixture(
    scope="module", params=[pytest.param("bf16", marks=pytest.mark.slow), "w4a16", "w8a8", "fp8"]
)
def running(request, tmp_path_factory) -> Iterator[Running]:
    scheme = get_scheme(request.param, 32)
    folder = save_random_moe(tmp_path_factory.mktemp("models") / "qwen3_moe")
    first, second = wire_tensors(folder, scheme), wire_tensors(folder, scheme, noise_seed=1)
    config = EngineConfig(
        str(folder), scheme, IGNORE, max_model_len=64, kv_cache_gib=0.25, return_routed_experts=True
    )
    with RolloutEngine(config) as engine:
        yield Running(scheme, folder, engine, first, second)


def test_after_a_publish_it_is_a_freshly_started_vllm(running: Running, tmp_path: Path) -> None:
    """The second publish writes over the first; then back to it."""
    running.engine.publish(running.first.items(), version=1)
    before = greedy(running.engine)
    running.engine.publish(running.second.items(), version=2)
    assert greedy(running.engine) != before
    running.engine.publish(running.first.items(), version=3)
    saved = save_checkpoint(tmp_path / "export", running.folder, running.scheme, running.first)
    fresh = greedy_in_a_fresh_vllm(saved, PROMPTS, max_tokens=24, max_model_len=64)
    assert greedy(running.engine) == fresh == before


def test_stacks_that_the_trainers_kernel_has_prepared_are_not_converted_again(
    running: Running,
) -> None:
    """The engine gets the same bits, in memory of its own."""
    model = load_model(running.folder, noise_seed=2, scheme=running.scheme, ignore=IGNORE)
    tensors = list(packed_state_dict(model, scheme=running.scheme, ignore=IGNORE, stacks=True))
    codes = prepared_codes(model)
    stacks = [name for name in codes if ".experts." in name]
    assert len(stacks) == (6 if running.scheme.name == "w4a16" else 0)  # two in each layer
    running.engine.publish(tensors, version=1)
    converted = greedy(running.engine)
    running.engine.publish(running.first.items(), version=2)
    running.engine.publish(tensors, version=3, prepared=codes)
    for name in stacks:
        codes[name].fill_(7)
    assert greedy(running.engine) == converted
    running.engine.publish(tensors, version=4, prepared=codes)
    assert (greedy(running.engine) != converted) is bool(stacks)


def test_layerwise_reload_of_experts_is_the_direct_write(running: Running) -> None:
    """And it can be followed by direct writes."""
    engine = running.engine
    tokens = []
    for direct in (True, False, True):
        (engine.weights,) = engine.llm.collective_rpc(
            _engine_weights, args=(engine.expected, direct)
        )
        for version, tensors in enumerate((running.second, running.first)):
            engine.publish(tensors.items(), version=version)
            tokens.append(greedy(engine))
    assert tokens[2:4] == tokens[4:6] == tokens[:2] and tokens[0] != tokens[1]


def test_a_shared_expert_beside_them(tmp_path: Path) -> None:
    """Qwen2-MoE: the shared expert is a dense layer, its gate stays BF16, and weights do not sum to 1."""
    scheme = get_scheme("w4a16", 32)
    folder = save_random_moe(tmp_path / "qwen2_moe", "qwen2_moe")
    config = EngineConfig(str(folder), scheme, IGNORE, max_model_len=64, kv_cache_gib=0.25)
    with RolloutEngine(config) as engine:
        for version, seed in enumerate((2, 3)):
            tensors = wire_tensors(folder, scheme, noise_seed=seed)
            engine.publish(tensors.items(), version=version)
        tokens = greedy(engine)
    saved = save_checkpoint(tmp_path / "export", folder, scheme, tensors)
    assert tokens == greedy_in_a_fresh_vllm(saved, PROMPTS, max_tokens=24, max_model_len=64)


class Call(NamedTuple):
    layer: int
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    y: torch.Tensor


@pytest.fixture
def calls(running: Running, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What goes into and comes out of the experts of each layer."""
    running.engine.publish(running.first.items(), version=1)
    recorded: list[Call] = []
    for number, block in enumerate(running.engine.model().model.layers):  # type: ignore[union-attr, arg-type]  # vLLM's
        experts: Any = block.mlp.experts.routed_experts.quant_method.moe_kernel.fused_experts
        chosen: list[Any] = []

        def select(
            *args: Any, chosen: Any = chosen, select: Any = experts._select_experts, **kwargs: Any
        ) -> Any:
            chosen.append(select(*args, **kwargs))
            return chosen[-1]

        def apply(
            hidden_states: Any,
            number: int = number,
            chosen: Any = chosen,
            apply: Any = experts.apply,
            **k: Any,
        ):
            x = hidden_states.clone()
            y = apply(hidden_states=hidden_states, **k)
            recorded.append(Call(number, x, *chosen[-1], y.clone()))
            return y

        monkeypatch.setattr(experts, "_select_experts", select)
        monkeypatch.setattr(experts, "apply", apply)
    return recorded


def test_experts_are_the_trainers_function_and_float64(running: Running, calls: list[Call]) -> None:
    greedy(running.engine, max_tokens=4)
    running.engine.generate(PROMPTS[:1], SamplingConfig(3, temperature=0.0))
    assert {call.layer for call in calls} == set(range(LAYERS)) and {
        len(call.x) for call in calls
    } >= {1, 16, 64}
    kernel: Any = CpuExperts if running.scheme.quantized else VllmCpuBf16Experts
    for layer in range(LAYERS):
        wire = running.stacks(layer, running.first)
        prepared = kernel.prepare(*wire, running.scheme.operands)
        w1, w2 = (
            exact_weight(part) if "weight_scale" in part else part["weight"].double()
            for part in wire
        )
        for call in (call for call in calls if call.layer == layer):
            assert torch.equal(call.y, kernel.forward(call.x, call.weights, call.ids, prepared))
            operands = call.x.double(), call.weights.double(), call.ids, w1, w2
            expected = (
                exact(running.scheme.name, *operands)
                if running.scheme.quantized
                else exact_bf16(*operands)
            )
            assert off(call.y, expected) < 5e-3


def test_the_routing_is_returned(running: Running, calls: list[Call]) -> None:
    """For each token of the prompt and of the response, but for the last one, which nothing followed."""
    batch = running.engine.generate(
        PROMPTS[:1], SamplingConfig(5, temperature=0.0, ignore_eos=True)
    )
    assert batch.routed_experts is not None
    (routed,) = batch.routed_experts
    assert routed.shape == (len(PROMPTS[0]) + 4, LAYERS, TOP_K) and routed.dtype == torch.uint8
    for layer in range(LAYERS):
        ids = torch.cat([call.ids for call in calls if call.layer == layer])
        assert torch.equal(routed[:, layer].int(), ids[: len(routed)])
    many = running.engine.generate(
        PROMPTS, SamplingConfig(5, temperature=0.0, ignore_eos=True)
    ).routed_experts
    assert many is not None and len(many) == len(PROMPTS) and torch.equal(many[0], routed)
    assert len({tuple(routing.flatten().tolist()) for routing in many}) > 1
