"""The mismatch of real weights: SmolLM2-135M-Instruct, by scheme, level, length and class of token.

Toys trained by this project have a small mismatch at level `off`. A pretrained model shows what alignment is for. Two
kinds of text are sampled, each in a new process:

    answers   short answers to sums, as in the first step of a run
    500 ...   the model's own text, of exactly that many tokens, on a few subjects

Every level's trainer then computes the log-probs of the same tokens. The file's weights were rounded to 4 bits before
(GGUF's Q4_1), so W4A16 rounds them a second time.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.proofs.harness import LEVELS, QUIET, ROOT, Record, Row, in_process, run_config
from qarl.config.level import Level

MODEL = ROOT / "models" / "smollm2-135m-instruct"
SCHEMES = ("bf16", "w8a8", "fp8", "w4a16-32", "w4a16-64")
"""Schemes, with the size of a group where there are groups."""
TEXTS = ("answers", "500", "2000")
SUBJECTS = (
    "Explain how a steam engine works.",
    "Write a story about a lighthouse keeper.",
    "Describe the history of bread.",
    "Explain why the sky is blue to a child.",
)
QUARTERS = 4
EXAMPLES = 3


def real_mismatch(
    record: Record,
    *,
    schemes: tuple[str, ...] = SCHEMES,
    texts: tuple[str, ...] = TEXTS,
    model: str = str(MODEL),
) -> None:
    """Measure δ of every level. The levels that follow the engine must have δ = 0 in every token."""
    for text in texts:
        for scheme in schemes:
            levels = [level for level in LEVELS if is_distinct(scheme, level)]
            names = {level: f"{scheme} | {text} | {level}" for level in levels}
            if not any(record.wants(name) for name in names.values()):
                continue
            (rows,) = in_process(measure, model, scheme, text, [str(level) for level in levels])
            for level in levels:
                row = rows[str(level)]
                follows = Level(level).follows_engine
                record.add(names[level], row, ok=not (follows and row["max"]))


def is_distinct(scheme: str, level: Level) -> bool:
    """Return whether a level is another one than the level before it: `exact` is `model` on a CPU."""
    if level is max(Level):
        return False
    return not (scheme == "bf16" and level is Level.LINEARS)


def measure(model: str, scheme: str, text: str, levels: list[str]) -> Row:
    """Sample one batch and compare it with the trainer of each level. Return a row for each."""
    from qarl.diagnose.diagnosis import compare, with_keys
    from qarl.trainer.local import LocalTrainer
    from qarl.trainer.policy import Policy
    from qarl.trainer.prepare import prepare_run

    class Trainer(LocalTrainer):
        def generate(self, prompts: Any, sampling: Any, seeds: Any = None) -> Any:
            if text != "answers":
                sampling = dataclasses.replace(sampling, ignore_eos=True)
            return super().generate(prompts, sampling, seeds)

    with tempfile.TemporaryDirectory() as folder:
        config = run_config("quickstart.yaml", keys(model, scheme, text, Path(folder)))
        trainer = Trainer(config, prepare_run(config))
        with trainer.engine:
            trainer.publish()
            batch, metrics = trainer.rollout(top_tokens=True)
        tokenizer = trainer.parts.tokenizer
        sampled = sampled_text(batch, metrics, tokenizer)
        rows = {}
        for level in levels:
            policy = Policy.load(with_keys(config, {"quant.align": Level(level)}))
            comparison = compare(level, policy, batch, config)
            rows[level] = sampled | difference(comparison, batch, tokenizer)
        return rows


def keys(model: str, scheme: str, text: str, folder: Path) -> Row:
    """Return the keys of a run of which one batch is sampled."""
    name, _, group = scheme.partition("-")
    rows = sums() if text == "answers" else [(subject, "none") for subject in SUBJECTS]
    data = folder / "train.jsonl"
    write_rows(data, rows)
    limit = 24 if text == "answers" else int(text)
    settings: Row = QUIET | {
        "output_dir": folder,
        "model.path": model,
        "data.train_files": [str(data)],
        "data.val_files": [],
        "data.train_batch_size": len(rows),
        "data.max_prompt_length": 96,
        "data.max_response_length": limit,
        "reward.function": f"{ROOT / 'benchmarks' / 'proofs' / 'lengths_reward.py'}:reward",
        "reward.check_ground_truths": False,
        "rollout.n": 4 if text == "answers" else 2,
        "rollout.cpu_kvcache_space_gib": 1,
        "quant.scheme": name,
        "quant.align": "model",
        "quant.mismatch_limit": 100.0,
        "actor.ppo_mini_batch_size": len(rows),
        "actor.ppo_micro_batch_size_per_gpu": 8 if text == "answers" else 1,
        "actor.log_prob_micro_batch_size_per_gpu": 8 if text == "answers" else 1,
    }
    if group:
        settings["quant.group_size"] = int(group)
    return settings


def sums(count: int = 32) -> list[tuple[str, str]]:
    """Return questions and answers: sums of two numbers of one or two digits, always the same."""
    draw = random.Random(0)
    pairs = [(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(count)]
    question = "State the final answer to the following arithmetic problem: {} + {} ="
    return [(question.format(a, b), str(a + b)) for a, b in pairs]


def write_rows(path: Path, rows: list[tuple[str, str]]) -> None:
    """Write a data file in verl's schema."""
    import json

    lines = []
    for index, (question, answer) in enumerate(rows):
        row = {
            "data_source": "real_weights",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def sampled_text(batch: Any, metrics: Row, tokenizer: Any) -> Row:
    """Return what the rollout sampled: its length, entropy, error tokens, and the least likely responses."""
    chosen = batch.rollout_log_probs.masked_fill(~batch.response_mask, 0)
    means = chosen.sum(1) / batch.response_mask.sum(1).clamp(min=1)
    examples = []
    for row in means.argsort()[:EXAMPLES].tolist():
        tokens = batch.responses[row][batch.response_mask[row]].tolist()
        examples.append(tokenizer.decode(tokens)[:200])
    return {
        "responses": len(batch),
        "tokens": int(batch.response_mask.sum()),
        "entropy": round(-float(chosen.sum() / batch.response_mask.sum()), 3),
        "error_tokens": error_tokens(batch),
        "least_likely": examples,
    }


def error_tokens(batch: Any) -> Row:
    """Return the shares of repetitive and garbled responses (QaRL, section 3.2 and table 6)."""
    from qarl.metrics.error_tokens import text_metrics, text_statistics

    statistics = text_statistics(
        batch.responses, batch.rollout_log_probs, batch.advantages, batch.response_mask
    )
    metrics = text_metrics([statistics])
    names = ("repetition", "repetitive_frac", "garbled_frac")
    return {name: round(metrics[f"error_tokens/{name}"], 3) for name in names}


def difference(comparison: Any, batch: Any, tokenizer: Any) -> Row:
    """Return δ in numbers: over all tokens, by class of token, and by quarter of the response."""
    mask = batch.response_mask
    delta = (comparison.log_probs - batch.rollout_log_probs).double().abs()
    classes: dict[str, list[float]] = {}
    for row, column in mask.nonzero().tolist():
        token = tokenizer.decode([int(batch.responses[row, column])])
        kind = token_class(token, int(batch.responses[row, column]), tokenizer)
        classes.setdefault(kind, []).append(float(delta[row, column]))
    lengths = mask.sum(1)
    quarters = []
    for quarter in range(QUARTERS):
        values = []
        for row, length in enumerate(lengths.tolist()):
            begin = length * quarter // QUARTERS
            end = length * (quarter + 1) // QUARTERS
            values += delta[row, begin:end].tolist()
        quarters.append(mean(values))
    metrics = comparison.metrics
    return {
        "mean": metrics["mismatch/abs_mean"],
        "p99": metrics["mismatch/abs_p99"],
        "max": metrics["mismatch/abs_max"],
        "k3": metrics["mismatch/k3"],
        "flips": metrics["mismatch/argmax_flip_rate"],
        "ess": metrics["mismatch/ess"],
        "by_class": {kind: [len(values), mean(values)] for kind, values in sorted(classes.items())},
        "by_quarter": quarters,
        "sequence_log_ratio_mean_abs": sequence_ratio(comparison, batch),
    }


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def sequence_ratio(comparison: Any, batch: Any) -> float:
    """Return the mean over responses of |log of the ratio of the whole response|, in nats."""
    delta = (comparison.log_probs - batch.rollout_log_probs).double()
    totals = delta.masked_fill(~batch.response_mask, 0).sum(1)
    return float(totals.abs().mean())


def token_class(text: str, token: int, tokenizer: Any) -> str:
    """Return the class of a token: the end, a number, a word's beginning, a word's continuation, or anything else."""
    if token == tokenizer.eos_token_id:
        return "end"
    if any(letter.isdigit() for letter in text):
        return "number"
    if any(letter.isalpha() for letter in text):
        return "word" if text[:1].isspace() else "part of a word"
    return "other"
