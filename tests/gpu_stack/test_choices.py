"""From a config of compressed-tensors to a layer of the locked vLLM to its kernel, for four GPUs. QaRL names the same.

vLLM's own layers are built on a platform that answers as the GPU. `choose_linear_kernel` (the trainer) and
`chosen_kernel` (the doctor) must agree with the class in the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_lock import CAPABILITIES, pretend, required
from gpu_lock_models import build, engine_config, process_groups, stand_in_operators
from marlin_reference import random_stack, vllm_layout
from random_models import save_random_model

from qarl.errors import UserError
from qarl.kernels.base import ExpertsShape
from qarl.kernels.cuda import vllm_linears
from qarl.kernels.int4 import to_marlin
from qarl.kernels.reference import quantize_fp8_cuda
from qarl.kernels.registry import choose_experts_kernel, choose_linear_kernel
from qarl.rollout.chosen_kernel import chosen_kernel
from qarl.schemes import QuantArgs, Scheme, get_scheme
from qarl.schemes.kernel_choice import KernelChoice
from qarl.schemes.w4a8 import W4A8

required()

LINEARS = {
    ("w4a16", "MacheteLinearKernel"): "vllm_machete",
    ("w4a16", "MarlinLinearKernel"): "vllm_marlin",
    ("w8a8", "CutlassInt8ScaledMMLinearKernel"): "vllm_cutlass_int8",
    ("fp8", "CutlassFP8ScaledMMLinearKernel"): "vllm_cutlass_fp8",
}
"""vLLM's class -> QaRL's kernel that runs the same operators. For other classes QaRL has only its own kernels."""
EXPERTS = {
    ("w4a16", "MarlinExperts"): "vllm_marlin_experts",
    ("w8a8", "TritonExperts"): "vllm_triton_experts",
    ("fp8", "TritonExperts"): "vllm_triton_experts",
    ("fp8", "CutlassExpertsFp8"): "vllm_cutlass_experts",
    ("fp8", "TritonOrCutlassExperts"): "vllm_cutlass_experts",
}
SHAPES = [(2048, 1536), (192, 1536), (64, 1536), (192, 96), (2040, 1536)]
"""[N, K]: for Machete; N off Machete's tiles; one Marlin tile; padded by Marlin; off everybody's tiles."""
SCHEMES = [("w4a16", 128), ("w4a16", 64), ("w4a16", 32), ("w8a8", 128), ("fp8", 128)]


@pytest.fixture
def gpu(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[int, int]]:
    pretend(monkeypatch, request.param)
    caches = (vllm_linears._not_the_engines, vllm_linears.chosen_experts_kernel)
    for cached in caches:
        cached.cache_clear()
    yield request.param
    for cached in caches:
        cached.cache_clear()


def layer_of(scheme: Scheme, shape: tuple[int, int]) -> Any:
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    config = CompressedTensorsConfig.from_config(scheme.quantization_config([]))
    return ReplicatedLinear(
        shape[1],
        shape[0],
        bias=False,
        quant_config=config,
        prefix="layer",
        params_dtype=torch.bfloat16,
    )


def layers_kernel(scheme_name: str, group_size: int, shape: tuple[int, int]) -> str:
    """The class of the kernel in vLLM's own layer, or what vLLM says against it."""
    try:
        scheme = layer_of(get_scheme(scheme_name, group_size), shape).scheme
    except (AssertionError, NotImplementedError, ValueError) as error:
        return f"nothing ({error})"
    if (
        type(scheme).__name__ == "CompressedTensorsW8A16Fp8"
    ):  # it calls the operators of this class itself
        return "MarlinFP8ScaledMMLinearKernel"
    return type(getattr(scheme, "kernel", None) or scheme.fp8_linear).__name__


