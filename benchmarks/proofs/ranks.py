"""FSDP2 on 1 to 4 ranks: the low-bit all-gather, and what training steps publish on any number of ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.proofs.harness import Record, Row, on_ranks
from qarl.quant import get_scheme
from qarl.quant.fsdp import quantize_before_sharding, quantize_shards, sharded_wire_tensors

SCHEMES, KINDS = ("w4a16", "w8a8", "fp8"), ("dense", "experts")
GROUP, VOCABULARY, IGNORE = 64, 256, ("lm_head",)
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

        self.inner, self.bytes = DefaultAllGather(), 0

    def allocate(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.inner.allocate(*args, **options)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
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
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    quantize_before_sharding(model, scheme=get_scheme(scheme, GROUP), ignore=IGNORE, device=torch.device(device))
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


def digest(tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def on_the_wire(model: Any, wire: Wire) -> dict[str, float]:
    """Return the bytes that the quantized weights took in one forward, as a share of BF16's, and the formula's."""
    world, rest, numbers, expected = dist.get_world_size(), 0, 0, 0.0
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        shards = getattr(model.get_submodule(owner), "shards", {})
        if leaf not in shards:
            rest += 2 * -(-parameter.shape[0] // world) * parameter.shape[1:].numel()
            continue
        four = shards[leaf].scheme.format == "pack-quantized"
        numbers += parameter.numel()
        expected += (4 + 16 / GROUP if four else 8 + 32 / parameter.shape[-1]) / 16 * parameter.numel()
    return {"of_bf16": (wire.bytes - rest) * world / (2 * numbers), "formula": expected / numbers}


def gathered(kind: str, scheme: str, device: str) -> Row:
    """One rank's forward and backward of the same rows."""
    where = "cpu" if device == "cpu" else f"cuda:{dist.get_rank()}"
    if device != "cpu":
        torch.cuda.set_device(dist.get_rank())
    (model, wire), ids = build(kind, scheme, where), token_rows(2, 48).to(where)
    quantize_shards(model)
    with torch.no_grad():
        found: Row = {"logits": digest([model(ids).logits])}
    found |= on_the_wire(model, wire) if dist.get_world_size() > 1 else {}
    loss_of(model, ids).backward()
    return found | {"gradients": {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}}


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
            every = {}
            for world in range(1, ranks + 1):
                every[str(world)] = on_ranks(gathered, world, kind, scheme, device, backend=backend)[0]
            first = every["1"]["gradients"]
            row = {
                world: {key: value for key, value in found.items() if key != "gradients"}
                | {"gradient_apart": gradients_apart(first, found["gradients"])}
                for world, found in every.items()
            }
            equal = len({found["logits"] for found in row.values()}) == 1
            bytes_ok = all(
                math.isclose(found["of_bf16"], found["formula"], rel_tol=0.01)
                for found in row.values()
                if "formula" in found
            )
            close = all(found["gradient_apart"] <= (2**-22 if device == "cpu" else 2**-16) for found in row.values())
            record.add(name, row, ok=equal and bytes_ok and close)


def gradients_apart(expected: Tensors, found: Tensors) -> float:
    """Return the largest difference of a gradient, relative to the largest element of its tensor."""
    return max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items() if g.abs().max())


STEPS, LENGTH, LR = 30, 24, 1e-4
ORDERS = {"shared": [0, 1, 2, 3], "reordered": [3, 1, 0, 2], "unclipped": [0, 1, 2, 3], "pair": [0, 1]}
CLIPPED = ("shared", "reordered")
WORLDS = {1: tuple(ORDERS), 2: ("shared", "unclipped", "pair"), 4: ("shared", "unclipped")}


