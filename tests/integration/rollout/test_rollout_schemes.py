"""Rollouts in each scheme and with each value of `quant.kernels`: the trainer's layers against the running engine's,
publishes there and back, and a freshly started vLLM that knows nothing of QaRL.

What the engine refuses is in test_rollout.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, greedy, load_model
from fresh_vllm import greedy_in_a_fresh_vllm
from random_models import save_random_model
from same_bytes import same_bytes

from qarl.checkpoint.model_files import ModelFiles, save_model
from qarl.errors import UserError
from qarl.quant import QuantLinear, Scheme, get_scheme, packed_state_dict
from qarl.quant.state_dict import prepared_codes
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.schemes.kernel_choice import KernelChoice

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ENGINE_KERNELS = {
    ("w4a16", "engine"): "CPUWNA16LinearKernel",
    ("w8a8", "engine"): "CPUInt8ScaledMMLinearKernel",
    ("fp8", "engine"): "ChannelWiseTorchFP8ScaledMMLinearKernel",
    ("w4a8", "qarl"): "QaRLInt4LinearKernel",
    ("w4a16", "dequantized"): "QaRLInt4LinearKernel",
}
CASES = [pytest.param(("bf16", "engine"), marks=pytest.mark.slow), *ENGINE_KERNELS]


class Running(NamedTuple):
    scheme: Scheme
    kernels: KernelChoice
    folder: Path
    engine: RolloutEngine

    def load_model(self, noise_seed: int) -> Any:
        return load_model(
            self.folder, noise_seed=noise_seed, scheme=self.scheme, kernels=self.kernels
        )

    def layers(self) -> dict[str, Any]:
        """The engine's quantized layers."""
        return {
            name: m
            for name, m in self.engine.model().named_modules()
            if getattr(m, "scheme", None) is not None
        }


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Qwen2 has biases, which each kernel adds in its own way."""
    name, kernels = request.param
    scheme = get_scheme(name, group_size=32)
    folder = save_random_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")
    config = EngineConfig(
        str(folder),
        scheme,
        ("lm_head",),
        max_model_len=64,
        kv_cache_gib=0.25,
        kernels=KernelChoice(kernels),
    )
    before = os.environ.get("VLLM_DISABLED_KERNELS")
    with RolloutEngine(config) as engine:
        assert os.environ.get("VLLM_DISABLED_KERNELS") == before
        yield Running(scheme, config.kernels, folder, engine)


def test_the_trainers_layers_equal_the_engines_bit_for_bit(running: Running) -> None:
    """Inputs captured while the engine generates, of one and of many rows; fused layers slice by slice."""
    if not running.scheme.quantized:
        pytest.skip("bf16 has no QuantLinear")
    model = running.load_model(noise_seed=1)
    running.engine.publish(packed_state_dict(model), version=1)
    captured: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    handles = []
    for name, module in running.layers().items():
        kernel = getattr(module.scheme, "kernel", None) or module.scheme.fp8_linear
        assert type(kernel).__name__ == ENGINE_KERNELS[running.scheme.name, running.kernels]

        def hook(module: Any, args: Any, output: Any, name: str = name) -> None:
            captured.append((name, args[0].clone(), output[0].clone()))

        handles.append(module.register_forward_hook(hook))
    greedy(running.engine, max_tokens=6)
    running.engine.generate(PROMPTS[:1], SamplingConfig(3, temperature=0.0))
    for handle in handles:
        handle.remove()
    assert len({name for name, _, _ in captured}) == 8
    assert {1, 16} <= {len(x) for _, x, _ in captured}
    for name, x, expected in captured:
        parent, _, leaf = name.rpartition(".")
        layers = [model.get_submodule(f"{parent}.{part}") for part in FUSED.get(leaf, (leaf,))]
        assert all(isinstance(layer, QuantLinear) for layer in layers)
        with torch.no_grad():
            assert torch.equal(torch.cat([layer(x) for layer in layers], dim=-1), expected), (
                name,
                len(x),
            )


def test_what_the_trainers_kernel_has_prepared_is_not_converted_again(running: Running) -> None:
    """The engine gets the same bits, from memory of its own."""
    model = running.load_model(noise_seed=1)
    tensors = list(packed_state_dict(model))
    codes = prepared_codes(model)
    assert bool(codes) is (running.scheme.name == "w4a16" and running.kernels.by_engine)
    running.engine.publish(tensors, version=1)
    converted = parameters_of(running.engine)
    running.engine.publish(packed_state_dict(running.load_model(noise_seed=2)), version=2)
    running.engine.publish(tensors, version=3, prepared=codes)
    for tensor in codes.values():
        tensor.fill_(7)
    assert all(map(same_bytes, converted, parameters_of(running.engine)))
    running.engine.publish(tensors, version=4, prepared=codes)
    taken = not all(map(same_bytes, converted, parameters_of(running.engine)))
    assert taken is bool(codes)


def parameters_of(engine: RolloutEngine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.model().parameters()]


def test_publishes_there_and_back_are_exact(running: Running) -> None:
    """Memory is allocated in between: a kernel that points into freed tensors would show."""
    states = [list(packed_state_dict(running.load_model(seed))) for seed in range(2)]
    outputs, places, junk = [], [], []
    for version, number in enumerate((0, 1, 1, 0)):
        running.engine.publish(states[number], version=version)
        junk += [
            torch.full((size,), float("nan")) for size in (96, 128, 192, 256) for _ in range(64)
        ]
        outputs.append(greedy(running.engine, max_tokens=12))
        places.append(
            [
                (p.data_ptr(), p.shape)
                for layer in running.layers().values()
                for p in layer.parameters()
            ]
        )
    assert outputs[0] == outputs[3] != outputs[1] == outputs[2]
    assert places[0] == places[1] == places[2] == places[3]


def test_a_freshly_started_vllm_on_the_saved_checkpoint(running: Running, tmp_path: Path) -> None:
    """In a process that knows nothing of QaRL: equal with vLLM's own kernels. It takes W4A8 for W4A16."""
    from transformers import AutoTokenizer

    model = running.load_model(noise_seed=3)
    running.engine.publish(packed_state_dict(model), version=9)
    files = ModelFiles.of(model, AutoTokenizer.from_pretrained(running.folder))
    saved = save_model(
        tmp_path / "saved",
        files,
        packed_state_dict(model),
        scheme=running.scheme,
        ignore=("lm_head",),
    )
    ours, fresh = (
        greedy(running.engine),
        greedy_in_a_fresh_vllm(saved, PROMPTS, max_tokens=24, max_model_len=64),
    )
    if running.kernels.by_engine:
        assert fresh == ours
        return
    first = [[row[0] for row in log_probs] for _, log_probs in (ours, fresh)]
    apart = max(abs(a - b) for a, b in zip(*first, strict=True))
    assert apart > 1e-3 if running.scheme.name == "w4a8" else apart < 0.1


