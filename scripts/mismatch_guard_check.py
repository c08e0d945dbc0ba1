"""The mismatch guard on healthy runs and on known mistakes: it must never fire on the first and always on the second.

    python scripts/mismatch_guard_check.py --json benchmarks/results/mismatch_guard_cpu.json

Healthy: the quickstart's first step for every scheme and level, start-up probe included, and `--tokens` tokens a
response at level `model`, past the end-of-text, for every scheme. Mistakes: configurations that only one side honours,
with whatever refuses them today switched off in this process, at `model` in BF16 and W4A16. Exit code 1 if the guard
is wrong.

The file is written after each case. --keep leaves its rows of other cases as they are, so that a slow scheme can be
measured by itself: FP8 takes minutes a case on a CPU without FP8 instructions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from qarl.checkpoint.json_file import write_json
from qarl.config import load_config
from qarl.config.quant import ROLLOUT_SCHEMES as SCHEMES
from qarl.kernels.logprob import Truncation
from qarl.metrics.guard import MismatchError, check_mismatch, resolve_limit
from qarl.metrics.mismatch import mismatch_metrics
from qarl.process import configure_vllm_process
from qarl.quant import get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.publish.writers import WritePlan
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.probe import probe
from qarl.trainer.setup import prepare_run

LEVELS = ("off", "linears", "model", "exact")
CASES = ("quickstart", "long", "mistakes")
IGNORE = ("lm_head",)
TINY = Path("models/tiny-qwen3")


@dataclass
class Row:
    """One case: what was measured, against which limit, and whether the guard fired."""

    case: str
    scheme: str
    asked: str
    level: str
    tokens: int
    response_length: float
    abs_mean: float
    abs_max: float
    limit: float
    fired: bool
    should_fire: bool


def measured(
    case: str, scheme: str, asked: str, policy: Policy, batch: Batch, log_probs: torch.Tensor, temperature: float = 1.0
) -> Row:
    """Ask the guard as a run does before its first update."""
    metrics = mismatch_metrics(log_probs, batch.rollout_log_probs, batch.response_mask)
    lengths = batch.response_mask.sum(1).float()
    length = float(lengths.mean())
    mean = metrics["mismatch/abs_mean"]
    how: dict[str, Any] = {"level": policy.align, "response_length": length, "temperature": temperature}
    try:
        check_mismatch(mean, limit=None, before_first_update=True, **how)
        fired = False
    except MismatchError:
        fired = True
    limit = resolve_limit(None, **how)
    tokens, largest = int(lengths.sum()), metrics["mismatch/abs_max"]
    return Row(case, scheme, asked, policy.align, tokens, length, mean, largest, limit, fired, should_fire=False)


def quickstart_step(scheme: str, level: str) -> Row:
    """Probe and first step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["config=quickstart.yaml", f"output_dir={folder}", f"quant.scheme={scheme}", f"quant.align={level}"]
        config = load_config([*arguments, "trainer.val_before_train=false", "trainer.test_freq=-1"])
        trainer = LocalTrainer(config, prepare_run(config))
        with trainer.engine:
            trainer.publish()
            probe(trainer)
            batch, _ = trainer.rollout()
            return measured("quickstart", scheme, level, trainer.policy, batch, trainer.old_log_probs(batch))


def load(folder: Path, scheme: str, level: str) -> Policy:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    return Policy(model, get_scheme(scheme, group_size=32), IGNORE if scheme != "bf16" else (), align=level)


@torch.no_grad()
def direct(
    case: str,
    folder: Path,
    scheme: str,
    *,
    tokens: int,
    responses: int = 16,
    engine: SamplingConfig | None = None,
    trainer: SamplingConfig | None = None,
) -> Row:
    """Engine and trainer without a run around them; `engine` and `trainer` are how each side samples."""
    engine = replace(engine or SamplingConfig(tokens), max_tokens=tokens, ignore_eos=True)
    trainer = trainer or engine
    prompts = [[3 + (i * 7 + t) % 50 for t in range(8 + i % 5)] for i in range(responses)]
    policy = load(folder, scheme, "model")
    config = EngineConfig(
        str(folder), policy.scheme, policy.ignore, max_model_len=max(map(len, prompts)) + tokens, kv_cache_gib=0.25
    )
    with RolloutEngine(config) as rollout_engine:
        rollout_engine.publish(policy.quantize(), version=1)
        rollout = rollout_engine.generate(prompts, engine, seeds=list(range(responses)))
    batch = make_batch(rollout, torch.zeros(responses), torch.zeros(responses), pad_token_id=0)
    how: dict[str, Any] = {
        "temperature": trainer.temperature,
        "truncation": Truncation(trainer.top_p, trainer.top_k),
    }
    parts = [policy.response_log_probs(batch, rows, **how) for rows in batch.micro_batches(4)]
    return measured(case, scheme, "model", policy, batch, torch.cat(parts), trainer.temperature)


