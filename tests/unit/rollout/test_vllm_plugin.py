"""QaRL's plugin for vLLM: what it takes, what it leaves to vLLM, and how an engine without it is refused."""

from __future__ import annotations

import importlib
import importlib.metadata
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_features import NO_VLLM_CPU, needs_w4a16_cpu, vllm_is_for_cpus
from random_moe import IGNORE, save_random_moe

if not vllm_is_for_cpus():
    pytest.skip(NO_VLLM_CPU, allow_module_level=True)

from qarl.checks.registry import check_experts
from qarl.errors import UserError
from qarl.process import configure_vllm_process
from qarl.quant import get_scheme
from qarl.rollout import vllm_plugin
from qarl.schemes.kernel_choice import KernelChoice

configure_vllm_process()
experts: Any = importlib.import_module("qarl.rollout.vllm_plugin.cpu_experts")
weights: Any = importlib.import_module("qarl.rollout.vllm_plugin.expert_weights")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the plugin is for CPUs")


def test_registering_twice_is_registering_once() -> None:
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.quantization import get_quantization_config

    for _ in range(2):
        vllm_plugin.register()
        vllm_plugin.check_loaded(SimpleNamespace(num_experts=8))
        assert get_quantization_config("compressed-tensors") is experts.QaRLCompressedTensorsConfig
        assert op_registry_oot["UnquantizedFusedMoEMethod"] is experts.RepairedUnquantizedMethod


def test_other_platforms_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setitem(vllm_plugin._why_not, "cpu_experts", vllm_plugin._CALLED)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(experts, "register", lambda: pytest.fail("vLLM's own backends serve there"))
    vllm_plugin.register()
    vllm_plugin.check_loaded(SimpleNamespace(num_experts=8))


def test_a_vllm_that_has_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vllm_plugin._why_not, "cpu_experts", vllm_plugin._CALLED)
    monkeypatch.delattr(experts, "UnquantizedFusedMoEMethod")
    monkeypatch.setattr(experts, "register", lambda: experts.UnquantizedFusedMoEMethod)
    vllm_plugin.register()
    with pytest.raises(
        UserError, match=r"(?s)without QaRL's plugin.*UnquantizedFusedMoEMethod.*requirements"
    ):
        vllm_plugin.check_loaded(SimpleNamespace(num_experts=8))
    vllm_plugin.check_loaded(SimpleNamespace(hidden_size=64))


MIXTURE, DENSE = SimpleNamespace(num_experts=8), SimpleNamespace()
OURS = SimpleNamespace(value="qarl.rollout.vllm_plugin:register")


@pytest.mark.parametrize(
    ("hf_config", "amx", "points", "plugins", "why"),
    [
        (MIXTURE, False, [OURS], None, None),
        (MIXTURE, False, [OURS], "qarl,other", None),
        (
            MIXTURE,
            False,
            [OURS],
            "other",
            "(?s)mixture of experts.*VLLM_PLUGINS=other leaves it out",
        ),
        (MIXTURE, False, [SimpleNamespace(value="vllm.plugins:x")], None, "no entry point"),
        (DENSE, False, [], "other", None),
        (DENSE, True, [OURS], None, None),
        (DENSE, True, [OURS], "other", "(?s)has AMX.*VLLM_PLUGINS=other leaves it out"),
        (DENSE, True, [], None, "no entry point"),
    ],
)
def test_a_run_asks_for_the_plugin_before_vllm_starts(
    monkeypatch, hf_config, amx, points, plugins, why
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    for module in ("cpu_experts", "cpu_bf16_linears"):
        monkeypatch.setitem(vllm_plugin._why_not, module, vllm_plugin._CALLED)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    if why is None:
        vllm_plugin.check_installed(hf_config)
        return
    with pytest.raises(UserError, match=why):
        vllm_plugin.check_installed(hf_config)


def test_a_dense_model_needs_the_linears_of_the_plugin_where_there_is_amx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vllm_plugin._why_not, "cpu_bf16_linears", "AttributeError: register_oot")
    for amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        with pytest.raises(UserError, match=r"(?s)has AMX.*register_oot") if amx else nullcontext():
            vllm_plugin.check_loaded(DENSE)


