"""Operator by operator: the engine's CUDA operators against the contracts of docs/understand/cuda.md.

Each test prints, for every rounding that the operator might have, how many outputs differ and by how much, and asks
that the contract's be the nearest. `pytest -rP` shows what is printed. A contract is confirmed by writing the file of
these results into `CONTRACTS` (qarl/kernels/cuda/layer_ops.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from contract_checks import (
    ATTENTION,
    attention_roundings,
    log_softmax_reference,
    rotary_reference,
    silu_and_mul_reference,
    vllm_logits,
)

from qarl.align.cpu_attention import fp32_attention
from qarl.align.packed_attention import varlen_attention
from qarl.kernels import reference
from qarl.kernels.cuda import layer_ops

pytestmark = pytest.mark.gpu

TOKENS = (1, 7, 255, 256, 2048)
HIDDEN = (1024, 4096)
EPSILON = 1e-6


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def compare(what: str, theirs: torch.Tensor, candidates: Mapping[str, torch.Tensor]) -> str:
    """Prints the difference of every candidate; the name of the nearest, which is within a BF16 step, else fails."""
    shares = {}
    for name, ours in candidates.items():
        difference = (ours.float() - theirs.float()).abs()
        shares[name] = float((difference > 0).float().mean())
        off = f"mean {difference.mean():.2e}  max {difference.max():.2e}"
        print(f"{what:28} {name:34} differ {shares[name]:9.2e}  {off}")
    nearest = min(shares, key=lambda name: shares[name])
    step = 2**-7 * theirs.float().abs() + 1e-3
    beyond = ((candidates[nearest].float() - theirs.float()).abs() > step).float().mean()
    assert float(beyond) <= 1e-5, (
        f"{what}: {float(beyond):.1e} of the outputs are more than a BF16 step off"
    )
    print(
        f"{what:28} holds: {nearest}, {'bit for bit' if shares[nearest] == 0 else 'but for the order of sums'}"
    )
    return nearest


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("vllm")
    if missing := layer_ops.unavailable():
        pytest.skip(missing)


def normalised(total: torch.Tensor) -> torch.Tensor:
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPSILON)


@pytest.mark.parametrize("hidden", (128, *HIDDEN))
@pytest.mark.parametrize("tokens", TOKENS)
def test_rms_norm(tokens: int, hidden: int) -> None:
    """QaRL's kernel, which engine and trainer run; vLLM's operator differs by the order of sums alone."""
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    x, weight = random(tokens, hidden), random(hidden)
    out = layer_ops.rms_norm(x, weight, EPSILON)
    theirs = torch.empty_like(x)
    ops.rms_norm(theirs, x, weight, EPSILON)
    contract = reference.rms_norm(x, weight, EPSILON)
    candidates = {
        "value in FP32": contract,
        "value rounded": normalised(x.float()).bfloat16() * weight,
    }
    assert compare(f"rms_norm {tokens} x {hidden}", out, candidates) == "value in FP32"
    compare(f"rms_norm {tokens} x {hidden}", out, {"vLLM's operator": theirs})


@pytest.mark.parametrize("hidden", (64, 128, 576, 896, *HIDDEN, 5120))
def test_norms_of_few_and_many_rows(hidden: int) -> None:
    """A row's bits depend neither on the number of rows, nor on its place, nor on who has added the residual."""
    from qarl.kernels.triton.norms import add_rms_norm

    torch.manual_seed(0)
    x, residual, weight = random(2112, hidden), random(2112, hidden), random(hidden)
    total = x + residual
    many = layer_ops.rms_norm(total, weight, EPSILON)
    for rows in (1, 7, 255, 256):
        few = [layer_ops.rms_norm(part, weight, EPSILON) for part in total.split(rows)]
        assert torch.equal(torch.cat(few), many)
        pairs = zip(x.clone().split(rows), residual.clone().split(rows), strict=True)
        summed = [add_rms_norm(*pair, weight, EPSILON, in_place=True) for pair in pairs]
        assert torch.equal(torch.cat([y for y, _ in summed]), many)
        assert torch.equal(torch.cat([stored for _, stored in summed]), total)
    fused = random(300, 3 * hidden)
    heads = fused[:, : 2 * hidden].view(300, 2, hidden)
    assert torch.equal(
        layer_ops.rms_norm(heads, weight, EPSILON),
        layer_ops.rms_norm(heads.contiguous(), weight, EPSILON),
    )


