"""The quantizer against compressed-tensors' own functions, bit for bit."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors_rule import PRESETS, compressed_tensors_compress
from same_bytes import same_bytes
from torch import Tensor

from qarl.errors import UserError
from qarl.kernels.int4 import unpack_int4
from qarl.quant.quantize import quantize
from qarl.quant.wire_specs import wire_specs
from qarl.schemes import Scheme, get_scheme

quantize_module: Any = importlib.import_module(
    "qarl.quant.quantize"
)  # qarl.quant has a function of that name

BIT_VIEW = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
DTYPES = list(BIT_VIEW)
EIGHT_BIT = ["w8a8", "fp8"]


def assert_equals_compressed_tensors(
    weight: Tensor, group_size: int = 128, name: str = "w4a16"
) -> None:
    theirs, scheme = compressed_tensors_compress(weight, name, group_size)
    decompress = PRESETS[name][1].decompress
    mine = quantize(weight, get_scheme(name, group_size))
    assert mine.tensors.keys() == theirs.keys()
    restored = (
        [decompress(theirs, scheme)["weight"]]
        if weight.dtype == torch.bfloat16 or "4" in name
        else []
    )
    if name in EIGHT_BIT:
        theirs["weight_scale"] = theirs["weight_scale"].float()
        restored.append(decompress(theirs, scheme)["weight"])
    for tensor_name, tensor in theirs.items():
        assert same_bytes(mine.tensors[tensor_name], tensor)
    for weight_hat in restored:
        assert same_bytes(mine.dequantize(weight_hat.dtype), weight_hat)
        assert same_bytes(mine.dequantize(), weight_hat.to(torch.bfloat16))


def random_finite_bits(
    shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Every exponent equally likely: subnormals, signed zeros and the largest finite values included."""
    limits = torch.iinfo(BIT_VIEW[dtype])
    bits = torch.randint(limits.min, limits.max + 1, shape, generator=generator, dtype=torch.int64)
    values = bits.to(BIT_VIEW[dtype]).view(dtype)
    return torch.where(torch.isfinite(values), values, torch.ones_like(values))


def random_weight(seed: int, group_size: int = 1) -> Tensor:
    pick = random.Random(seed)
    shape = (pick.randint(1, 65), group_size * pick.randint(1, 5 if group_size > 1 else 600))
    dtype = pick.choice(DTYPES)
    generator = torch.Generator().manual_seed(seed)
    if seed % 4 == 0:
        return random_finite_bits(shape, dtype, generator)
    return (torch.randn(shape, generator=generator) * 10.0 ** pick.randint(-4, 2)).to(dtype)


@pytest.mark.parametrize("name", ["w4a16", "w4a8", *EIGHT_BIT])
@pytest.mark.parametrize("seed", range(0, 200, 10))
def test_equals_compressed_tensors_on_random_weights(seed: int, name: str) -> None:
    for of_seed in range(seed, seed + 10):
        group_size = (
            1 if name in EIGHT_BIT else random.Random(of_seed).choice([8, 16, 24, 32, 64, 128, 256])
        )
        assert_equals_compressed_tensors(random_weight(of_seed, group_size), group_size, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["w4a16", *EIGHT_BIT])
def test_equals_compressed_tensors_on_every_quotient_of_a_bf16_row(
    name: str, dtype: torch.dtype
) -> None:
    """One row per absmax mantissa, holding every BF16 value from there down to where all codes are 0, both signs."""
    absmax = torch.arange(0x3F80, 0x4000)
    values = 1024 if name == "w4a16" else 2560
    bits = (absmax[:, None] - torch.arange(values)[None, :]).to(torch.int16)
    weight = bits.view(torch.bfloat16).to(dtype)
    assert_equals_compressed_tensors(weight, values, name)
    assert_equals_compressed_tensors(-weight, values, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "most"), [("w4a16", 7), ("w8a8", 127)])
def test_rounds_ties_to_even_and_clamps_only_above(
    name: str, most: int, dtype: torch.dtype
) -> None:
    ties = (
        torch.arange(-2 * most - 1, 2 * most + 2, dtype=torch.float32) / 2
    )  # each exact in BF16, and the scale is 1
    tensors = quantize(
        torch.cat([ties, torch.zeros(1)]).to(dtype)[None, :], get_scheme(name, 32)
    ).tensors
    codes = unpack_int4(tensors["weight_packed"]) if name == "w4a16" else tensors["weight"]
    assert codes[0, :-1].tolist() == [min(round(tie), most) for tie in ties.tolist()]
    assert codes.min() == -most - 1 and codes.max() == most


def test_e4m3_rounds_ties_to_even_on_its_whole_grid() -> None:
    grid = torch.arange(0x7F, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )  # 0 to 448 in order of the bits
    values = grid.float()
    ties = (values[1:] + values[:-1]) / 2
    weight = torch.cat([values, ties])[None, :]  # absmax 448, so the scale is exactly 1
    even = torch.arange(0x7E, dtype=torch.uint8)
    expected = torch.cat([grid.view(torch.uint8), even + (even & 1)])
    for sign, sign_bit in ((1, 0), (-1, 0x80)):
        codes = quantize(sign * weight, get_scheme("fp8")).tensors["weight"].view(torch.uint8)[0]
        # a zero quotient loses its sign; what rounds to zero keeps it
        assert torch.equal(codes[1:], expected[1:] | sign_bit) and codes[0] == 0