@pytest.mark.parametrize("module", ["cuda_operators", "cuda_linears"])
def test_an_aligned_engine_on_a_gpu_needs_the_operators_of_the_plugin(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, and below level `model`, it needs none of them."""
    from qarl.rollout.engine_checks import check_plugin
    from qarl.rollout.engine_config import EngineConfig

    for name in ("own_linears", "cuda_operators", "cuda_linears"):
        monkeypatch.setitem(vllm_plugin._why_not, name, None)
    monkeypatch.setitem(vllm_plugin._why_not, module, "AttributeError: ir")
    monkeypatch.setattr("vllm.plugins.load_general_plugins", lambda: None)
    for aligned, gpu in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        config = EngineConfig("x", get_scheme("bf16"), (), 8, aligned=aligned)
        refusal = pytest.raises(
            UserError, match=r"(?s)operators for GPUs.*align=model.*AttributeError: ir"
        )
        with refusal if aligned and gpu else nullcontext():
            check_plugin(config, DENSE)


@needs_w4a16_cpu
def test_a_compiled_mixture_is_refused(tmp_path: Path) -> None:
    """vLLM's own error is a page about data-dependent expressions; dense models may be compiled."""
    from qarl.rollout.engine import EngineConfig, RolloutEngine

    save_random_moe(tmp_path / "model")
    scheme = get_scheme("w4a16", 32)
    with pytest.raises(
        UserError, match=r"(?s)cannot compile a mixture.*rollout\.enforce_eager=true"
    ):
        RolloutEngine(
            EngineConfig(str(tmp_path / "model"), scheme, IGNORE, 64, enforce_eager=False)
        )
    for backend in ("local", "verl"):
        for hf_config, enforce_eager, refused in (
            (DENSE, False, False),
            (MIXTURE, True, False),
            (MIXTURE, False, backend == "local"),  # verl's engines are always eager on a CPU
        ):
            config: Any = SimpleNamespace(
                backend=backend,
                quant=SimpleNamespace(kernels=KernelChoice.ENGINE, scheme="w4a16"),
                rollout=SimpleNamespace(enforce_eager=enforce_eager),
            )
            with pytest.raises(UserError, match="cannot compile") if refused else nullcontext():
                check_experts(config, SimpleNamespace(on_cpu=True), hf_config)


def test_names_of_the_number_of_experts_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    for name in ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"):
        config = SimpleNamespace(**{name: 5})
        assert (
            ModelArchConfigConvertorBase(config, config).get_num_experts()
            == vllm_plugin.experts_of(config)
            == 5
        )


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8"])
def test_our_schemes_are_known_in_vllms_own_reading_of_them(name: str) -> None:
    scheme = get_scheme(name, 32)
    config = experts.CompressedTensorsConfig.from_config(scheme.quantization_config(["lm_head"]))
    assert weights.scheme_of_weights(config.target_scheme_map["Linear"]) == scheme


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("w4a16", "weights", {"symmetric": False}),
        ("w4a16", "weights", {"strategy": "channel", "group_size": None}),
        ("w8a8", "input_activations", {"symmetric": False}),
        ("fp8", "input_activations", {"dynamic": False, "strategy": "tensor"}),
        ("w4a8", "weights", {}),
    ],
)
def test_other_schemes_are_left_to_vllm(name: str, part: str, change: dict[str, Any]) -> None:
    from compressed_tensors.quantization import QuantizationArgs

    group = get_scheme(name, 32).quantization_config([])["config_groups"]["group_0"]
    arguments = {key: group.get(key) for key in ("weights", "input_activations")}
    arguments[part] = {**arguments[part], **change}
    read = {
        key: None if args is None else QuantizationArgs.model_validate(args)
        for key, args in arguments.items()
    }
    assert weights.scheme_of_weights(read) is None


def method(group_size: int = 32, *, ep: bool = False, bias: bool = False) -> Any:
    moe: Any = SimpleNamespace(
        experts_per_token=2,
        has_bias=bias,
        moe_parallel_config=SimpleNamespace(use_ep=ep, tp_size=1),
    )
    return experts.LowBitExpertsMethod(moe, get_scheme("w4a16", group_size))


@needs_w4a16_cpu
@pytest.mark.parametrize(
    ("refusing", "sizes", "why"),
    [
        (method(ep=True), (128, 64), "expert parallelism"),
        (method(bias=True), (128, 64), "without biases"),
        (method(group_size=48), (96, 64), "not a multiple of the group size 48"),
    ],
)
def test_experts_that_the_kernel_does_not_multiply_are_refused(
    refusing: Any, sizes: tuple[int, int], why: str
) -> None:
    layer: Any = torch.nn.Module()  # with what `create_weights` reads of vLLM's RoutedExperts
    layer.layer_name, layer.activation = "model.layers.0.mlp.experts", weights.MoEActivation.SILU
    layer.apply_router_weight_on_input = False
    with pytest.raises(
        UserError, match=rf"(?s)no kernel supports these w4a16 experts.*layers\.0\.mlp.*{why}"
    ):
        refusing.create_weights(layer, 4, *sizes, torch.bfloat16)