def test_vllm_keeps_its_own_kernels_for_other_engines(running: Running) -> None:
    if running.kernels.by_engine:
        pytest.skip("vLLM's own kernels")
    from vllm.config import VllmConfig, set_current_vllm_config

    from qarl.rollout.chosen_kernel import chosen_kernel
    from qarl.rollout.vllm_plugin import own_linears

    scheme = get_scheme("w4a16", group_size=32)
    assert chosen_kernel(scheme, (64, 64), (64, 64)) == "CPUWNA16LinearKernel"
    with set_current_vllm_config(VllmConfig()):
        assert own_linears.requested() is None
        assert own_linears.OwnLinearKernel.why_not(("w4a16",), (64, 64)) == "quant.kernels=engine"
    with pytest.raises(UserError, match="vLLM chose QaRLInt4LinearKernel"):
        own_linears.check_in_use(running.engine.model(), None)


def test_an_engine_without_the_plugin_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qarl.rollout import vllm_plugin

    monkeypatch.setitem(
        vllm_plugin._why_not, "own_linears", "this vLLM has no register_linear_kernel"
    )
    monkeypatch.setattr("vllm.plugins.load_general_plugins", lambda: None)
    folder = save_random_model(tmp_path / "qwen3")
    config = EngineConfig(
        str(folder),
        get_scheme("w4a8", group_size=32),
        ("lm_head",),
        max_model_len=64,
        kernels=KernelChoice.QARL,
    )
    with pytest.raises(
        UserError, match=r"(?s)without QaRL's linear kernels.*no register_linear_kernel"
    ):
        RolloutEngine(config)
