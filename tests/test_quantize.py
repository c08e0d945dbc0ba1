"""The quantizer against compressed-tensors' own functions, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor

from qarl.errors import UserError
from qarl.kernels.int4 import unpack_int4
from qarl.quant.quantize import dequantize, quantize
from qarl.quant.scheme import get_scheme

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BIT_VIEW = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def compressed_tensors_compress(weight: Tensor, group_size: int) -> tuple[dict[str, Tensor], QuantizationScheme]:
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group_size, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scale, zero_point = compute_dynamic_scales_and_zp(weight, args, torch.nn.Module())
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    return PackedQuantizationCompressor.compress(state, scheme), scheme


def assert_same_bytes(mine: Tensor, theirs: Tensor) -> None:
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    if mine.dtype in BIT_VIEW:
        mine, theirs = mine.view(BIT_VIEW[mine.dtype]), theirs.view(BIT_VIEW[theirs.dtype])
    assert torch.equal(mine, theirs), f"{int((mine != theirs).sum())} of {mine.numel()} differ"


def assert_equals_compressed_tensors(weight: Tensor, group_size: int) -> None:
    theirs, scheme = compressed_tensors_compress(weight, group_size)
    mine = quantize(weight, get_scheme("w4a16", group_size))
    assert mine.tensors.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_same_bytes(mine.tensors[name], tensor)
    restored = PackedQuantizationCompressor.decompress(theirs, scheme)["weight"]
    assert_same_bytes(mine.dequantize(weight.dtype), restored)
    assert_same_bytes(dequantize(mine, torch.bfloat16), restored.to(torch.bfloat16))


def random_finite_bits(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every exponent equally likely: subnormals, signed zeros and the largest finite values included."""
    limits = torch.iinfo(BIT_VIEW[dtype])
    bits = torch.randint(limits.min, limits.max + 1, shape, generator=generator, dtype=torch.int64)
    values = bits.to(BIT_VIEW[dtype]).view(dtype)
    return torch.where(torch.isfinite(values), values, torch.ones_like(values))


