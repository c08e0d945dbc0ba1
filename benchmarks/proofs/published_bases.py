"""Checkpoints that compressed-tensors' own API has quantized, as people publish them, as the base of adapters.

`make` writes one from the tiny model: QaRL's quantizer and exporter have no part in it. `published_bases` trains one
step with adapters on each, and compares: the codes in the engine with those in the file, δ of the step, and greedy
log-probs of the run's engine with those of a vLLM that has loaded the published folder itself, and the adapter.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.proofs.harness import ROOT, TINY, Record, Row, in_process

GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
TOKENS = 40
"""Tokens of a response that is compared."""
ANY_TEXT = f"{ROOT / 'benchmarks' / 'proofs' / 'lengths_reward.py'}:reward"
"""A reward that differs from answer to answer of a model whose head, tied after its training, knows no sums."""
LEFT_OUT = ["lm_head", "re:.*layers[.]0[.].*", "re:.*down_proj"]


class Case(NamedTuple):
    """A published layout. `groups`: the config groups, as targets, weights and activations. `keys`: what the run's
    config must say. `refused`: words of the error, if it is refused. `shards`: the most bytes of a file."""

    groups: list[tuple[list[str], dict[str, Any], dict[str, Any] | None]]
    keys: Row
    refused: str | None = None
    ignore: list[str] = ["lm_head"]  # noqa: RUF012  a tuple has no mutable state of its own
    dtype: str = "bfloat16"
    tied: bool = False
    shards: int = 10**9
    then: Callable[[Path], None] | None = None


def int4(size: int, **more: Any) -> list[Any]:
    return [(["Linear"], GROUP | {"group_size": size} | more, None)]


def w4a16(size: int) -> Row:
    return {"quant.scheme": "w4a16", "quant.group_size": size}


def eight(kind: str) -> list[Any]:
    return [(["Linear"], CHANNEL | {"type": kind}, TOKEN | {"type": kind})]


def fuse(folder: Path) -> None:
    """Store q, k and v, and gate and up, as one linear each, as families do whose files have fused names."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in sorted(tensors):
        owner, _, leaf = name.rpartition(".")
        parent, _, last = owner.rpartition(".")
        for fused, parts in FUSED.items():
            if last != parts[0]:
                continue
            pieces = [tensors.pop(f"{parent}.{part}.{leaf}") for part in parts]
            whole = torch.cat(pieces)
            if leaf == "weight_shape":
                whole = torch.tensor([sum(int(p[0]) for p in pieces), int(pieces[0][1])])
            tensors[f"{parent}.{fused}.{leaf}"] = whole
    save_file(tensors, file, metadata={"format": "pt"})


def as_awq(folder: Path) -> None:
    """Store the int4 codes in AutoAWQ's layout: [K, N/8] words in another order, scales [K/g, N] in FP16."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for name in [n for n in tensors if n.endswith(".weight_packed")]:
        owner = name.removesuffix(".weight_packed")
        shape = tensors.pop(f"{owner}.weight_shape").tolist()
        codes = unpack_from_int32(tensors.pop(name), 4, torch.Size(shape)).int().t() + 8
        eights = codes.reshape(shape[1], -1, 8)[..., order]
        words = sum(eights[..., i] << (4 * i) for i in range(8))
        tensors[f"{owner}.qweight"] = words.int().contiguous()
        scales = tensors.pop(f"{owner}.weight_scale").t().contiguous()
        tensors[f"{owner}.scales"] = scales.half()
    save_file(tensors, file, metadata={"format": "pt"})
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    _set_quantization(folder, awq | {"zero_point": False})


def converted_from_awq(folder: Path) -> None:
    """The same, and back by compressed-tensors' own converter."""
    from compressed_tensors.entrypoints.convert import AutoAWQConverter, convert_checkpoint

    as_awq(folder)
    of_awq = folder.with_name(f"{folder.name}-awq")
    folder.rename(of_awq)
    convert_checkpoint(str(of_awq), str(folder), AutoAWQConverter.from_pretrained(str(of_awq)))


def as_gptq(folder: Path) -> None:
    _set_quantization(folder, {"quant_method": "gptq", "bits": 4, "group_size": 32})


