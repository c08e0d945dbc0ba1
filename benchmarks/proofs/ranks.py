"""FSDP2 on 1 to 4 ranks: the low-bit all-gather."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.proofs.harness import Record, Row, on_ranks
from qarl.quant import get_scheme
from qarl.quant.fsdp import quantize_before_sharding, quantize_shards

SCHEMES = ("w4a16", "w8a8", "fp8")
KINDS = ("dense", "experts")
GROUP = 64
VOCABULARY = 256
IGNORE = ("lm_head",)
SIZES: dict[str, dict[str, Any]] = {
    "dense": {"intermediate_size": 384},
    "experts": {"intermediate_size": 384, "moe_intermediate_size": 64, "num_experts": 12, "num_experts_per_tok": 4,
                "norm_topk_prob": True},
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


class Wire:
    """FSDP2's all-gather, which counts the bytes that this rank sends."""

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

        self.inner = DefaultAllGather()
        self.bytes = 0

    def allocate(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.inner.allocate(*args, **options)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.bytes += input_tensor.nbytes
        return self.inner(output_tensor, input_tensor, group, async_op)


def build(kind: str, scheme: str, device: str = "cpu") -> tuple[Any, Wire]:
    """Return the sharded model with quantized layers, from one seed, and its wire."""
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    family: Any = transformers.Qwen3Config if kind == "dense" else transformers.Qwen3MoeConfig
    config = family(
        vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
        head_dim=32, tie_word_embeddings=False, use_cache=False, **SIZES[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(
        device
    )
    quantize_before_sharding(
        model, scheme=get_scheme(scheme, GROUP), ignore=IGNORE, device=torch.device(device)
    )
    wire = Wire()
    for module in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        module.set_custom_all_gather(wire)
    return model, wire


def token_rows(count: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def on_the_wire(model: Any, wire: Wire) -> dict[str, float]:
    """Return the bytes that the quantized weights took in one forward, as a share of BF16's, and the formula's."""
    world = dist.get_world_size()
    rest = 0
    numbers = 0
    expected = 0.0
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        shards = getattr(model.get_submodule(owner), "shards", {})
        if leaf not in shards:
            rest += 2 * -(-parameter.shape[0] // world) * parameter.shape[1:].numel()
            continue
        four = shards[leaf].scheme.format == "pack-quantized"
        numbers += parameter.numel()
        expected += (
            (4 + 16 / GROUP if four else 8 + 32 / parameter.shape[-1]) / 16 * parameter.numel()
        )
    return {"of_bf16": (wire.bytes - rest) * world / (2 * numbers), "formula": expected / numbers}


def gathered(kind: str, scheme: str, device: str) -> Row:
    """One rank's forward and backward of the same rows."""
    where = "cpu" if device == "cpu" else f"cuda:{dist.get_rank()}"
    if device != "cpu":
        torch.cuda.set_device(dist.get_rank())
    (model, wire), ids = build(kind, scheme, where), token_rows(2, 48).to(where)
    quantize_shards(model)
    with torch.no_grad():
        row: Row = {"logits": digest(model(ids).logits)}
    row |= on_the_wire(model, wire) if dist.get_world_size() > 1 else {}
    loss_of(model, ids).backward()
    return row | {
        "gradients": {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}
    }


def low_bit_gather(
    record: Record,
    *,
    kinds: tuple[str, ...] = KINDS,
    schemes: tuple[str, ...] = SCHEMES,
    device: str = "cpu",
    ranks: int = 4,
) -> None:
    """The same rows on 1 to 4 ranks: equal logits and gradients, and the bytes of the formula on the wire."""
    backend = "cpu:gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    for kind, scheme in ((kind, scheme) for kind in kinds for scheme in schemes):
        if record.wants(name := f"{kind} {scheme}"):
            row = Row()
            ok = True
            first: Tensors = {}
            for world in range(1, ranks + 1):
                figures = on_ranks(gathered, world, kind, scheme, device, backend=backend)[0]
                gradients = figures.pop("gradients")
                first = first or gradients
                row[str(world)] = figures | {"gradient_apart": gradients_apart(first, gradients)}
                ok &= figures["logits"] == row["1"]["logits"]
                ok &= row[str(world)]["gradient_apart"] <= (2**-22 if device == "cpu" else 2**-16)
                ok &= world == 1 or math.isclose(
                    figures["of_bf16"], figures["formula"], rel_tol=0.01
                )
            record.add(name, row, ok=ok)


def gradients_apart(expected: Tensors, gradients: Tensors) -> float:
    """Return the largest difference of a gradient, relative to the largest element of its tensor."""
    return max(
        float((gradients[n] - g).abs().max() / g.abs().max())
        for n, g in expected.items()
        if g.abs().max()
    )
