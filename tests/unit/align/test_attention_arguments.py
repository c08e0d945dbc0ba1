"""Each argument that the families' classes pass to their attention acts, packed, padded and alone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from qarl.align import packed_attention
from qarl.align.cpu_attention import engine_attention, fp32_attention
from qarl.align.cuda import cuda_attention
from qarl.align.packed_attention import rows_attention, scored_attention

ROWS = (5, 12, 1, 9)
HEADS, KEY_HEADS, SIZE = 4, 2, 16


def inputs(tokens: int = sum(ROWS), dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tokens, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def module(causal: bool = True) -> Any:
    made = nn.Module()
    made.num_key_value_groups, made.head_dim, made.is_causal = HEADS // KEY_HEADS, SIZE, causal
    return made


def eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    """transformers' eager attention of one row, with the mask that its classes make of the same arguments."""
    kwargs = dict(kwargs)
    length = q.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool)
    if kwargs.pop("is_causal", True):
        seen = seen.tril()
    if window := kwargs.pop("sliding_window", None):
        seen = seen.triu(1 - window)
    mask = torch.zeros(1, 1, length, length, dtype=q.dtype).masked_fill(
        ~seen, torch.finfo(q.dtype).min
    )
    source = importlib.import_module("transformers.models.gemma2.modeling_gemma2")
    scaling = kwargs.pop("scaling", SIZE**-0.5)
    output: torch.Tensor = source.eager_attention_forward(
        module(), q, k, v, mask, scaling=scaling, **kwargs
    )[0]
    return output


def run(
    form: str, attend: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]
) -> torch.Tensor:
    """The attention [tokens, H, D] of rows of `ROWS` tokens, in one of three forms of a forward."""
    parts = list(zip(*(tensor.split(ROWS, 2) for tensor in tensors), strict=True))
    if form == "alone":
        window = kwargs.get("sliding_window")
        # transformers makes the mask of a row that is not packed.
        alone = [
            attend(module(), *part, packed_attention._window_mask(part[0], window), **kwargs)[0]
            for part in parts
        ]
        return torch.cat(alone, 1)[0]
    if form == "packed":
        return attend(module(), *tensors, None, row_lengths=ROWS, **kwargs)[0][0]
    if form == "packed, told by positions":
        positions = torch.cat([torch.arange(length) for length in ROWS])[None]
        return attend(module(), *tensors, None, **kwargs, position_ids=positions)[0][0]
    longest = max(ROWS)
    padded = [
        torch.cat(
            [
                nn.functional.pad(part[i], (0, 0, 0, longest - part[i].shape[2]), value=9.0)
                for part in parts
            ]
        )
        for i in range(3)
    ]
    output = attend(module(), *padded, None, row_lengths=ROWS, **kwargs)[0]
    assert not any(row[length:].any() for row, length in zip(output, ROWS, strict=True)), (
        "zeros in the padding"
    )
    return torch.cat([row[:length] for row, length in zip(output, ROWS, strict=True)])


CASES: dict[str, list[dict[str, Any]]] = {
    "scaling": [{"scaling": 1.0}, {"scaling": 0.05}],
    "softcap": [{"softcap": 5.0, "scaling": 2.0}, {"softcap": 2.0, "sliding_window": 3}],
    "sliding_window": [{"sliding_window": 3}, {"sliding_window": 1}],
    "is_causal": [{"is_causal": False}, {"is_causal": False, "softcap": 2.0}],
}
FORMS = ("packed", "packed, told by positions", "padded", "alone")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_an_argument_acts_as_in_eager_attention(name, form):
    tensors = inputs()
    parts = list(zip(*(tensor.split(ROWS, 2) for tensor in tensors), strict=True))
    for case in CASES[name]:
        expected = torch.cat([eager(*part, case) for part in parts], 1)[0]
        without = torch.cat(
            [eager(*part, {k: v for k, v in case.items() if k != name}) for part in parts], 1
        )[0]
        assert (expected - without).abs().max() > 1e-3, (
            "the case must tell whether the argument acts"
        )
        output = run(form, rows_attention, tensors, case)
        # eager's softmax rounds scores, here up to 50, to FP32: by 2e-6, and two of them to a quotient
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [{}, {"softcap": 2.0}])
@pytest.mark.parametrize("form", FORMS)
def test_dropout_acts(form, case):
    tensors = inputs()
    torch.manual_seed(0)
    without_dropout = run(form, rows_attention, tensors, case)
    draws = torch.stack(
        [run(form, rows_attention, tensors, case | {"dropout": 0.3}) for _ in range(400)]
    )
    assert draws.std(0).amax() > 0.1
    error = (draws.mean(0) - without_dropout).abs() / (draws.std(0) / 20 + 1e-9)
    assert error[draws.std(0) > 0.01].max() < 6


def test_a_window_without_causality_is_refused():
    with pytest.raises(ValueError, match="window and is not causal"):
        rows_attention(module(causal=False), *inputs(), None, row_lengths=ROWS, sliding_window=3)


@pytest.mark.parametrize("attend", [fp32_attention, engine_attention, cuda_attention])
@pytest.mark.parametrize("name", ["softcap", "sliding_window", "is_causal"])
def test_levels_model_and_exact_refuse_what_they_do_not_apply(attend, name):
    with pytest.raises(ValueError, match=name):
        attend(
            module(),
            *inputs(dtype=torch.bfloat16),
            None,
            row_lengths=ROWS,
            **{"scaling": 0.25} | CASES[name][0],
        )


def test_blocks_of_queries_give_the_same_values_and_gradients(monkeypatch):
    results = []
    for block in (1024, 4):
        monkeypatch.setattr("qarl.align.packed_attention._QUERIES", block)
        for kwargs in (
            {"mask": None, "causal": True},
            {"mask": torch.ones(27, 27).bool().tril()[None, None], "causal": False},
        ):
            tensors = [tensor.requires_grad_() for tensor in inputs()]
            output = scored_attention(*tensors, softcap=2.0, **kwargs)
            output.square().sum().backward()
            results.append([output.detach(), *(tensor.grad for tensor in tensors)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])