def _set_quantization(folder: Path, quantization: Row) -> None:
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization})
    )


W8A8, FP8 = ({"quant.scheme": name} for name in ("w8a8", "fp8"))
PARTS = ["re:.*self_attn.*proj$", "re:.*mlp.*proj$"]
CASES: dict[str, Case] = {
    "W4A16, groups of 32": Case(int4(32), w4a16(32)),
    "W4A16, groups of 128": Case(int4(128), w4a16(128)),
    "W4A16, a layer and all down_proj ignored": Case(
        int4(32), w4a16(32) | {"quant.ignore": LEFT_OUT}, ignore=LEFT_OUT
    ),
    "W4A16, fused names": Case(int4(32), w4a16(32), then=fuse),
    "W4A16, actorder=weight": Case(int4(32, actorder="weight"), w4a16(32)),
    "W4A16, tied embeddings": Case(int4(32), w4a16(32) | {"reward.function": ANY_TEXT}, tied=True),
    "W4A16, sharded files": Case(int4(32), w4a16(32), shards=200_000),
    "W4A16, two groups of targets": Case(
        [([target], GROUP | {"group_size": 32}, None) for target in PARTS], w4a16(32)
    ),
    "W4A16, from AWQ by its converter": Case(int4(32), w4a16(32), then=converted_from_awq),
    "W8A8, int8 channels": Case(eight("int"), W8A8),
    "W8A8, sharded files": Case(eight("int"), W8A8, shards=200_000),
    "FP8, channels": Case(eight("float"), FP8),
    "FP8, fused names": Case(eight("float"), FP8, then=fuse),
    "FP8, tensors": Case([(["Linear"], TENSOR, TOKEN | {"type": "float"})], FP8, "strategy=tensor"),
    "FP8, static activations": Case(
        [(["Linear"], CHANNEL | {"type": "float"}, TENSOR)], FP8, "static input_activations"
    ),
    "W4A16, actorder=group": Case(int4(32, actorder="group"), w4a16(32), "actorder=group"),
    "W4A16, zero points": Case(int4(32, symmetric=False), w4a16(32), "symmetric=false"),
    "AWQ": Case(int4(32), w4a16(32), "quant_method=awq", then=as_awq),
    "GPTQ": Case(int4(32), w4a16(32), "quant_method=gptq", then=as_gptq),
}


def make(case: Case, folder: Path, model: Path = TINY) -> Path:
    """Quantize `model` with compressed-tensors, and save it in `folder` as `case` says."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def args(fields: dict[str, Any] | None) -> Any:
        return QuantizationArgs(**fields) if fields is not None else None

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, case.dtype))
    if case.tied:
        loaded.config.tie_word_embeddings = True
        loaded.lm_head.weight = loaded.model.embed_tokens.weight
    groups = {
        f"group_{number}": QuantizationScheme(
            targets=targets, weights=args(weights), input_activations=args(activations)
        )
        for number, (targets, weights, activations) in enumerate(case.groups)
    }
    config = QuantizationConfig(config_groups=groups, ignore=list(case.ignore))
    apply_quantization_config(loaded, config)
    for module in loaded.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _observe(module)
    compressor = ModelCompressor.from_pretrained_model(loaded)
    compressor.compress_model(loaded)
    loaded.save_pretrained(folder, max_shard_size=case.shards)
    compressor.update_config(str(folder))
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    if case.then is not None:
        case.then(folder)
    return folder


def _observe(module: Any) -> None:
    """Set the scales of a linear from the smallest and largest weights, as compressed-tensors' observers do."""
    import torch
    from compressed_tensors.quantization.utils import calculate_qparams

    args = module.quantization_scheme.weights
    weight = module.weight.detach()
    if args.strategy == "tensor":
        least, most = weight.amin().reshape(1), weight.amax().reshape(1)
    elif args.strategy == "channel":
        least, most = weight.amin(-1, True), weight.amax(-1, True)
    else:
        columns = weight.shape[1]
        order = torch.arange(columns)
        if getattr(module, "weight_g_idx", None) is not None:
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(0))
            index = torch.empty(columns, dtype=torch.int32)
            index[order] = torch.arange(columns, dtype=torch.int32) // args.group_size
            module.weight_g_idx.data = index
        grouped = weight[:, order].unflatten(-1, (-1, args.group_size))
        least, most = grouped.amin(-1), grouped.amax(-1)
    scale, zero_point = calculate_qparams(least, most, args)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if getattr(module, "weight_zero_point", None) is not None:
        module.weight_zero_point.data = zero_point.to(module.weight_zero_point.dtype)
    if getattr(module, "input_scale", None) is not None:
        module.input_scale.data.fill_(0.01)