@pytest.mark.parametrize("hidden", (128, 896, 4096, 8192))
def test_gradient_of_the_norm(hidden: int) -> None:
    torch.manual_seed(0)
    x, weight, grad = random(2112, hidden), random(hidden), random(2112, hidden)
    exact_x, exact_weight = (tensor.double().requires_grad_() for tensor in (x, weight))
    (normalised(exact_x) * exact_weight).backward(grad.double())
    dx, dw = layer_ops.rms_norm_backward(grad, x, weight, EPSILON, weight_too=True)
    for ours, exact, limit in ((dx, exact_x.grad, 4e-3), (dw, exact_weight.grad, 1e-5)):
        assert ours is not None and exact is not None
        assert float((ours.double() - exact).norm() / exact.norm()) < limit


@pytest.mark.parametrize("tokens", TOKENS)
def test_rotary_embedding(tokens: int) -> None:
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    heads, kv_heads, size = 32, 8, 128
    positions = torch.randint(0, 16384, (tokens,), device="cuda")
    inverse = 1e6 ** -(torch.arange(0, size, 2, device="cuda").float() / size)
    angles = torch.arange(16384, device="cuda").float()[:, None] * inverse
    cache = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    query, key = random(tokens, heads, size), random(tokens, kv_heads, size)
    turns = cache[positions].chunk(2, -1)
    cos, sin = (part.repeat(1, 2)[:, None] for part in turns)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    flat_query, flat_key = query.flatten(1).clone(), key.flatten(1).clone()
    ops.rotary_embedding(positions, flat_query, flat_key, size, cache, True)
    for name, x, rotated in (("query", query, flat_query), ("key", key, flat_key)):
        contract = rotary_reference(x, *turns)
        compare(
            f"rotary {name} {tokens}",
            rotated.view_as(x),
            {"FP32": contract, "products rounded": rounded(x)},
        )
        assert torch.equal(contract, rotated.view_as(x))


@pytest.mark.parametrize("tokens", TOKENS)
def test_silu_and_mul(tokens: int) -> None:
    torch.manual_seed(0)
    gate, up = random(tokens, 12288), random(tokens, 12288)
    candidates = {
        "silu rounded, then the product": silu_and_mul_reference(gate, up),
        "FP32, rounded once": (F.silu(gate.float()) * up.float()).bfloat16(),
        "PyTorch's F.silu, then the product": F.silu(gate) * up,
    }
    nearest = compare(f"silu_and_mul {tokens}", layer_ops.silu_and_mul(gate, up), candidates)
    assert nearest != "FP32, rounded once"


def attention_inputs(total: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return random(total, 32, size), random(total, 8, size), random(total, 8, size)


def skip_unless_flash_3() -> None:
    if missing := layer_ops.attention_unavailable(torch.cuda.get_device_capability()):
        pytest.skip(missing)


@pytest.mark.parametrize("lengths", [(1,), (64,), (333, 17, 900), (4096,), (16384,)], ids=str)
def test_attention_of_prefill(lengths: tuple[int, ...]) -> None:
    """Packed sequences through vLLM's FlashAttention, each beside PyTorch's attentions alone, which must be within what
    BF16 weights of the softmax allow. Of the roundings that it might have, the contract's must be the nearest."""
    skip_unless_flash_3()
    size = 128
    inputs = attention_inputs(sum(lengths), size)
    theirs, _ = layer_ops.flash_attention(*inputs, size**-0.5, lengths)
    module = torch.nn.Module()
    for *row, output in zip(*(tensor.split(lengths) for tensor in (*inputs, theirs)), strict=True):
        length = len(output)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in row)
        sdpa = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)[
            0
        ].transpose(0, 1)
        candidates = {"sdpa in BF16": sdpa}
        if length <= 4096:  # FP32 scores of 16k tokens would take 34 GB
            candidates["sdpa in FP32"] = fp32_attention(module, q, k, v, None, size**-0.5)[0][0]
        if length <= 900:
            roundings = attention_roundings(*row, size**-0.5)
            candidates["the contract"] = roundings[ATTENTION].to("cuda")
            shares = {
                name: float((output.cpu() != ours).float().mean())
                for name, ours in roundings.items()
            }
            for name, differing in shares.items():
                print(f"attention {length:6} {name:30} differ {differing:.2e}")
            assert shares[ATTENTION] == min(shares.values())
        for name, ours in candidates.items():
            difference = (ours.float() - output.float()).abs()
            share = (difference > 0).float().mean()
            print(f"attention {length:6} {name:16} differ {share:.2e}  mean {difference.mean():.2e}  "
                  f"max {difference.max():.2e}")  # fmt: skip
            assert difference.mean() < 1e-3 and difference.max() < 0.05


