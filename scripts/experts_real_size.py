"""One decoder layer of Qwen3-30B-A3B at its real size, through a training step of the local backend and real vLLM.

    OMP_NUM_THREADS=2 python scripts/experts_real_size.py --linears --output real_size.json
    OMP_NUM_THREADS=1 python scripts/experts_real_size.py --tensor-parallel 2 --on-disk /tmp --output two.json

The layer has 128 experts, 8 per token, with random weights; the vocabulary is shortened (`--vocabulary`), or the
embeddings would be as large as the layer. The run is `configs/qwen3_30b_w4a16.yaml` but for the keys in `overrides`:
one process, AdamW, short responses, and a learning rate at which one step moves every weight visibly.

The script publishes, samples, compares the log-probs of both sides, takes `--steps` training steps with
`LocalTrainer`, and samples from the published result again with the same seeds. Each phase has its seconds and its peak
of resident memory, summed over this process and the engine's workers; Linux resets it at the start of a phase.

With `--tensor-parallel 2`, two worker processes share the engine (`workers_engine.py`), each with half of every expert,
and the trainer is at `linears`, to which `model` falls back. `--on-disk FOLDER` keeps the FP32 masters and AdamW's
moments, 12 bytes per parameter, in files there that are mapped into memory: the step is the same, and Linux may write
these pages out where memory is short.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from workers_engine import WorkersEngine

from qarl.align.router_replay import known_routing
from qarl.bench.sources import find_model
from qarl.checkpoint.json_file import write_json
from qarl.checks.memory import estimate
from qarl.checks.memory_terms import GIB
from qarl.checks.model_size import ModelSize
from qarl.checks.sampling import sampling_config
from qarl.config import Config, load_config
from qarl.diagnose.diagnosis import with_quant
from qarl.metrics.mismatch import mismatch_metrics
from qarl.metrics.tracker import write_versions
from qarl.rollout.engine import RolloutBatch
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.local import LocalTrainer, request_seed
from qarl.trainer.optim import MasterOptimizer
from qarl.trainer.policy import Policy
from qarl.trainer.setup import engine_config, prepare_run

PROMPTS, PROMPT_WORDS, RESPONSE_TOKENS = 8, 12, 32
SEED_STEP = -2
"""Stands for the training step in the seeds of the compared samples."""


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """The share of words with an even number: random weights have rewards that differ, and so a gradient."""
    words = re.findall(r"\d+", solution_str)
    return sum(int(word) % 2 == 0 for word in words) / max(len(words), 1)


def make_model(folder: Path, vocabulary: int) -> Path:
    """The public config with one layer, weights as transformers initialises them, and a word for each token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    given = dict(find_model("Qwen3-30B-A3B").config) | {
        "num_hidden_layers": 1,
        "max_window_layers": 1,
        "vocab_size": vocabulary,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**given)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="t1", pad_token="t2", unk_token="t0"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(file: Path, vocabulary: int) -> Path:
    numbers = torch.randint(3, vocabulary, (PROMPTS, PROMPT_WORDS), generator=torch.Generator().manual_seed(0))
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": " ".join(f"t{n}" for n in row)}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for row in numbers.tolist()
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run_config(folder: Path, args: argparse.Namespace) -> Config:
    overrides = {
        "name": "real_size",
        "backend": "local",
        "output_dir": folder / "runs",
        "model.path": folder / "model",
        "data.train_files": write_prompts(folder / "prompts.jsonl", args.vocabulary),
        "data.val_files": "[]",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 2 * PROMPT_WORDS,
        "data.max_response_length": RESPONSE_TOKENS,
        "reward.function": f"{Path(__file__).resolve()}:reward",
        "rollout.n": 2,
        "rollout.val_temperature": 0,
        "rollout.tensor_model_parallel_size": 1,
        "rollout.cpu_kvcache_space_gib": 0.125,
        "rollout.enforce_eager": "true",
        "quant.align": args.align,
        "actor.ppo_mini_batch_size": PROMPTS,
        "actor.ppo_micro_batch_size_per_gpu": 2 * PROMPTS,
        "actor.log_prob_micro_batch_size_per_gpu": 2 * PROMPTS,
        "optim.name": "adamw",
        "optim.lr": 1e-3,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": args.steps,
        "trainer.test_freq": -1,
        "trainer.val_before_train": "false",
        "trainer.save_freq": -1,
        "trainer.logger": "[console]",
    }
    return load_config(["config=qwen3_30b_w4a16.yaml", *(f"{key}={value}" for key, value in overrides.items())])