def extended(model: Path, folder: Path, positions: int) -> Path:
    shutil.copytree(model, folder)
    edit_config(folder, max_position_embeddings=positions)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def random_llama(folder: Path, initializer_range: float = 0.2) -> Path:
    """Two layers; the default weights are large enough that distributions are not flat."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def rope_parameters(folder: Path) -> dict[str, Any]:
    given = json.loads((folder / "config.json").read_text()).get("rope_parameters") or {}
    return {"rope_type": "default", "rope_theta": 10000.0} | given


@contextlib.contextmanager
def repairs_off() -> Iterator[None]:
    """Nothing refuses a config key, a vLLM that changes a value, or a publish that does not write everything, and the
    trainer has its own rotary embedding."""
    configure_vllm_process()
    from vllm import SamplingParams

    def unchecked(sampling: SamplingConfig, seed: int | None = None) -> Any:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=seed,
            logprobs=0,
            detokenize=False,
            ignore_eos=sampling.ignore_eos,
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("qarl.rollout.engine.sampling_params", unchecked))
        stack.enter_context(mock.patch("qarl.align.model.check_config_keys", lambda config: None))
        stack.enter_context(mock.patch("qarl.align.model.align_rotary", lambda model: None))
        stack.enter_context(mock.patch("qarl.align.model.model_unavailable", lambda *args, **kwargs: None))
        stack.enter_context(mock.patch.object(WritePlan, "_check_all_written", lambda self, expected: None))
        yield


def mistakes(parent: Path, scheme: str) -> Iterator[Callable[[], Row]]:
    """The five configurations that were silently wrong."""
    llama = random_llama(parent / f"llama-{scheme}")

    def with_key(name: str, **changes: Any) -> Row:
        folder = parent / f"{name}-{scheme}"
        shutil.copytree(llama, folder)
        edit_config(folder, **changes)
        return direct(name, folder, scheme, tokens=60)

    partial = rope_parameters(llama) | {"partial_rotary_factor": 0.5}
    yield lambda: with_key("partial_rotary_factor", rope_parameters=partial)
    yield lambda: with_key("logit_scale", logit_scale=0.25)
    yield lambda: with_key("bias", bias=True)
    cold, nucleus = SamplingConfig(60, temperature=0.005), SamplingConfig(60, top_p=0.5)
    model = extended(TINY, parent / f"tiny-{scheme}", 512)
    # Logits this close still compete at such temperatures; a trained model is greedy at both, with a mean |δ| of 1e-5.
    flat = random_llama(parent / f"flat-{scheme}", initializer_range=0.02)
    yield lambda: direct("temperature 0.005", flat, scheme, tokens=60, engine=cold)
    yield lambda: direct("top_p 0.5", model, scheme, tokens=60, engine=nucleus, trainer=SamplingConfig(60))


def cases(
    parent: Path, kinds: Sequence[str], schemes: Sequence[str], levels: Sequence[str], tokens: int
) -> Iterator[Row]:
    for scheme in schemes if "quickstart" in kinds else ():
        for level in levels:
            yield quickstart_step(scheme, level)
    for scheme in schemes if "long" in kinds else ():
        model = extended(TINY, parent / f"long-{scheme}", tokens + 64)
        few = 2 if scheme == "fp8" else 8  # vLLM's FP8 kernel for CPUs takes half a second a token
        yield direct(f"{tokens} tokens", model, scheme, tokens=tokens, responses=few)
    for scheme in ("bf16", "w4a16") if "mistakes" in kinds else ():
        with repairs_off():
            for case in mistakes(parent, scheme):
                yield replace(case(), should_fire=True)


def merged(rows: Sequence[dict[str, Any]], row: Row) -> list[dict[str, Any]]:
    """`rows` with `row` in the place of the one of the same case, or at the end."""
    new = asdict(row)
    same = [i for i, old in enumerate(rows) if all(old[key] == new[key] for key in ("case", "scheme", "asked"))]
    return [new if i in same else old for i, old in enumerate(rows)] + ([] if same else [new])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), help="of the healthy runs")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS), help="of the quickstart's runs")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="keep the other cases of the file")
    parser.add_argument("--vector-kernels", action="store_true", help="tell vLLM that this CPU has no AMX tiles")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    amx = torch.cpu._is_amx_tile_supported() and not args.vector_kernels
    wrong = 0
    if args.json and not args.keep:
        args.json.unlink(missing_ok=True)
    print("| case | scheme | asked | level | tokens | mean |δ| | max | limit | guard |")
    print("|---" * 9 + "|")
    with contextlib.ExitStack() as stack:
        if args.vector_kernels:
            stack.enter_context(mock.patch("torch.cpu._is_amx_tile_supported", lambda: False))
        parent = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for row in cases(parent, args.cases, args.schemes, args.levels, args.tokens):
            wrong += row.fired != row.should_fire
            verdict = ("fires" if row.fired else "silent") + ("" if row.fired == row.should_fire else " (WRONG)")
            print(
                f"| {row.case} | {row.scheme} | `{row.asked}` | `{row.level}` | {row.tokens} | {row.abs_mean:.1e} | "
                f"{row.abs_max:.1e} | {row.limit:.1e} | {verdict} |",
                flush=True,
            )
            if args.json:
                old = json.loads(args.json.read_text())["rows"] if args.json.is_file() else []
                write_json(args.json, {"amx_tiles": amx, "rows": merged(old, row)})
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