AT_ONCE = 4
"""Checkpoints between two writes of the result. Importing vLLM takes longer than a step of the tiny model."""


def published_bases(record: Record, *, model: str = str(TINY), align: str = "model") -> None:
    """Train one step with adapters on each checkpoint: δ must be 0, codes those of the file, and the run's engine must
    agree bit for bit with a vLLM that has loaded the published folder. Others must be refused by name."""
    names = [name for name in CASES if record.wants(name)]
    for name in [name for name in names if CASES[name].refused is not None]:
        with tempfile.TemporaryDirectory() as folder:
            row = refused(CASES[name], make(CASES[name], Path(folder) / "published", Path(model)))
            record.add(name, row, ok=bool(row.pop("shown")))
    for part in batched([name for name in names if CASES[name].refused is None], AT_ONCE):
        with tempfile.TemporaryDirectory() as folder:
            runs: dict[str, Row] = {}
            for name in part:
                base = make(CASES[name], Path(folder) / name.replace(" ", "_"), Path(model))
                runs[name] = trained(base, CASES[name].keys, align)
            jobs = [[run["base"], run["prompts"], run["adapter"]] for run in runs.values()]
            (fresh,) = in_process(fresh_answers, jobs, VLLM_ENABLE_V1_MULTIPROCESSING="0")
            for (name, run), answers in zip(runs.items(), fresh, strict=True):
                row = compared(run, answers)
                record.add(name, row, ok=bool(row.pop("shown")))


def batched(names: Sequence[str], count: int) -> Iterator[Sequence[str]]:
    """Yield `names` in parts of at most `count`."""
    for start in range(0, len(names), count):
        yield names[start : start + count]


def settings(base: Path, keys: Row, folder: Path, align: str = "model") -> Iterator[str]:
    """Yield the arguments of a run with adapters on the checkpoint `base`."""
    from benchmarks.proofs.harness import arguments

    chosen: Row = {
        "model.path": str(base),
        "output_dir": str(folder),
        "quant.align": align,
        "lora.r": 8,
        "optim.lr": 3e-3,
        "rollout.n": 4,
        "rollout.cpu_kvcache_space_gib": 0.25,
        "actor.ppo_micro_batch_size_per_gpu": 8,
        "actor.log_prob_micro_batch_size_per_gpu": 16,
        "trainer.total_training_steps": 1,
        "trainer.val_max_prompts": 8,
    }
    yield "config=quickstart_lora.yaml"
    yield from arguments(chosen | keys)


def refused(case: Case, base: Path) -> Row:
    """Return the error of a run on `base`, before an engine starts."""
    from qarl.checks.registry import make_checks
    from qarl.config import load_config
    from qarl.errors import UserError

    assert case.refused is not None
    try:
        make_checks(load_config([*settings(base, case.keys, base.parent / "runs")]))
    except UserError as error:
        named = case.refused in str(error) and bool(error.fix)
        return {"refused": error.what, "fix": error.fix, "shown": named}
    return {"refused": None, "shown": False}