def steps_on_ranks(record: Record, *, kinds: tuple[str, ...] = KINDS, schemes: tuple[str, ...] = ("w4a16",)) -> None:
    """Train on fixed rows, which 1, 2 and 4 ranks share, and compare what each step publishes with one rank.

    shared      four rows, gradients clipped to norm 1
    unclipped   without clipping. The norm is the only sum over all elements of a gradient, and each number of ranks
                adds them in another order, so clipping scales every gradient by another rounding of one number
    reordered   the rows of `shared` in another order, on one rank: a gradient's sum over rows in another order
    pair        two rows without clipping: a sum of two terms has only one order

    Shares of codes and scales that differ are of the last step; `moved` is the share that the training changed.
    """
    for kind, scheme in ((kind, scheme) for kind in kinds for scheme in schemes):
        if not record.wants(name := f"{kind} {scheme}"):
            continue
        found = {world: on_ranks(train_all, world, kind, scheme, runs)[0] for world, runs in WORLDS.items()}
        row: Row = {
            run: {
                str(world): compare(found[1]["shared" if run == "reordered" else run], found[world][run])
                for world in found
                if run in found[world]
            }
            for run in ORDERS
        }
        same = all(f["first_differing_step"] is None for run in ("pair", "unclipped") for f in row[run].values())
        small = all(f["at_the_end"]["codes"] < 0.05 * f["moved"] for f in row["shared"].values())
        record.add(name, row, ok=same and small)


def train_all(kind: str, scheme: str, runs: Sequence[str]) -> dict[str, Row]:
    return {run: train(kind, scheme, run) for run in runs}


def train(kind: str, scheme: str, run: str) -> Row:
    model, _ = build(kind, scheme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    mine = token_rows(4, LENGTH)[ORDERS[run]][dist.get_rank() :: dist.get_world_size()]
    found: Row = {"digests": [], "losses": []}
    for step in range(STEPS):
        quantize_shards(model)
        if step == 0:
            found["start"] = published(model, scheme)
        total = torch.zeros(())
        for row in mine:
            loss = loss_of(model, row[None]) / len(mine)
            loss.backward()
            total += loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        found["losses"].append(float(total))
        if step == 0:
            found["gradients"] = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        if run in CLIPPED:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found["end"] = published(model, scheme)
        found["digests"].append(digest(list(found["end"].values())))
    return found


@torch.no_grad()
def published(model: Any, scheme: str) -> Tensors:
    """Return the tensors of a publish that are quantized: codes and scales by name."""

    def gather(entry: Any) -> torch.Tensor:
        whole: torch.Tensor = entry.full_tensor()
        return whole.bfloat16()

    found = sharded_wire_tensors(model, gather, scheme=get_scheme(scheme, GROUP), ignore=IGNORE)
    return {name: tensor.clone() for name, tensor in found if not name.endswith("weight_shape")}


def compare(one: Row, found: Row) -> Row:
    """Return how `found` differs from the run on one rank."""
    pairs = enumerate(zip(one["digests"], found["digests"], strict=True), 1)
    return {
        "first_differing_step": next((step for step, (a, b) in pairs if a != b), None),
        "gradient_apart": gradients_apart(one["gradients"], found["gradients"]),
        "at_the_end": apart(one["end"], found["end"]),
        "moved": apart(found["start"], found["end"])["codes"],
        "losses": [found["losses"][0], found["losses"][-1]],
        "digests": {str(step): found["digests"][step - 1] for step in (1, STEPS)},
    }


def apart(first: Tensors, second: Tensors) -> dict[str, float]:
    """Return the shares of codes and scales that differ, and the largest difference of a code, in steps of the grid."""
    codes = scales = other_codes = other_scales = largest = 0
    for name, tensor in first.items():
        mine, others = codes_of(name, tensor), codes_of(name, second[name])
        if mine is not None and others is not None:
            difference = (mine - others).abs()
            codes, other_codes = codes + len(mine), other_codes + int((difference > 0).sum())
            largest = max(largest, int(difference.max()))
        elif name.endswith("_scale"):
            scales, other_scales = scales + tensor.numel(), other_scales + int((tensor != second[name]).sum())
    return {"codes": other_codes / codes, "scales": other_scales / scales, "largest": largest}


def codes_of(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the codes of `tensor` as integers in the order of their values, or None if it has no codes."""
    raw = tensor.contiguous().view(torch.uint8).flatten()
    if name.endswith("weight_packed"):
        return torch.cat((raw & 0xF, raw >> 4)).int()
    if tensor.dtype == torch.int8:
        return tensor.flatten().int()
    if tensor.dtype == torch.float8_e4m3fn:
        size = (raw & 0x7F).int()
        return torch.where(raw >= 0x80, -size, size)
    return None
