"""Each argument that transformers' classes pass to their attention acts, packed, padded and alone, or is refused."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from family_models import LENGTHS, random_model
from torch import nn

from qarl.align import packed_attention
from qarl.align.cpu import engine_attention, fp32_attention
from qarl.align.cuda import cuda_attention
from qarl.align.packed_attention import (
    APPLIED,
    check_source,
    passed_arguments,
    rows_attention,
    scored_attention,
    use_rows_attention,
)
from qarl.errors import UserError

ROWS = (5, 12, 1, 9)
HEADS, KEY_HEADS, SIZE = 4, 2, 16


def read_sources() -> dict[str, str]:
    """The source of each model class of transformers that chooses its attention by name."""
    files = Path(transformers.__path__[0]).glob("models/*/modeling_*.py")
    texts = {f"{file.parent.name}.{file.stem}": file.read_text() for file in files}
    return {name: text for name, text in texts.items() if "ALL_ATTENTION_FUNCTIONS" in text}


SOURCES = read_sources()


def keywords(source: str) -> set[str]:
    """The keyword arguments of calls of whatever `ALL_ATTENTION_FUNCTIONS` returned, under any name."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value
        and "ALL_ATTENTION_FUN" in ast.unparse(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    calls = (node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return {keyword.arg for call in calls if call.func.id in names for keyword in call.keywords if keyword.arg}


PASSED = {name: keywords(source) for name, source in SOURCES.items()}
ARGUMENTS = sorted(set[str]().union(*PASSED.values()))


def inputs(tokens: int = sum(ROWS), dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tokens, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def module(sinks: torch.Tensor | None = None, causal: bool = True) -> Any:
    made = nn.Module()
    made.num_key_value_groups, made.head_dim, made.sinks, made.is_causal = HEADS // KEY_HEADS, SIZE, sinks, causal
    return made


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """transformers' eager attention of one row, with the mask that its classes make of the same arguments."""
    given = dict(given)
    length, sinks = q.shape[2], given.pop("s_aux", None)
    seen = torch.ones(length, length, dtype=torch.bool)
    if given.pop("is_causal", True):
        seen = seen.tril()
    if window := given.pop("sliding_window", None):
        seen = seen.triu(1 - window)
    mask = torch.zeros(1, 1, length, length, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
    family = "gpt_oss" if sinks is not None else "gemma2"
    source = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    scaling = given.pop("scaling", SIZE**-0.5)
    found: torch.Tensor = source.eager_attention_forward(module(sinks), q, k, v, mask, scaling=scaling, **given)[0]
    return found


def run(form: str, attend: Any, tensors: list[torch.Tensor], given: dict[str, Any]) -> torch.Tensor:
    """The attention [tokens, H, D] of rows of `ROWS` tokens, in one of three forms of a forward."""
    parts = list(zip(*(tensor.split(ROWS, 2) for tensor in tensors), strict=True))
    if form == "alone":
        window = given.get("sliding_window")
        masks = [
            packed_attention._window_mask(part[0], window) for part in parts
        ]  # transformers makes it, as the row is not packed
        return torch.cat(
            [attend(module(), *part, mask, **given)[0] for part, mask in zip(parts, masks, strict=True)], 1
        )[0]
    if form == "packed":
        return attend(module(), *tensors, None, row_lengths=ROWS, **given)[0][0]
    if form == "packed, told by positions":
        positions = torch.cat([torch.arange(length) for length in ROWS])[None]
        return attend(module(), *tensors, None, **given, position_ids=positions)[0][0]
    longest = max(ROWS)
    padded = [
        torch.cat([nn.functional.pad(part[i], (0, 0, 0, longest - part[i].shape[2]), value=9.0) for part in parts])
        for i in range(3)
    ]
    found = attend(module(), *padded, None, row_lengths=ROWS, **given)[0]
    return torch.cat([row[:length] for row, length in zip(found, ROWS, strict=True)])


CASES: dict[str, list[dict[str, Any]]] = {
    "scaling": [{"scaling": 1.0}, {"scaling": 0.05}],
    "softcap": [
        {"softcap": 5.0, "scaling": 2.0},
        {"softcap": 50.0, "scaling": 20.0},
        {"softcap": 2.0, "sliding_window": 3},
    ],
    "s_aux": [{"s_aux": torch.linspace(-1, 3, HEADS)}, {"s_aux": torch.linspace(-1, 3, HEADS), "sliding_window": 4}],
    "sliding_window": [{"sliding_window": 3}, {"sliding_window": 1}],
    "is_causal": [{"is_causal": False}, {"is_causal": False, "softcap": 2.0}],
}
BY_POSITION = {"query", "key", "value"}
OF_THEIR_OWN = {"dropout", "attention_mask", "position_ids"}
"""Arguments with a test of their own below; `position_ids` is the form `packed, told by positions`."""
FORMS = ("packed", "packed, told by positions", "padded", "alone")


def test_the_list_is_transformers_own():
    assert len(SOURCES) > 200 and {"softcap", "s_aux", "sliding_window", "is_causal"} <= set(ARGUMENTS)
    assert set(ARGUMENTS) & APPLIED == set(CASES) | ((BY_POSITION | OF_THEIR_OWN) & set(ARGUMENTS))
    for name, source in SOURCES.items():
        assert passed_arguments(source) == PASSED[name], name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name in CASES])
def test_an_argument_acts_as_in_eager_attention(name, form):
    tensors = inputs()
    parts = list(zip(*(tensor.split(ROWS, 2) for tensor in tensors), strict=True))
    for case in CASES[name]:
        expected = torch.cat([eager(*part, case) for part in parts], 1)[0]
        without = torch.cat([eager(*part, {k: v for k, v in case.items() if k != name}) for part in parts], 1)[0]
        assert (expected - without).abs().max() > 1e-3, "the case must tell whether the argument acts"
        found = run(form, rows_attention, tensors, case)
        # eager's softmax rounds scores, here up to 50, to FP32: by 2e-6, and two of them to a quotient
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name not in APPLIED])
def test_an_argument_without_effect_is_refused_by_name(name):
    passing = [family for family, passed in PASSED.items() if name in passed]
    assert passing
    for family in passing:
        with pytest.raises(UserError, match=rf"\b{name}\b"):
            check_source(family, SOURCES[family])


