"""`quant.kernels` in a running vLLM: the trainer's layers, publishes, and what plain vLLM computes instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from fresh_vllm import greedy_in_a_fresh_vllm
from random_models import save_random_model

from qarl.checkpoint.compressed_tensors import ModelFiles, save_model
from qarl.errors import UserError
from qarl.quant import QuantLinear, Scheme, get_scheme, packed_state_dict, quantize_model
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]

PROMPTS = [[3 + i % 7, 5, 8 + i % 11, 4] for i in range(20)]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
CASES = [("w4a8", "qarl"), ("w4a16", "dequantized")]


class Running(NamedTuple):
    scheme: Scheme
    kernels: str
    folder: Path
    engine: RolloutEngine

    def load_model(self, noise_seed: int) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)
        torch.manual_seed(noise_seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        quantize_model(model, scheme=self.scheme, kernels=self.kernels)
        return model

    def greedy(self, max_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        batch = self.engine.generate(PROMPTS, SamplingConfig(max_tokens, temperature=0.0))
        return batch.response_token_ids, batch.rollout_log_probs


@pytest.fixture(scope="module", params=CASES, ids=["w4a8", "dequantized"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Qwen2 has biases. `delta`: the engine keeps the published tensors, and gets only what changed."""
    name, kernels = request.param
    scheme = get_scheme(name, group_size=32)
    folder = save_random_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")
    config = EngineConfig(
        str(folder), scheme, ("lm_head",), max_model_len=64, kv_cache_gib=0.25, kernels=kernels, delta=True
    )
    before = os.environ.get("VLLM_DISABLED_KERNELS")
    with RolloutEngine(config) as engine:
        assert os.environ.get("VLLM_DISABLED_KERNELS") == before
        yield Running(scheme, kernels, folder, engine)


def quantized_layers(engine: RolloutEngine) -> dict[str, Any]:
    return {name: m for name, m in engine.model().named_modules() if getattr(m, "scheme", None) is not None}


def test_the_trainers_layers_equal_the_engines_bit_for_bit(running: Running) -> None:
    """At least 20 inputs captured while the engine generates, of one and of many rows; fused layers slice by slice."""
    model = running.load_model(noise_seed=1)
    running.engine.publish(packed_state_dict(model), version=1)
    captured: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    handles = []
    for name, module in quantized_layers(running.engine).items():
        assert type(module.scheme.kernel).__name__ == "QaRLInt4LinearKernel"

        def hook(module: Any, args: Any, output: Any, name: str = name) -> None:
            captured.append((name, args[0].clone(), output[0].clone()))

        handles.append(module.register_forward_hook(hook))
    running.greedy(max_tokens=4)
    running.engine.generate(PROMPTS[:1], SamplingConfig(3, temperature=0.0))
    for handle in handles:
        handle.remove()
    assert len(captured) >= 20 and len({name for name, _, _ in captured}) == 8
    assert {1, 20} <= {len(x) for _, x, _ in captured}
    for name, x, expected in captured:
        parent, _, leaf = name.rpartition(".")
        layers = [model.get_submodule(f"{parent}.{part}") for part in FUSED.get(leaf, (leaf,))]
        assert all(isinstance(layer, QuantLinear) for layer in layers)
        with torch.no_grad():
            assert torch.equal(torch.cat([layer(x) for layer in layers], dim=-1), expected), (name, len(x))


def test_publishes_there_and_back_are_exact(running: Running) -> None:
    """Whole publishes, then a publish of the one weight that changed; parameters stay where they are."""
    models = [running.load_model(seed) for seed in range(2)]
    outputs, places = [], []
    for version, number in enumerate((0, 1, 1, 0)):
        running.engine.publish(packed_state_dict(models[number]), version=version)
        outputs.append(running.greedy(max_tokens=6))
        layers = quantized_layers(running.engine).values()
        places.append([(p.data_ptr(), p.shape) for layer in layers for p in layer.parameters()])
    assert outputs[0] == outputs[3] != outputs[1] == outputs[2]
    assert places[0] == places[1] == places[2] == places[3]
    with torch.no_grad():
        models[0].model.layers[0].mlp.up_proj.weight.mul_(1.01)
    report = running.engine.publish(packed_state_dict(models[0]), version=4)
    assert report.is_delta and report.sent_bytes < report.bytes / 2
    changed = running.greedy(max_tokens=6)
    running.engine.publish(packed_state_dict(models[1]), version=5)
    running.engine.publish(packed_state_dict(models[0]), version=6)
    assert changed == running.greedy(max_tokens=6)