def trained(base: Path, keys: Row, align: str) -> Row:
    """Train a step with adapters on `base`, in this process. Return what the run's engine answers before and after."""
    from safetensors.torch import load_file

    from qarl.checkpoint.model_files import weight_files
    from qarl.config import load_config
    from qarl.lora.adapter import write_adapter
    from qarl.trainer.local import LocalTrainer
    from qarl.trainer.prepare import prepare_run

    config = load_config([*settings(base, keys, base.parent / "runs", align)])
    trainer = LocalTrainer(config, prepare_run(config))
    adapters = trainer.policy.adapters
    assert adapters is not None
    prompts = [prompt.prompt_token_ids for prompt in trainer.parts.train_prompts[:8]]
    with trainer.engine:
        trainer.publish()
        answers = [_greedy(trainer.engine, prompts)]
        metrics = trainer.train_step()
        answers.append(_greedy(trainer.engine, prompts))
        published = {name: t.clone() for name, t in trainer.policy.published_tensors()}
        adapter = base.with_name(f"{base.name}-adapter")
        adapter.mkdir()
        write_adapter(adapter, adapters.adapter())
    in_vllm = trainer.policy.scheme.cpu_adapter_limit is None
    return {
        "base": str(base),
        "prompts": prompts,
        "adapter": str(adapter) if in_vllm else None,
        "answers": answers,
        "metrics": metrics,
        "published": published,
        "stored": {n: t for file in weight_files(base) for n, t in load_file(file).items()},
    }


def _greedy(engine: Any, prompts: list[list[int]]) -> list[Any]:
    from qarl.rollout.engine import SamplingConfig

    batch = engine.generate(prompts, SamplingConfig(TOKENS, temperature=0.0))
    return [batch.response_token_ids, batch.rollout_log_probs]


def fresh_answers(jobs: list[list[Any]]) -> list[Any]:
    """Return greedy tokens and log-probs of vLLMs that know nothing of QaRL, for each of `jobs`: the folder of a
    base, prompts, and the folder of an adapter or None. Each answers without an adapter, and then with it."""
    import os

    os.environ["VLLM_CPU_INT4_W4A8"] = "0"  # before vLLM is imported
    import torch
    import vllm.v1.worker.cpu_worker  # noqa: F401  once, for all engines

    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(jobs):
            file = Path(folder) / str(number)
            if not (child := os.fork()):
                if torch.cpu._is_amx_tile_supported():
                    torch.cpu._init_amx()  # without it vLLM's kernels end with an illegal instruction
                file.write_text(json.dumps(_answers(*job)))
                os._exit(0)
            os.waitpid(child, 0)
            answers.append(json.loads(file.read_text()))
    return answers


def _answers(base: str, prompts: list[list[int]], adapter: str | None) -> list[Any]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    more: Row = {"enable_lora": True} if adapter else {}
    length = max(map(len, prompts)) + TOKENS
    llm: Any = LLM(
        model=base, dtype="bfloat16", max_model_len=length, enforce_eager=True, kv_cache_memory_bytes=2**28,
        enable_prefix_caching=False, enable_chunked_prefill=False, max_num_batched_tokens=1024, **more,
    )  # fmt: skip
    asked = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=0, detokenize=False)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = []
    for request in [None, *([LoRARequest("adapter", 1, adapter)] if adapter else [])]:
        done = llm.generate(inputs, asked, use_tqdm=False, lora_request=request)
        completions = [output.outputs[0] for output in done]
        values = [
            [p[t].logprob for t, p in zip(c.token_ids, c.logprobs, strict=True)]
            for c in completions
        ]
        answers.append([[list(c.token_ids) for c in completions], values])
    return answers


def compared(run: Row, fresh: list[Any]) -> Row:
    """Return what a run's engine, its published tensors and its step have in common with the file and a fresh vLLM."""
    import torch

    from qarl.quant.published import SCALE

    published, metrics, answers = run["published"], run["metrics"], run["answers"]
    same = {
        name: torch.equal(published[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in run["stored"].items()
        if name in published and name.rpartition(".")[2] in ("weight_packed", "weight")
    }
    equal = [answer == reference for answer, reference in zip(answers, fresh, strict=False)]
    row: Row = {
        "quantized": sum(name.endswith(SCALE) for name in published),
        "tensors_compared_with_the_file": len(same),
        "tensors_equal": sum(same.values()),
        "abs_max": metrics["mismatch/abs_max"],
        "grad_norm": metrics["actor/grad_norm"],
        "fresh_vllm_equal": equal,
        "adapter_changes_answers": answers[0] != answers[1],
        "answers_compared": sum(len(tokens) for tokens, _ in fresh),
    }
    shown = row["abs_max"] == 0 and all(equal) and all(same.values()) and row["grad_norm"] > 0
    return row | {"shown": shown}