class Meter:
    """Seconds and peak resident memory of each phase."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        for folder in processes():
            (folder / "clear_refs").write_text("5")  # resets VmHWM
        start = time.perf_counter()
        yield
        found = {"seconds": time.perf_counter() - start, "peak_gib": peak_gib()}
        self.phases[name] = found
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in found.items()), flush=True)


def peak_gib() -> float:
    """Pages that processes share count for each of them."""
    found = [re.findall(r"VmHWM:\s+(\d+) kB", (folder / "status").read_text()) for folder in processes()]
    return sum(int(kilobytes[0]) for kilobytes in found if kilobytes) * 1024 / GIB


def processes() -> list[Path]:
    """This process and its children: vLLM runs in this process, or in its workers."""
    own = psutil.Process()
    return [Path(f"/proc/{process.pid}") for process in (own, *own.children(recursive=True))]


def sample(trainer: LocalTrainer) -> RolloutBatch:
    """Two responses to each prompt, whose seeds do not depend on the training step."""
    prompts = [prompt.prompt_token_ids for prompt in trainer.parts.train_prompts for _ in range(2)]
    seeds = [request_seed(trainer.config.seed, SEED_STEP, i) for i in range(len(prompts))]
    return trainer.generate(prompts, dataclasses.replace(sampling_config(trainer.config), ignore_eos=True), seeds)


@torch.no_grad()
def mismatch(policy: Policy, rollout: RolloutBatch) -> dict[str, float]:
    """Of a policy and what the engine sampled: mean and largest |δ|, and tokens that its own router sends elsewhere."""
    zeros = torch.zeros(len(rollout.response_token_ids))
    batch: Batch = make_batch(rollout, zeros, zeros, pad_token_id=0)
    log_probs = policy.response_log_probs(batch, slice(None), temperature=1.0)
    metrics = mismatch_metrics(log_probs, batch.rollout_log_probs, batch.response_mask)
    assert batch.routed_experts is not None and batch.other_experts is not None
    known = known_routing(batch.routed_experts).any(-1)
    return {
        "abs_mean": metrics["mismatch/abs_mean"],
        "abs_max": metrics["mismatch/abs_max"],
        "k3": metrics["mismatch/k3"],
        "other_experts_frac": float(batch.other_experts[known].float().mean()),
    }


def keep_on_disk(optimizer: MasterOptimizer, folder: Path) -> None:
    """Move the masters of AdamW to mapped files, and begin its moments there."""
    for number, master in enumerate(optimizer._updated.values()):
        names = ("master", "exp_avg", "exp_avg_sq")
        files = {name: _mapped(folder / f"{number}.{name}", master) for name in names}
        master.data = files.pop("master").copy_(master.data)
        optimizer._inner.state[master] = {"step": torch.tensor(0.0), **files}


def _mapped(file: Path, like: torch.Tensor) -> torch.Tensor:
    return torch.from_file(str(file), shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)


def measure(
    config: Config, also: Sequence[tuple[str, str]], meter: Meter, workers: int, disk: Path | None
) -> dict[str, Any]:
    """The whole run: what was published, δ by level before training, each step's metrics, and δ after them. `also`:
    more levels to compare, with or without replay; their policies take memory beside the run's."""
    with meter.phase("load the policy and quantize"):
        parts = prepare_run(config)
        parts.policy.requantize()
    with meter.phase("start vLLM, make FP32 masters"):
        settings = engine_config(config, level=parts.policy.align, routing=True)
        engine = WorkersEngine(settings, workers) if workers > 1 else None
        trainer = LocalTrainer(config, parts, engine)
        if disk is not None:
            keep_on_disk(trainer.optimizer, disk)
    with trainer.engine:
        with meter.phase("publish"):
            report = trainer.publish()
        with meter.phase("sample"):
            first = sample(trainer)
        level = trainer.policy.align
        levels = {}
        with meter.phase(f"log-probs at {level}"):
            levels[level] = mismatch(trainer.policy, first)
        for other, replay in also:
            with meter.phase(f"load, and log-probs at {other}, replay {replay}"):
                rollout = config.rollout.model_copy(update={"router_replay": replay})
                changed = with_quant(config, align=other).model_copy(update={"rollout": rollout})
                levels[f"{other}, replay {replay}"] = mismatch(Policy.load(changed), first)
        trainer.timer.pop()
        steps = []
        for number in range(1, config.trainer.total_training_steps + 1):
            with meter.phase(f"training step {number}, with rollout and publish"):
                steps.append(trainer.train_step() | trainer.timer.pop())
        with meter.phase("sample after training"):
            last = sample(trainer)
        with meter.phase(f"log-probs at {level} after training"):
            after = mismatch(trainer.policy, last)
    tokens = [torch.tensor(batch.response_token_ids) for batch in (first, last)]
    assert first.routed_experts is not None
    return {
        "published": dataclasses.asdict(report) | {"quantized_ratio": report.quantized_ratio},
        "sampled_tokens": tokens[0].numel(),
        "experts_used": len(torch.cat(first.routed_experts).unique()),
        "mismatch": levels,
        "steps": steps,
        "after_training": {"weight_version": last.weight_version, "mismatch": after}
        | {"other_tokens_frac": float((tokens[0] != tokens[1]).float().mean())},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--align", choices=("linears", "model", "exact"), default="model")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--linears", action="store_true", help="compare the first samples at linears, too")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--on-disk", type=Path, help="folder for masters and moments")
    args = parser.parse_args(argv)
    if args.tensor_parallel > 1:
        args.align = "linears"
    meter = Meter()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        with meter.phase("make the model"):
            make_model(folder / "model", args.vocabulary)
        size = ModelSize.from_config(json.loads((folder / "model" / "config.json").read_text()))
        config = run_config(folder, args)
        also = [("linears", "on"), ("linears", "off")] if args.linears else []
        with tempfile.TemporaryDirectory(dir=args.on_disk) as disk:
            found = measure(config, also, meter, args.tensor_parallel, Path(disk) if args.on_disk else None)
        versions = json.loads(write_versions(folder).read_text())
    estimated = {phase: estimate(size, config, device="cpu").total(phase) / GIB for phase in ("update", "step")}
    setting = {
        "model": f"Qwen3-30B-A3B, 1 of 48 layers, vocabulary {args.vocabulary}, {size.parameters} parameters",
        "scheme": config.quant.scheme,
        "align": args.align,
        "tensor_parallel": args.tensor_parallel,
        "optimizer_on_disk": args.on_disk is not None,
        "responses": 2 * PROMPTS,
        "response_tokens": RESPONSE_TOKENS,
    }
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions,
        "setting": setting,
        **found,
        "phases": meter.phases,
        "estimated_gib": estimated,
    }
    write_json(args.output, result)
    print(json.dumps({key: found[key] for key in ("mismatch", "after_training")}, indent=2))


if __name__ == "__main__":
    main()
