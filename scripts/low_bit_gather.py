"""FSDP2's low-bit all-gather on CPU ranks: equality with one rank, bytes on the wire, memory and time.

    python scripts/low_bit_gather.py --json benchmarks/results/low_bit_gather_cpu.json

For dense layers and for experts, in each scheme, with the FP32 masters sharded over gloo ranks:

    equal   1 to 4 ranks, the same rows on each: digest of the logits, gradients beside those of one rank, and the bytes
            that the quantized weights take on the wire beside BF16's. The wire is FSDP2's all-gather itself
    cost    2 ranks and larger layers: one forward for log-probs and two micro-batches forward and backward, then the
            optimizer. Peak memory is over the rank's memory before the model was built, as the kernel counts it. `cpu`
            and its parts `quantize` and `prepare` (conversions of layout) are seconds of CPU time, so they hold on a
            busy machine, too; `step` and `gather` are seconds of the clock. The median of three steps after the first

`--device cuda` makes the part `equal` on as many GPUs, over NCCL (tests/gpu/test_several_cuda.py).
`--former COMMIT` measures `cost` with a version of the package that gathers BF16; put its folder in PYTHONPATH. The
file keeps what it has of other parts, kinds and schemes, so they can be measured one by one. steps_on_ranks.py trains
on 1, 2 and 4 ranks.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import json
import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from qarl.metrics.tracker import write_versions

SCHEMES = ("w4a16", "w8a8", "fp8")
KINDS = ("dense", "experts")
GROUP = 64
VOCABULARY = 256
IGNORE = ("lm_head",)
COST_ROUNDS = 3
SIZES: dict[tuple[str, bool], dict[str, int]] = {
    ("dense", False): {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2},
    ("dense", True): {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3},
    ("experts", False): {"hidden_size": 192, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 12},
    ("experts", True): {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 3, "num_experts": 12},
}


class Wire:
    """FSDP2's all-gather. Counts the bytes that this rank sends, and the seconds."""

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

        self.inner, self.bytes, self.seconds = DefaultAllGather(), 0, 0.0

    def allocate(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.inner.allocate(*args, **options)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.bytes += input_tensor.nbytes
        start = time.perf_counter()
        work = self.inner(output_tensor, input_tensor, group, async_op)
        self.seconds += time.perf_counter() - start
        return work


def build(kind: str, scheme: str, *, large: bool, device: str = "cpu") -> tuple[Any, Wire]:
    """Return the sharded model with quantized layers, from one seed, and its wire."""
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from qarl.quant import get_scheme
    from qarl.quant.fsdp import quantize_before_sharding

    given: dict[str, Any] = {"vocab_size": VOCABULARY, "num_attention_heads": 6, "num_key_value_heads": 3}
    given |= {"head_dim": 32, "tie_word_embeddings": False, **SIZES[kind, large]}
    if kind == "experts":
        given |= {"num_experts_per_tok": 4, "norm_topk_prob": True, "intermediate_size": 384}
    config = (transformers.Qwen3Config if kind == "dense" else transformers.Qwen3MoeConfig)(**given)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    quantize_before_sharding(model, scheme=get_scheme(scheme, GROUP), ignore=IGNORE, device=torch.device(device))
    wire = Wire()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        fully_shard(module, mp_policy=policy)
        module.set_custom_all_gather(wire)
    model.config.use_cache = False
    return model, wire


def rows(count: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make_ready(model: Any, *, former: bool) -> None:
    if former:
        return
    from qarl.quant.fsdp import quantize_shards

    quantize_shards(model)


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
        bits = 4 + 16 / GROUP if four else 8 + 32 / parameter.shape[-1]
        numbers += parameter.numel()
        expected += bits / 16 * parameter.numel()
    sent = (wire.bytes - rest) * world
    return {"of_bf16": sent / (2 * numbers), "formula": expected / numbers}


def equal(kind: str, scheme: str, folder: Path, device: str) -> dict[str, Any]:
    model, wire = build(kind, scheme, large=False, device=device)
    ids = rows(2, 48).to(device)
    make_ready(model, former=False)
    with torch.no_grad():
        found: dict[str, Any] = {"logits": digest([model(ids).logits])}
    if dist.get_world_size() > 1:
        found |= on_the_wire(model, wire)
    loss_of(model, ids).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    file = folder / f"{kind}_{scheme}.pt"
    if dist.get_world_size() == 1:
        torch.save(gradients, file)
    expected = torch.load(file, map_location=device)
    apart = [float((gradients[n] - g).abs().max() / g.abs().max()) for n, g in expected.items() if g.abs().max()]
    return found | {"gradient_apart": max(apart)}


def memory(field: str) -> int:
    """Return `field` of this process's status file, in bytes."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]  # Linux has it


def count_in_cpu_time() -> None:
    """Make the phases of quantization count CPU time, and count each expert's conversion, made where it is used."""
    from qarl.kernels.experts import cpu as experts
    from qarl.quant import timing as module

    phases: Any = module
    phases.time = SimpleNamespace(perf_counter=time.thread_time)
    if prepare := getattr(experts, "prepare_gathered", None):
        experts.prepare_gathered = phases.phase("prepare")(prepare)


def cost(kind: str, scheme: str, *, former: bool) -> dict[str, Any]:
    import transformers  # noqa: F401  before the memory is read

    from qarl.kernels.cpu.vllm_ops import cpu_ops_missing
    from qarl.quant.convert import invalidate_quantized
    from qarl.quant.timing import measure_phases

    cpu_ops_missing("cpu_gemm_wna16")  # imports vLLM, if it is installed
    count_in_cpu_time()
    gc.collect()
    before = memory("VmRSS")
    model, wire = build(kind, scheme, large=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = rows(4, 192)[dist.get_rank() :: 2]
    found: dict[str, list[float]] = {}
    for number in range(COST_ROUNDS + 1):
        gc.collect()
        if number == 1:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        dist.barrier()
        wire.bytes, wire.seconds = 0, 0.0
        start, cpu = time.perf_counter(), time.process_time()
        with measure_phases() as phases:
            make_ready(model, former=former)
            with torch.no_grad():
                model(ids)
            for row in ids:
                loss_of(model, row[None]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if former:
                invalidate_quantized(model)
        values = {"cpu": time.process_time() - cpu}
        values |= {"step": time.perf_counter() - start, "gather": wire.seconds, "sent_bytes": float(wire.bytes)}
        values |= {"prepare": phases["prepare"], "quantize": phases["quantize"] + phases["pack"]}
        for name, value in values.items() if number else ():
            found.setdefault(name, []).append(value)
    made = {name: statistics.median(values) for name, values in found.items()}
    make_ready(model, former=former)
    with torch.no_grad():
        model(ids)  # so that what a rank keeps from step to step is there
    gc.collect()
    return made | {"rest_bytes": memory("VmRSS") - before, "peak_bytes": memory("VmHWM") - before}


def child(
    rank: int, world: int, port: int, jobs: list[tuple[str, str, str]], folder: str, former: bool, kind: str
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    device = "cpu" if kind == "cpu" else f"{kind}:{rank}"
    if device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    for what, model, scheme in jobs:
        made = cost(model, scheme, former=former) if what == "cost" else equal(model, scheme, Path(folder), device)
        if rank == 0:
            Path(folder, f"{what}_{model}_{scheme}_{world}.json").write_text(json.dumps(made))
        dist.barrier()
    dist.destroy_process_group()


def run(world: int, jobs: list[tuple[str, str, str]], folder: str, former: bool, device: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(child, (world, port, jobs, folder, former, device), nprocs=world)


def measured_with(folder: str, former: str | None) -> dict[str, Any]:
    """Return the date and what `write_versions` knows; `former`: the commit of the package in PYTHONPATH."""
    versions = json.loads(write_versions(folder).read_text())
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, **versions, **({"git_commit": former} if former else {})}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", default=["equal", "cost"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--former", metavar="COMMIT")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.device == "cuda" and args.what != ["equal"]:
        parser.error("--device cuda makes only --what equal")
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back to the system
    most = 4 if args.device == "cpu" else min(4, torch.cuda.device_count())
    worlds = {"equal": tuple(range(1, most + 1)), "cost": (2,)}
    found: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        versions = measured_with(folder, args.former)
        for world in (1, 2, 3, 4):
            jobs = [(w, k, s) for w in args.what if world in worlds[w] for k in args.kinds for s in args.schemes]
            # Memory is measured in processes of its own.
            together = [job for job in jobs if job[0] != "cost"]
            for some in (together, *([job] for job in jobs if job[0] == "cost")):
                if some:
                    run(world, some, folder, args.former is not None, args.device)
            for what, kind, scheme in jobs:
                made = json.loads(Path(folder, f"{what}_{kind}_{scheme}_{world}.json").read_text())
                name = "former" if args.former else what
                found.setdefault("measured", {}).setdefault(name, {})[f"{kind} {scheme}"] = versions
                part = found.setdefault(name, {})
                part.setdefault(f"{kind} {scheme}", {})[str(world)] = made
                print(what, kind, scheme, world, made, flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