@pytest.mark.parametrize("seed", range(200))
def test_equals_compressed_tensors_on_random_weights(seed: int) -> None:
    pick = random.Random(seed)
    group_size = pick.choice([8, 16, 24, 32, 64, 128, 256])
    shape = (pick.randint(1, 65), group_size * pick.randint(1, 5))
    dtype = pick.choice(DTYPES)
    generator = torch.Generator().manual_seed(seed)
    if seed % 4 == 0:
        weight = random_finite_bits(shape, dtype, generator)
    else:
        weight = (torch.randn(shape, generator=generator) * 10.0 ** pick.randint(-4, 2)).to(dtype)
    assert_equals_compressed_tensors(weight, group_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_compressed_tensors_on_every_quotient_of_a_bf16_group(dtype: torch.dtype) -> None:
    """One group per absmax mantissa, holding every BF16 value from there down to where all codes are 0, both signs."""
    absmax = torch.arange(0x3F80, 0x4000)
    bits = (absmax[:, None] - torch.arange(1024)[None, :]).to(torch.int16)
    weight = bits.view(torch.bfloat16).to(dtype)
    assert_equals_compressed_tensors(weight, group_size=1024)
    assert_equals_compressed_tensors(-weight, group_size=1024)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_ties_to_even_and_clamps_only_above(dtype: torch.dtype) -> None:
    ties = torch.arange(-15, 16, dtype=torch.float32) / 2  # absmax 7.5, so the scale is exactly 1
    weight = torch.cat([ties, torch.zeros(1)]).to(dtype)[None, :]
    codes = unpack_int4(quantize(weight, get_scheme("w4a16", 32)).tensors["weight_packed"])
    assert codes[0, :31].tolist() == [min(round(tie), 7) for tie in ties.tolist()]
    assert codes.min() == -8 and codes.max() == 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiple", [0, 1, 2, 3, 4, 7, 8, 11, 12, 100])
def test_zero_and_subnormal_groups_have_a_finite_scale(dtype: torch.dtype, multiple: int) -> None:
    """Multiples of the smallest subnormal: the scale underflows to zero up to 3, and the quotient overflows 8 at 11."""
    smallest = torch.ones((), dtype=BIT_VIEW[dtype]).view(dtype).item()
    weight = torch.full((3, 64), smallest * multiple, dtype=dtype)
    weight[1].neg_()
    weight[2, 0] = 1.0
    assert_equals_compressed_tensors(weight, group_size=32)
    scale = quantize(weight, get_scheme("w4a16", 32)).tensors["weight_scale"]
    assert torch.isfinite(scale).all() and (scale > 0).all()


def test_all_zero_group_has_eps_as_scale_and_zero_codes() -> None:
    quantized = quantize(torch.zeros(4, 128, dtype=torch.bfloat16), get_scheme("w4a16"))
    assert quantized.tensors["weight_scale"].unique().tolist() == [torch.finfo(torch.bfloat16).eps]
    assert not quantized.dequantize().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_finite_values_do_not_overflow(dtype: torch.dtype) -> None:
    weight = torch.full((2, 64), torch.finfo(dtype).max, dtype=dtype)
    weight[:, 1::2].neg_()
    assert_equals_compressed_tensors(weight, group_size=64)
    assert torch.isfinite(quantize(weight, get_scheme("w4a16", 64)).tensors["weight_scale"]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_name_the_parameter(dtype: torch.dtype, bad: float) -> None:
    weight = torch.randn(5, 256).to(dtype)
    weight[3, 200] = bad
    with pytest.raises(UserError, match=r"model\.layers\.3\.mlp\.up_proj\.weight holds 1 values that are NaN or Inf"):
        quantize(weight, get_scheme("w4a16"), name="model.layers.3.mlp.up_proj.weight")


def test_shapes_that_do_not_fit_name_the_parameter() -> None:
    with pytest.raises(UserError, match=r"o_proj\.weight has shape \[16, 192\].*not a multiple of group_size 128"):
        quantize(torch.randn(16, 192), get_scheme("w4a16"), name="o_proj.weight")
    with pytest.raises(UserError, match=r"o_proj\.weight has shape \[0, 128\]"):
        quantize(torch.empty(0, 128), get_scheme("w4a16"), name="o_proj.weight")
    with pytest.raises(ValueError, match="experts has 3 dimensions"):
        quantize(torch.randn(2, 8, 128), get_scheme("w4a16"), name="experts")


def test_unsupported_dtype_and_unquantized_scheme_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        quantize(torch.randn(8, 128, dtype=torch.float64), get_scheme("w4a16"))
    with pytest.raises(ValueError, match="bf16"):
        quantize(torch.randn(8, 128), get_scheme("bf16"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter_and_the_weight_is_left_alone(dtype: torch.dtype) -> None:
    source = torch.randn(256, 96).to(dtype)
    before = source.clone()
    for view in (source.t(), source[:, 32:], source[::2, 64:]):
        assert not view.is_contiguous()
        contiguous = view.clone(memory_format=torch.contiguous_format)
        assert quantize(view, get_scheme("w4a16", 32)).equals(quantize(contiguous, get_scheme("w4a16", 32)))
        assert_equals_compressed_tensors(view, group_size=32)
    assert torch.equal(source, before)


def test_parameters_get_no_graph() -> None:
    parameter = torch.nn.Parameter(torch.randn(8, 128, dtype=torch.bfloat16))
    quantized = quantize(parameter, get_scheme("w4a16"))
    assert not any(tensor.requires_grad for tensor in quantized.tensors.values())
    assert not quantized.dequantize().requires_grad


def test_unpack_inverts_pack() -> None:
    codes = torch.randint(-8, 8, (33, 128), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    packed = pack_to_int32(codes, num_bits=4)
    assert torch.equal(unpack_int4(packed), codes)
    assert torch.equal(unpack_int4(packed.t().contiguous().t()), codes)
    codes[:, 0] = -8
    weight = codes.float() * 0.9375  # absmax is 7.5, so the scale is 1 and the codes are the values themselves, rounded
    quantized = quantize(weight, get_scheme("w4a16"))
    assert torch.equal(unpack_int4(quantized.tensors["weight_packed"]), weight.round().to(torch.int8))


@pytest.mark.parametrize("group_size", [32, 128])
def test_dequantize_is_what_the_cpu_kernel_multiplies_by(group_size: int) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantized = quantize(weight, get_scheme("w4a16", group_size))
    codes = unpack_int4(quantized.tensors["weight_packed"])
    scale = quantized.tensors["weight_scale"].repeat_interleave(group_size, dim=1)
    kernel = (codes.float() * scale.float()).to(torch.bfloat16)
    assert_same_bytes(quantized.dequantize(), kernel)


@pytest.mark.parametrize(("group_size", "share"), [(128, 0.2578125), (32, 0.28125)])
def test_size_on_the_wire(group_size: int, share: float) -> None:
    quantized = quantize(torch.randn(256, 512).bfloat16(), get_scheme("w4a16", group_size))
    assert (quantized.nbytes - quantized.tensors["weight_shape"].nbytes) / (2 * 256 * 512) == share


def test_wire_names_dtypes_and_shapes() -> None:
    quantized = quantize(torch.randn(17, 256).bfloat16(), get_scheme("w4a16", 32))
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in quantized.named("layers.0.mlp.up_proj")}
    assert found == {
        "layers.0.mlp.up_proj.weight_packed": (torch.int32, (17, 32)),
        "layers.0.mlp.up_proj.weight_scale": (torch.bfloat16, (17, 8)),
        "layers.0.mlp.up_proj.weight_shape": (torch.int64, (2,)),
    }
    assert quantized.tensors["weight_shape"].tolist() == [17, 256]
    assert all(tensor.is_contiguous() for tensor in quantized.tensors.values())


def test_digest_and_equals_see_every_byte() -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    scheme = get_scheme("w4a16")
    first, second = quantize(weight, scheme), quantize(weight.clone(), scheme)
    assert first.equals(second) and first.digest() == second.digest()
    for name in first.tensors:
        changed = quantize(weight, scheme)
        changed.tensors[name].view(torch.uint8).view(-1)[-1] ^= 1
        assert not first.equals(changed), name
        assert first.digest() != changed.digest(), name
    recast = quantize(weight.float(), scheme)
    assert not first.equals(recast) and first.digest() != recast.digest()