@pytest.fixture(scope="module")
def dense_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_random_model(tmp_path_factory.mktemp("dense"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend(monkeypatch, (9, 0))
        return engine_config(folder, get_scheme("bf16"), ())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("scheme", "group_size"), SCHEMES)
@pytest.mark.parametrize("gpu", CAPABILITIES, indirect=True, ids=str)
def test_linears(
    gpu: tuple[int, int], dense_config: Any, scheme: str, group_size: int, shape: tuple[int, int]
) -> None:
    if scheme == "w4a16" and shape[1] % group_size:
        pytest.skip("the checkpoint itself would be refused")
    with process_groups(dense_config):
        engine = layers_kernel(scheme, group_size, shape)
    trainer = choose_linear_kernel(get_scheme(scheme, group_size), torch.device("cuda", 0), shape)
    expected = LINEARS.get((scheme, engine))
    if scheme != "w4a16" and shape[0] % 16:
        expected = None  # cutlass_scaled_mm itself turns to a Triton kernel of vLLM's
    if scheme == "w8a8" and gpu >= (10, 0):
        expected = None  # the class is chosen, but its operator refuses int8 there: the engine fails at its first batch
    if expected:
        assert trainer.kernel.name == expected, trainer.reason
    else:
        assert not trainer.kernel.name.startswith("vllm"), f"the engine has {engine}"
    try:
        doctor = chosen_kernel(get_scheme(scheme, group_size), shape, shape)
    except ValueError as error:
        doctor = f"nothing ({error})"
    assert doctor == engine or (doctor.startswith("nothing") and engine.startswith("nothing"))


@pytest.fixture(scope="module")
def aligned_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That of an FP8 engine at level `model`."""
    folder = save_random_model(tmp_path_factory.mktemp("aligned"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend(monkeypatch, (9, 0))
        return engine_config(folder, get_scheme("fp8"), ("lm_head",), aligned=True)


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True, ids=str)
@pytest.mark.parametrize("shape", [(48, 64), (48, 72)], ids=str)
def test_fp8_linears_of_an_aligned_engine_get_enough_rows(
    gpu: tuple[int, int],
    aligned_config: Any,
    shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where vLLM pads K to a multiple of 16. The operators, which a CPU lacks, are PyTorch's."""
    from vllm import _custom_ops as ops

    from qarl.rollout.vllm_plugin import check_operators_loaded
    from qarl.rollout.vllm_plugin.cuda_linears import check_rows

    rows_seen = []

    def layers(kernel: Any) -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
        model[1].scheme = SimpleNamespace(fp8_linear=kernel)
        return model

    def scaled_fp8_quant(
        x: torch.Tensor, scale: None, num_token_padding: int, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert named["use_per_token_if_dynamic"] and named["scale_ub"] is None
        values, scales = quantize_fp8_cuda(x)
        missing = max(num_token_padding - len(x), 0)
        garbage = torch.full((missing, x.shape[1]), 1.0).to(values.dtype)
        return torch.cat((values, garbage)), torch.cat(
            (scales, torch.full((missing, 1), torch.nan))
        )

    def cutlass_scaled_mm(
        a: torch.Tensor, b: torch.Tensor, out_dtype: Any, scale_a: Any, scale_b: Any, bias: Any
    ) -> torch.Tensor:
        rows_seen.append(len(a))
        return ((a.double() @ b.double()) * scale_a * scale_b.view(1, -1)).to(out_dtype)

    monkeypatch.setattr(ops, "scaled_fp8_quant", scaled_fp8_quant)
    monkeypatch.setattr(ops, "cutlass_scaled_mm", cutlass_scaled_mm)
    check_operators_loaded()
    with process_groups(aligned_config):
        kernel = layer_of(get_scheme("fp8"), shape).scheme.fp8_linear
    assert type(kernel).__name__ == "QaRLPaddedFP8LinearKernel"
    check_rows(layers(kernel))
    with pytest.raises(UserError, match="vLLM chose SimpleNamespace for a layer"):
        check_rows(layers(SimpleNamespace()))
    torch.manual_seed(0)
    weight, scale = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(shape[0], 1) + 0.5
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    kernel.process_weights_after_loading(layer)
    x = torch.randn(300, shape[1]).bfloat16()
    values, scales = quantize_fp8_cuda(x)
    exact = values.double() @ weight.double().t() * scales * scale.t()
    for rows in (1, 64, 65, 300):
        for y in (
            kernel.apply_weights(layer, x[:rows]),
            kernel.apply_weights(layer, x[None, :rows])[0],
        ):
            torch.testing.assert_close(y.double(), exact[:rows], rtol=1e-6, atol=1e-6)
    assert rows_seen == [65, 65, 65, 65, 65, 65, 300, 300]


@dataclass(frozen=True)
class Declared(W4A8):
    """W4A8 whose checkpoint says that its activations are of `type`."""

    type: str = "int"

    @property
    def input_activations(self) -> QuantArgs:
        return replace(super().input_activations, type=self.type)


@pytest.mark.parametrize("declared", ["int", "float"])
@pytest.mark.parametrize("gpu", CAPABILITIES, indirect=True, ids=str)
def test_w4a8_has_fp8_activations_on_hopper_and_no_kernel_elsewhere(
    gpu: tuple[int, int], dense_config: Any, declared: str
) -> None:
    """`declared`: the type of the activations in the checkpoint. `W4A8.no_gpu_kernel` is why QaRL refuses it."""
    ours = get_scheme("w4a8", 128)
    assert ours.input_activations and ours.input_activations.type == "int"
    scheme = Declared(ours.group_size, declared)
    with process_groups(dense_config):
        if gpu != (9, 0):
            with pytest.raises(
                NotImplementedError, match="No compressed-tensors compatible scheme"
            ):
                layer_of(scheme, SHAPES[0])
            return
        kernel = layer_of(scheme, SHAPES[0]).scheme.kernel
    assert type(kernel).__name__ == "CutlassW4A8LinearKernel"
    assert kernel.config.act_type == torch.float8_e4m3fn
    assert type(kernel.quant_fp8).__name__ == "QuantFP8"


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    return save_random_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", **sizes)


@pytest.mark.parametrize(
    ("scheme", "group_size"), [("w4a16", 128), ("w4a16", 32), ("w8a8", 128), ("fp8", 128)]
)
@pytest.mark.parametrize("gpu", CAPABILITIES, indirect=True, ids=str)
def test_experts(gpu: tuple[int, int], moe_folder: Path, scheme: str, group_size: int) -> None:
    stand_in_operators()
    config = engine_config(
        moe_folder, get_scheme(scheme, group_size), ("lm_head", "re:.*mlp[.]gate$")
    )
    shape = ExpertsShape(experts=4, top_k=2, hidden=256, intermediate=256)
    with process_groups(config):
        try:
            experts = [m for m in build(config).modules() if type(m).__name__ == "RoutedExperts"]
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            experts, engine = [], f"nothing ({error})"
        for layer in experts:
            method = layer.quant_method
            engine = (getattr(method, "experts_cls", None) or type(method)).__name__
    named = vllm_linears.chosen_experts_kernel(get_scheme(scheme, group_size), shape)
    assert named == engine or (named.startswith("nothing") and engine.startswith("nothing"))
    trainer = choose_experts_kernel(get_scheme(scheme, group_size), torch.device("cuda", 0), shape)
    expected = EXPERTS.get((scheme, engine))
    if expected == "vllm_cutlass_experts" and gpu >= (10, 0):
        expected = None  # there vLLM's own choice depends on the number of tokens
    assert (
        trainer.kernel.name == expected if expected else not trainer.kernel.name.startswith("vllm")
    ), trainer.reason


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True, ids=str)
def test_experts_and_routers_of_an_engine_that_the_trainer_follows(
    gpu: tuple[int, int], moe_folder: Path, scheme: str
) -> None:
    """QaRL's own kernel only where it is asked for. vLLM's FP8 experts get enough pairs, and every router is QaRL's."""
    stand_in_operators()
    ignore = ("lm_head", "re:.*mlp[.]gate$")
    found: dict[tuple[KernelChoice, bool], tuple[str, str]] = {}
    for kernels in (KernelChoice.ENGINE, KernelChoice.QARL):
        for aligned in (False, True):
            config = engine_config(
                moe_folder, get_scheme(scheme, 128), ignore, kernels=kernels, aligned=aligned
            )
            with process_groups(config):
                layers = dict(build(config).named_modules())
            methods = {
                name.rpartition(".")[2]: type(layer.quant_method).__name__
                for name, layer in layers.items()
                if name.endswith((".routed_experts", ".mlp.gate"))
            }
            found[kernels, aligned] = methods["routed_experts"], methods["gate"]
    vllms = {
        "w4a16": "CompressedTensorsWNA16MarlinMoEMethod",
        "w8a8": "CompressedTensorsW8A8Int8MoEMethod",
        "fp8": "CompressedTensorsW8A8Fp8MoEMethod",
    }[scheme]
    padded = "PaddedFp8Method" if scheme == "fp8" else vllms
    assert found == {
        (KernelChoice.ENGINE, False): (vllms, "UnquantizedLinearMethod"),
        (KernelChoice.ENGINE, True): (padded, "RouterMethod"),
        (KernelChoice.QARL, False): ("OwnExpertsMethod", "UnquantizedLinearMethod"),
        (KernelChoice.QARL, True): ("OwnExpertsMethod", "RouterMethod"),
    }


@pytest.mark.parametrize("pairs", [14, 64, 65, 66])
@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True, ids=str)
def test_vllms_fp8_experts_never_get_64_pairs_or_fewer(
    gpu: tuple[int, int], moe_folder: Path, monkeypatch: pytest.MonkeyPatch, pairs: int
) -> None:
    """With one expert a token: as many rows as pairs. Its caller gets the outputs of its tokens."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as vllms,
    )

    stand_in_operators()
    ignore = ("lm_head", "re:.*mlp[.]gate$")
    config = engine_config(moe_folder, get_scheme("fp8"), ignore, aligned=True)
    with process_groups(config):
        (layer,) = (m for m in build(config).modules() if type(m).__name__ == "RoutedExperts")
    seen: list[int] = []

    def apply(
        self: Any, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        seen.append(ids.numel())
        return x * weights

    monkeypatch.setattr(vllms.CompressedTensorsW8A8Fp8MoEMethod, "apply", apply)
    x, weights = torch.randn(pairs, 256).bfloat16(), torch.rand(pairs, 1)
    ids = torch.zeros(pairs, 1, dtype=torch.int32)
    y = layer.quant_method.apply(layer, x, weights, ids, None, None)
    assert torch.equal(y, x * weights) and seen == [max(pairs, 65)]


@pytest.mark.parametrize("group_size", [32, 64])
def test_the_layout_of_marlins_experts_is_vllms(group_size: int) -> None:
    tensors = random_stack(3, 128, 64, group_size)
    made = to_marlin(tensors)
    assert all(
        torch.equal(a, b)
        for a, b in zip(made.values(), vllm_layout(tensors, group_size), strict=True)
    )


@pytest.mark.parametrize(
    ("rows", "error"), [(torch.int8, AssertionError), (torch.bfloat16, AttributeError)]
)
@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True, ids=str)
def test_vllms_triton_experts_refuse_int8_rows(
    gpu: tuple[int, int], rows: torch.dtype, error: type[Exception]
) -> None:
    """`qarl.checks.registry.check_experts` refuses W8A8 for it. BF16 rows pass the same lines, and then lack the
    rest of the object."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    experts: Any = object.__new__(TritonExperts)
    experts.quant_config = SimpleNamespace(use_int4_w4a16=False)
    names = "output w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale a2_scale workspace13"
    rest = dict.fromkeys(
        [*names.split(), "workspace2", "expert_tokens_meta", "apply_router_weight_on_input"]
    )
    rest |= {"w1": torch.zeros(2, 8, 4), "w2": torch.zeros(2, 4, 8)}
    with pytest.raises(error):
        experts.apply(hidden_states=torch.zeros(3, 4, dtype=rows), **rest)