def test_masks_that_a_pack_would_lose_are_refused():
    with pytest.raises(UserError, match="sliding window only as a mask"):
        check_source("phimoe", SOURCES["phimoe.modeling_phimoe"])
    with pytest.raises(UserError, match="chunks only as a mask"):
        check_source("llama4", SOURCES["llama4.modeling_llama4"])


@pytest.mark.parametrize("case", [{}, {"softcap": 2.0}, {"s_aux": torch.zeros(HEADS)}])
@pytest.mark.parametrize("form", FORMS)
def test_dropout_acts(form, case):
    tensors = inputs()
    torch.manual_seed(0)
    kept = run(form, rows_attention, tensors, case)
    draws = torch.stack([run(form, rows_attention, tensors, case | {"dropout": 0.3}) for _ in range(400)])
    assert draws.std(0).amax() > 0.1
    error = (draws.mean(0) - kept).abs() / (draws.std(0) / 20 + 1e-9)
    assert error[draws.std(0) > 0.01].max() < 6


@pytest.mark.parametrize("case", [{}, {"softcap": 2.0}])
@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_a_mask_acts(case, kind):
    """Over the rows' lengths, as in a batch that is padded on the left."""
    tensors = [tensor[:, :, :12] for tensor in inputs()]
    seen = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].clone()
    seen[..., 4:, :3] = False
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    mask = seen if kind is torch.bool else added
    found, _ = rows_attention(module(), *tensors, mask, row_lengths=(12,), **case)
    source = importlib.import_module("transformers.models.gemma2.modeling_gemma2")
    expected = source.eager_attention_forward(module(), *tensors, added, scaling=SIZE**-0.5, **case)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["none", *CASES])
