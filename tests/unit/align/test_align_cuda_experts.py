"""Level `model` for mixtures of experts on a GPU, as far as a CPU can show it: routers, and where the level exists."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from contract_checks import chosen_experts_reference, stand_in_for_vllm
from random_models import save_random_model

from qarl.align import align_model, cuda
from qarl.align.applied_level import resolve_level
from qarl.align.cpu import align_module
from qarl.align.cuda_router import CudaRouter
from qarl.align.router import recorded_routing, replayed_routing
from qarl.checks.model import applied_level
from qarl.config import load_config
from qarl.config.level import Level
from qarl.kernels.base import Kernel
from qarl.kernels.cuda.vllm_experts import VllmCutlassExperts, VllmMarlinExperts
from qarl.kernels.experts import TritonExperts, TritonInvariantExperts
from qarl.kernels.triton.linears import TritonW4A16Linear
from qarl.quant import quantize_model
from qarl.schemes.kernel_choice import KernelChoice

pytest.importorskip("vllm")
GPU = torch.device("cuda")
IGNORE = ["lm_head", "re:.*[.]mlp[.]gate$"]


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_vllm(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe")


def make_router(experts: int, top_k: int, *, renormalize: bool) -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = transformers.Qwen3MoeConfig(
        hidden_size=64, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=renormalize
    )
    router: Any = Qwen3MoeTopKRouter(config).bfloat16()
    torch.nn.init.normal_(router.weight, std=0.3)
    align_module(router, CudaRouter)
    return router


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (4, 1), (3, 3)])
def test_the_routers_weights_are_the_engines_and_have_gradients(
    experts: int, top_k: int, renormalize: bool
) -> None:
    """Bits of the operator; the gradients of a softmax in float64, up to two roundings to BF16."""
    torch.manual_seed(experts)
    router = make_router(experts, top_k, renormalize=renormalize)
    x = torch.randn(3, 50, 64).bfloat16().requires_grad_()
    logits, weights, chosen = router(x)
    assert (logits.dtype, weights.dtype, chosen.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.int64,
    )
    values, ids = chosen_experts_reference(logits, top_k, renormalize=renormalize)
    assert torch.equal(weights, values) and torch.equal(chosen.int(), ids)
    grad = torch.randn_like(weights)
    weights.backward(grad)
    inputs = [t.detach().double().requires_grad_() for t in (x, router.weight)]
    exact = (inputs[0].reshape(-1, 64) @ inputs[1].t()).softmax(-1).gather(-1, chosen)
    if renormalize:
        exact = exact / exact.sum(-1, keepdim=True)
    exact.backward(grad.double())
    for gradient, expected in zip((x.grad, router.weight.grad), inputs, strict=True):
        assert gradient is not None and expected.grad is not None
        error = (gradient.double() - expected.grad).norm()
        assert error <= 2**-6 * expected.grad.norm() + 1e-4


def test_the_aligned_model_routes_as_the_engine(folder: Path) -> None:
    """Routers are aligned and MLPs are not there; a replay of the own choice changes no bit."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantize_model(model, scheme="w4a16", group_size=32, ignore=IGNORE)
    report = align_model(model, "model", device=GPU)
    layers = model.config.num_hidden_layers
    assert report.level == Level.MODEL and report.replaced["routers"] == layers
    assert "MLPs" not in report.replaced
    assert all(isinstance(layer.mlp.gate, CudaRouter) for layer in model.model.layers)
    assert "QaRL's router_logits, topk_softmax" in str(report.unconfirmed)
    assert report.limit_level == Level.LINEARS
    tokens = torch.randint(3, 64, (2, 20))
    with torch.no_grad(), recorded_routing(model) as record:
        plain = model(input_ids=tokens).logits
        assert plain.isfinite().all()
        with replayed_routing(model, record.experts()):
            assert torch.equal(model(input_ids=tokens).logits, plain)


MOE = transformers.Qwen3MoeConfig(num_hidden_layers=1)


@pytest.mark.parametrize(
    ("kernels", "level", "why"),
    [
        ({TritonInvariantExperts, TritonW4A16Linear}, Level.MODEL, ""),
        ({VllmCutlassExperts}, Level.MODEL, ""),
        ({VllmMarlinExperts}, Level.LINEARS, "those of vllm_marlin_experts do; quant.kernels=qarl"),
        ({TritonExperts}, Level.LINEARS, "those of triton do"),
        ({TritonW4A16Linear}, Level.LINEARS, "not for experts in BF16"),
    ],
    ids=["own", "cutlass", "marlin", "triton", "bf16"],
)
def test_the_level_needs_tokens_that_do_not_depend_on_each_other(
    kernels: set[type[Kernel]], level: Level, why: str
) -> None:
    applied = resolve_level(
        MOE, Level.MODEL, device_type="cuda", kernels=kernels, capability=(9, 0)
    )
    assert applied.level == level and why in "".join(applied.why_lower)


def test_experts_that_stay_in_bf16_lower_the_level(folder: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ignore = [*IGNORE, "re:model[.]layers[.]0[.]mlp[.]experts[.]"]
    quantize_model(model, scheme="w4a16", group_size=32, ignore=ignore)
    before = copy.deepcopy(model.config._attn_implementation)
    report = align_model(model, "model", device=GPU)
    assert report.level == Level.LINEARS and "experts in BF16" in "".join(report.why_lower)
    assert model.config._attn_implementation == before or cuda.CUDA_ATTENTION not in str(
        model.config._attn_implementation
    )


@pytest.mark.parametrize(
    ("scheme", "kernels", "ignored", "level"),
    [
        ("w4a16", KernelChoice.ENGINE, "", Level.LINEARS),
        ("w4a16", KernelChoice.QARL, "", Level.MODEL),
        ("w8a8", KernelChoice.QARL, "", Level.MODEL),
        ("fp8", KernelChoice.ENGINE, "", Level.MODEL),
        ("fp8", KernelChoice.ENGINE, ',"re:.*[.]experts[.]"', Level.LINEARS),
    ],
)
def test_the_level_is_known_on_another_machine(
    folder: Path, scheme: str, kernels: KernelChoice, ignored: str, level: Level
) -> None:
    """By the kernel that trainer and engine prefer on a GPU."""
    keys = [f"quant.scheme={scheme}", f"quant.kernels={kernels}", f"model.path={folder}"]
    keys.append(f'quant.ignore=[lm_head,"re:.*[.]mlp[.]gate$"{ignored}]')
    config = load_config(["config=quickstart_moe.yaml", *keys])
    hf_config = transformers.AutoConfig.from_pretrained(folder)
    assert applied_level(config, hf_config, "cuda", capability=90).level == level