@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("length", [17, 700, 5000])
def test_attention_of_decoding(length: int, size: int) -> None:
    """Decode steps with one split, in batches of several sizes, against the trainer's call over the whole row."""
    skip_unless_flash_3()
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    query, key, value = attention_inputs(length, size)
    whole, _ = layer_ops.flash_attention(query, key, value, size**-0.5, (length,))
    table, slots = layer_ops.pages(torch.tensor([length], dtype=torch.int32))
    caches = [layer_ops.into_pages(tensor, slots.cuda(), table.numel()) for tensor in (key, value)]
    places = torch.arange(1, length + 1)[torch.linspace(0, length - 1, min(length, 64)).long()]
    outputs = {}
    for batch in (1, len(places)):
        steps = [
            flash_attn_varlen_func(
                q=query[(part - 1).cuda()],
                k=caches[0],
                v=caches[1],
                cu_seqlens_q=torch.arange(len(part) + 1, dtype=torch.int32, device="cuda"),
                max_seqlen_q=layer_ops.least_queries(size),
                seqused_k=part.to(torch.int32).cuda(),
                max_seqlen_k=int(part.max()),
                softmax_scale=size**-0.5,
                causal=True,
                block_table=table.cuda().expand(len(part), -1).contiguous(),
                fa_version=3,
                num_splits=1,
            )
            for part in places.split(batch)
        ]
        outputs[batch] = torch.cat(steps)
        share = float((outputs[batch] != whole[(places - 1).cuda()]).float().mean())
        print(
            f"decode steps of {batch}, {length} keys, heads of {size}: {share:.2e} differ from the whole row"
        )
        assert share == 0
    assert torch.equal(outputs[1], outputs[len(places)])


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(17,), (333, 1, 900)], ids=str)
def test_gradient_of_attention(lengths: tuple[int, ...], size: int) -> None:
    """From the output and the log-sums of FlashAttention 3, against float64."""
    skip_unless_flash_3()
    inputs = attention_inputs(sum(lengths), size)
    output, log_sums = layer_ops.flash_attention(*inputs, size**-0.5, lengths)
    grad = random(*output.shape)
    ours = layer_ops.flash_attention_backward(grad, *inputs, output, log_sums, size**-0.5, lengths)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    rows = zip(*(tensor.split(lengths) for tensor in (*exact, grad)), strict=True)
    for *row, of_output in rows:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in row)
        alone = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        alone[0].transpose(0, 1).backward(of_output.double())
    for tensor, leaf in zip(ours, exact, strict=True):
        assert leaf.grad is not None
        assert float((tensor.double() - leaf.grad).norm() / leaf.grad.norm()) < 1e-2