def test_plain_vllm_computes_something_else(running: Running, tmp_path: Path) -> None:
    """A vLLM that knows nothing of QaRL loads a W4A8 checkpoint, and answers as for a W4A16 checkpoint."""
    from transformers import AutoTokenizer

    model = running.load_model(noise_seed=3)
    running.engine.publish(packed_state_dict(model), version=9)
    log_probs = running.greedy(max_tokens=6)[1]
    tokenizer = AutoTokenizer.from_pretrained(running.folder)
    plain = {}
    for name in {running.scheme.name, "w4a16"}:
        files, tensors = ModelFiles.of(model, tokenizer), packed_state_dict(model)
        scheme = get_scheme(name, group_size=32)
        saved = save_model(tmp_path / name, files, tensors, scheme=scheme, ignore=("lm_head",))
        plain[name] = greedy_in_a_fresh_vllm(saved, PROMPTS, max_tokens=6, max_model_len=64)
    first = [[row[0] for row in rows] for rows in (log_probs, plain["w4a16"][1])]
    apart = max(abs(a - b) for a, b in zip(*first, strict=True))
    if running.scheme.name == "w4a8":
        assert plain["w4a8"] == plain["w4a16"]
        assert apart > 1e-3
    else:
        assert apart < 0.1


def test_vllm_keeps_its_own_kernels_for_other_engines(running: Running) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    from qarl.rollout import kernel_prediction
    from qarl.rollout.vllm_plugin import linears

    scheme = get_scheme("w4a16", group_size=32)
    assert kernel_prediction.chosen_kernel(scheme, (64, 64), (64, 64)) == "CPUWNA16LinearKernel"
    with set_current_vllm_config(VllmConfig()):
        assert linears.requested() is None
        assert linears._Own.why_not(("w4a16",), (64, 64)) == "quant.kernels=engine"
    with pytest.raises(UserError, match="vLLM chose QaRLInt4LinearKernel"):
        linears.check_in_use(running.engine.model(), None)


def test_a_model_in_which_no_kernel_is_found_is_refused() -> None:
    """For example if another vLLM keeps its kernels in other attributes."""
    from qarl.rollout.engine_config import KernelRequest
    from qarl.rollout.vllm_plugin import linears

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    linears.check_in_use(model, None)
    with pytest.raises(UserError, match=r"(?s)no layer.*has a linear kernel.*quant\.kernels=qarl"):
        linears.check_in_use(model, KernelRequest("qarl", "w4a8"))


@pytest.mark.parametrize("kernels", ["engine", "dequantized"])
def test_w4a8_is_refused_without_our_kernel(tmp_path: Path, kernels: str) -> None:
    folder = save_random_model(tmp_path / "qwen3")
    config = EngineConfig(
        str(folder), get_scheme("w4a8", group_size=32), ("lm_head",), max_model_len=64, kernels=kernels
    )
    with pytest.raises(UserError, match=r"(?s)w4a8 rollouts are refused.*quant.kernels=qarl"):
        RolloutEngine(config)


def test_an_engine_without_the_plugin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qarl.rollout import vllm_plugin

    monkeypatch.setattr(vllm_plugin, "_no_linears", "this vLLM has no register_linear_kernel")
    monkeypatch.setattr("vllm.plugins.load_general_plugins", lambda: None)
    folder = save_random_model(tmp_path / "qwen3")
    config = EngineConfig(
        str(folder), get_scheme("w4a8", group_size=32), ("lm_head",), max_model_len=64, kernels="qarl"
    )
    with pytest.raises(UserError, match=r"(?s)without QaRL's linear kernels.*no register_linear_kernel"):
        RolloutEngine(config)
