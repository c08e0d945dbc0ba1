"""Every kernel of linears and quantizers, and the blocked log-probs, on a device, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qarl.bench.kernel_arguments import Arguments
from qarl.bench.linear_cases import BUILDERS, Layer
from qarl.kernels.log_probs import chosen_log_probs, log_probs_of_logits

pytestmark = pytest.mark.gpu


SHAPES = [
    (2048, 1536, 128),
    (4096, 4096, 64),
    (384, 1024, 128),
    (200, 416, 32),
    (8960, 1536, 128),
    (64, 64, 32),
]
"""[N, K] and group size: some that tiles divide, and some that they do not."""


@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
@pytest.mark.parametrize("operation", BUILDERS)
def test_every_kernel_against_float64(operation: str, n: int, k: int, group_size: int) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()
    layer = Layer(weight, Arguments(device="cuda", group_size=group_size))
    for rows in (0,) if operation == "quantize" else (1, 3, 16, 33, 64, 200, 1000, 2500):
        for competitor in BUILDERS[operation](layer, rows):
            assert competitor.wrong() is None, f"{competitor.name}, {rows} rows"


def test_vllms_kernels_serve_here() -> None:
    """`qarl/kernels/cuda/vllm_linears.py` on this vLLM: Machete or Marlin, and CUTLASS for 8 bits."""
    pytest.importorskip("vllm")
    layer = Layer(torch.randn(2048, 1536, device="cuda").bfloat16(), Arguments(device="cuda"))
    names = {
        scheme: [k.name for k in layer.kernels(scheme) if k.name.startswith("vllm")]
        for scheme in layer.quantized
    }
    print(names)
    assert all(names.values())


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_machete_and_marlin_agree_to_a_rounding(bias: bool) -> None:
    pytest.importorskip("vllm")
    from qarl.kernels.cuda.vllm_linears import VllmMacheteLinear, VllmMarlinLinear
    from qarl.quant import get_scheme, quantize

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Machete needs capability 9.0")
    torch.manual_seed(0)
    tensors = quantize(
        torch.randn(2048, 1024, device="cuda").bfloat16(), get_scheme("w4a16", 128)
    ).tensors
    x = torch.randn(65, 1024, device="cuda").bfloat16()
    added = torch.randn(2048, device="cuda").bfloat16() if bias else None
    machete, marlin = (
        kernel.linear(x, kernel.prepare(tensors), added)
        for kernel in (VllmMacheteLinear, VllmMarlinLinear)
    )
    torch.testing.assert_close(machete, marlin, rtol=2**-6, atol=0.1)


@pytest.mark.parametrize("rows", [64, 832])
def test_log_probs_in_blocks(rows: int) -> None:
    """On a GPU the product of a block may round otherwise: log-probs to a BF16 step of the logits, weight gradients to
    float64 as near as without blocks."""
    torch.manual_seed(0)
    hidden = torch.randn(2000, 1024, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(32768, 1024, device="cuda") / 32).bfloat16().requires_grad_()
    tokens = torch.randint(32768, (2000,), device="cuda")
    grad = torch.randn(2000, device="cuda")
    log_probs_of_logits(F.linear(hidden, weight), tokens, temperature=0.7)[0].backward(grad)
    mine = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
    log_probs, _ = chosen_log_probs(*mine, tokens, temperature=0.7, rows=rows)
    log_probs.backward(grad)
    logits = F.linear(hidden, weight).detach().requires_grad_()
    expected, _ = log_probs_of_logits(logits, tokens, temperature=0.7)
    expected.backward(grad)
    assert (log_probs - expected).abs().max() < 0.05 and (log_probs - expected).abs().mean() < 1e-4
    exact = logits.grad.double().t() @ hidden.detach().double()
    error, theirs = (
        (g.double() - exact).norm() / exact.norm() for g in (mine[1].grad, weight.grad)
    )
    assert error <= 1.01 * theirs + 1e-4


@pytest.mark.parametrize(
    ("sizes", "group_size"), [((5, 128, 256), 128), ((3, 64, 128), 128)], ids=str
)
def test_marlins_layout_of_experts_is_that_of_vllms_operators(
    sizes: tuple[int, int, int], group_size: int
) -> None:
    pytest.importorskip("vllm")
    from marlin_reference import random_stack
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_moe_permute_scales

    from qarl.kernels.int4 import CODES, SCALES, from_marlin, to_marlin

    tensors = {name: tensor.cuda() for name, tensor in random_stack(*sizes, group_size).items()}
    layout, columns = to_marlin(tensors), tensors["weight_packed"].mT.contiguous()
    perm = torch.empty(sizes[0], 0, dtype=torch.int32, device="cuda")
    assert torch.equal(
        layout[CODES], ops.gptq_marlin_moe_repack(columns, perm, sizes[2], sizes[1], 4)
    )
    scales = tensors["weight_scale"].mT.contiguous()
    assert torch.equal(
        layout[SCALES], marlin_moe_permute_scales(scales, sizes[2], sizes[1], group_size)
    )
    assert all(torch.equal(tensors[name], tensor) for name, tensor in from_marlin(layout).items())


@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (12288, 4096), (4096, 12288), (1536, 8960), (192, 1024)]
)
def test_machete_without_splits_gives_a_row_the_same_bits_with_any_number_of_rows(
    n: int, k: int
) -> None:
    """Through a CUDA graph too, which replays the call of its own number of rows."""
    from qarl.kernels.cuda.machete import MacheteWholeLinear
    from qarl.quant import get_scheme, quantize

    device = torch.device("cuda", 0)
    if reason := MacheteWholeLinear.unavailable(device, (n, k)):
        pytest.skip(reason)
    torch.manual_seed(0)
    weight = (torch.randn(n, k, device=device) / k**0.5).bfloat16()
    tensors = quantize(weight, get_scheme("w4a16", 128)).tensors
    prepared = MacheteWholeLinear.prepare(tensors)
    x = torch.randn(4096, k, device=device).bfloat16()
    whole = MacheteWholeLinear.linear(x, prepared, None)
    for rows in (1, 16, 17, 64, 65, 128, 512, 1000):
        some = x[:rows].clone()
        assert torch.equal(MacheteWholeLinear.linear(some, prepared, None), whole[:rows]), rows
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = MacheteWholeLinear.linear(some, prepared, None)
    some.copy_(x[-1000:])
    graph.replay()
    assert torch.equal(captured, whole[-1000:])