def test_a_pack_on_cuda_takes_the_fused_operator_only_if_it_has_the_argument(monkeypatch, name):
    """A stand-in for a tensor on CUDA; the operator itself is compared in test_packed_attention.py and tests/gpu."""
    called = []
    monkeypatch.setattr(
        packed_attention, "varlen_attention", lambda *given: called.append(given[3:]) or given[0].transpose(1, 2)
    )

    class OnCuda(torch.Tensor):
        is_cuda = True

    query, key, value = inputs()
    for case in CASES.get(name, [{}]):
        called.clear()
        rows_attention(module(), query.as_subclass(OnCuda), key, value, None, row_lengths=ROWS, **case)
        fused = set(case) <= {"scaling", "sliding_window"}
        assert called == ([(ROWS, case.get("scaling"), case.get("sliding_window"))] if fused else [])


def test_a_window_without_causality_is_refused():
    with pytest.raises(ValueError, match="window and is not causal"):
        rows_attention(module(causal=False), *inputs(), None, row_lengths=ROWS, sliding_window=3)


@pytest.mark.parametrize("attend", [fp32_attention, engine_attention, cuda_attention])
@pytest.mark.parametrize("name", ["softcap", "s_aux", "sliding_window", "is_causal"])
def test_levels_model_and_exact_refuse_what_they_do_not_apply(attend, name):
    with pytest.raises(ValueError, match=name):
        attend(module(), *inputs(dtype=torch.bfloat16), None, row_lengths=ROWS, **{"scaling": 0.25} | CASES[name][0])


def test_blocks_of_queries_give_the_same_values_and_gradients(monkeypatch):
    results = []
    for block in (1024, 4):
        monkeypatch.setattr("qarl.align.packed_attention._QUERIES", block)
        for given in (
            {"mask": None, "causal": True},
            {"mask": torch.ones(27, 27).bool().tril()[None, None], "causal": False},
        ):
            tensors = [tensor.requires_grad_() for tensor in inputs()]
            found = scored_attention(*tensors, softcap=2.0, **given)
            found.square().sum().backward()
            results.append([found.detach(), *(tensor.grad for tensor in tensors)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def sharpened(family: str, cap: float) -> Any:
    model = random_model(family)
    model.config.attn_logit_softcapping = cap
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = cap
        layer.self_attn.scaling *= 20
    return model


@pytest.mark.parametrize("cap", [5.0, 50.0])
@torch.no_grad()
def test_gemma_2_is_its_eager_self(cap):
    model = sharpened("gemma2", cap)
    ids = torch.randint(1, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("eager")
    alone = torch.cat([model(input_ids=row, use_cache=False).logits for row in ids.split(LENGTHS, 1)], 1)
    model.set_attn_implementation("sdpa")
    assert use_rows_attention(model)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    longest = max(LENGTHS)
    padded = torch.cat([nn.functional.pad(row, (0, longest - row.shape[1])) for row in ids.split(LENGTHS, 1)])
    how: dict[str, Any] = {"attention_mask": (padded > 0).long()}
    for given in (how, how | {"row_lengths": LENGTHS}):
        found = model(input_ids=padded, use_cache=False, **given).logits
        rows_found = torch.cat([row[:length] for row, length in zip(found, LENGTHS, strict=True)])[None]
        torch.testing.assert_close(rows_found, alone, rtol=1e-4, atol=1e-4)


def test_a_model_that_is_refused_is_refused_when_it_is_built():
    model = SimpleNamespace(config=SimpleNamespace(model_type="phimoe", _attn_implementation="sdpa"))
    kind = type("Model", (SimpleNamespace,), {"_supports_attention_backend": True})
    kind.__module__ = importlib.import_module("transformers.models.phimoe.modeling_phimoe").__name__
    with pytest.raises(UserError, match="phimoe"):
        use_rows_attention(kind(**vars(model)))