def test_rows_of_a_pack() -> None:
    """PyTorch's varlen attention, which levels below `model` use."""
    lengths, size = (333, 1, 900), 128
    query, key, value = (
        tensor.transpose(0, 1)[None] for tensor in attention_inputs(sum(lengths), size)
    )
    assert key.shape[1] < query.shape[1], (
        "the operator shares key heads among query heads, in its backward too"
    )
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    packed = varlen_attention(query, key, value, lengths, size**-0.5, None)[0]
    grads = torch.autograd.grad(packed, inputs, torch.ones_like(packed))
    repeated = (
        query,
        *(tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value)),
    )
    same = varlen_attention(*repeated, lengths, size**-0.5, None)[0]
    for output, expected in zip(
        grads, torch.autograd.grad(same, inputs, torch.ones_like(same)), strict=True
    ):
        assert float((output.float() - expected.float()).norm() / expected.float().norm()) < 1e-2
    rows = zip(
        *(tensor.split(lengths, 2) for tensor in (query, key, value)),
        packed.split(lengths),
        strict=True,
    )
    for q, k, v, output in rows:
        alone = F.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
        )
        difference = (output - alone[0].transpose(0, 1)).abs()
        assert float(difference.mean()) < 1e-3 and float(difference.max()) < 0.05


@pytest.mark.parametrize("tokens", TOKENS)
def test_lm_head(tokens: int) -> None:
    """vLLM's head is F.linear on every token that is sampled, bit for bit. The trainer's has other numbers of rows, so
    its logits are compared with vLLM's: within a BF16 step, however many rows there are beside a row."""
    torch.manual_seed(0)
    hidden, weight = random(tokens, 4096), random(151936, 4096) / 64
    theirs = vllm_logits(hidden, weight)
    assert torch.equal(theirs, F.linear(hidden, weight))
    theirs = theirs[:64]
    candidates = {
        "alone": torch.cat([F.linear(row[None], weight) for row in hidden[:64]]),
        "with 2048 others": F.linear(torch.cat([hidden[:64], random(2048, 4096)]), weight)[
            : len(theirs)
        ],
    }
    for name, ours in candidates.items():
        compare(f"lm_head {tokens}", theirs, {name: ours})


def test_log_softmax() -> None:
    """Model Runner V2's log-probs against the trainer's, at temperature 1 and below."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    from qarl.kernels.log_probs import log_probs_of_logits

    torch.manual_seed(0)
    logits, tokens = random(256, 151936) * 4, torch.randint(151936, (256,), device="cuda")
    for temperature in (1.0, 0.7):
        theirs = compute_token_logprobs(logits.float() / temperature, tokens[:, None])[:, 0]
        contract = log_softmax_reference(logits, tokens, temperature)
        ours, _ = log_probs_of_logits(logits, tokens, temperature=temperature)
        for name, log_probs in (("the contract", contract), ("the trainer's", ours)):
            difference = (log_probs - theirs).abs()
            print(f"log-softmax at {temperature}: {name} differs by mean {difference.mean():.1e} "
                  f"max {difference.max():.1e}")  # fmt: skip
            assert float(difference.max()) < 1e-5


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "w4a16"])
def test_linears_of_few_and_many_rows(scheme: str) -> None:
    """vLLM's own kernels: in W8A8 and FP8 a row's bits must not depend on the other rows, nor on the fused q, k and v.
    In FP8 because the kernel pads a product of few rows."""
    from qarl.kernels.registry import choose_linear_kernel
    from qarl.quant import get_scheme, quantize

    torch.manual_seed(0)
    device, n, k = torch.device("cuda", 0), 1024, 4096
    weight = random(3 * n, k) / k**0.5
    settings = get_scheme(scheme, 128)
    kernel = choose_linear_kernel(settings, device, (n, k)).kernel
    if not kernel.name.startswith("vllm"):
        pytest.skip(f"vLLM's kernel does not serve here, but {kernel.name}")
    x = random(512, k)

    def product(rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return kernel.linear(rows, kernel.prepare(quantize(of, settings).tensors), None)

    whole = product(x, weight)[:, :n]
    for name, output in {
        "16 rows at a time": torch.cat([product(part, weight) for part in x.split(16)])[:, :n],
        "q alone": product(x, weight[:n]),
    }.items():
        share = float((output != whole).float().mean())
        print(f"{scheme} {kernel.name}, {name}: {share:.2e} of the outputs differ")
        assert share == 0 or scheme == "w4a16"