ZERO_SCALE_UP_TO = {
    "w4a16": 3,
    "w8a8": 63,
    "fp8": 224,
}  # half the half range, a tie going to the even zero


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "multiple"),
    [("w4a16", m) for m in (0, 1, 2, 3, 4, 7, 8, 11, 12, 100)]
    + [("w8a8", m) for m in (0, 1, 63, 64, 127, 128, 191, 192, 1000)]
    + [("fp8", m) for m in (0, 1, 224, 225, 448, 671, 672, 1000)],
)
def test_zero_and_subnormal_groups_have_a_finite_scale(
    dtype: torch.dtype, name: str, multiple: int
) -> None:
    """Multiples of the smallest subnormal: a scale that underflows is eps; above, quotients overflow the range."""
    smallest = torch.ones((), dtype=BIT_VIEW[dtype]).view(dtype)
    weight = (smallest.double() * multiple).expand(3, 64).to(dtype).clone()
    weight[1].neg_()
    weight[2, 0] = 1.0
    assert_equals_compressed_tensors(weight, 32, name)
    scale = quantize(weight, get_scheme(name, 32)).tensors["weight_scale"]
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert (scale[0, 0] == torch.finfo(dtype).eps) == (multiple <= ZERO_SCALE_UP_TO[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["w4a16", "w4a8", *EIGHT_BIT])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_name_the_parameter(dtype: torch.dtype, name: str, bad: float) -> None:
    weight = torch.randn(5, 256).to(dtype)
    weight[3, 200] = bad
    with pytest.raises(
        UserError, match=r"1 of the \d+ values of model\.layers\.3\.mlp\.up_proj\.weight are NaN"
    ):
        quantize(weight, get_scheme(name), name="model.layers.3.mlp.up_proj.weight")


def test_shapes_that_do_not_fit_name_the_parameter() -> None:
    with pytest.raises(
        UserError, match=r"o_proj\.weight has shape \[16, 192\].*not a multiple of group_size 128"
    ):
        quantize(torch.randn(16, 192), get_scheme("w4a16"), name="o_proj.weight")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["w4a16", *EIGHT_BIT])
def test_strides_do_not_matter_and_the_weight_is_left_alone(name: str, dtype: torch.dtype) -> None:
    source = torch.randn(256, 96).to(dtype)
    before = source.clone()
    for view in (source.t(), source[:, 32:], source[::2, 64:]):
        assert not view.is_contiguous()
        assert_equals_compressed_tensors(view, 32, name)
    assert torch.equal(source, before)


def test_unpack_inverts_pack() -> None:
    codes = torch.randint(
        -8, 8, (33, 128), generator=torch.Generator().manual_seed(0), dtype=torch.int8
    )
    packed = pack_to_int32(codes, num_bits=4)
    assert torch.equal(unpack_int4(packed), codes)
    assert torch.equal(unpack_int4(packed.t().contiguous().t()), codes)
    codes[:, 0] = -8
    weight = (
        codes.float() * 0.9375
    )  # absmax is 7.5, so the scale is 1 and the codes are the values themselves, rounded
    quantized = quantize(weight, get_scheme("w4a16"))
    assert torch.equal(
        unpack_int4(quantized.tensors["weight_packed"]), weight.round().to(torch.int8)
    )


@pytest.mark.parametrize("name", ["w4a16", "w4a8", *EIGHT_BIT])
def test_wire_names_dtypes_and_shapes(name: str) -> None:
    scheme = get_scheme(name, 32)
    quantized = quantize(torch.randn(17, 256).bfloat16(), scheme)
    formats = {
        leaf: (tensor.dtype, tuple(tensor.shape)) for leaf, tensor in quantized.tensors.items()
    }
    if name in EIGHT_BIT:
        dtype = {"w8a8": torch.int8, "fp8": torch.float8_e4m3fn}[name]
        assert formats == {"weight": (dtype, (17, 256)), "weight_scale": (torch.float32, (17, 1))}
    else:
        assert formats == {
            "weight_packed": (torch.int32, (17, 32)),
            "weight_scale": (torch.bfloat16, (17, 8)),
            "weight_shape": (torch.int64, (2,)),
        }
        assert quantized.tensors["weight_shape"].tolist() == [17, 256]
    assert formats == wire_specs(scheme, 17, 256)
    assert [full for full, _ in quantized.named("layers.0.up_proj")] == [
        f"layers.0.up_proj.{leaf}" for leaf in formats
    ]
    assert all(tensor.is_contiguous() for tensor in quantized.tensors.values())


def test_a_fused_quantizer_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = get_scheme("w8a8")
    device = torch.device("cpu")
    compare = quantize_module.fused_is_exact.__wrapped__
    monkeypatch.setattr(quantize_module, "_run_fused", quantize_module._eager)
    assert compare(torch.bfloat16, device, scheme) and compare(torch.float32, device, scheme)

    def off_by_one_bit(weight: Tensor, scheme: Scheme) -> tuple[Tensor, ...]:
        values, *others = quantize_module._eager(weight, scheme)
        values[-1, -1] ^= 1
        return values, *others

    monkeypatch.setattr(quantize_module, "_run_fused", off_by_one_bit)
    with pytest.warns(
        UserWarning,
        match="the fused quantizer is not used on cpu: w8a8 of torch.bfloat16 differ",
    ):
        assert not compare(torch.bfloat16, device, scheme)
