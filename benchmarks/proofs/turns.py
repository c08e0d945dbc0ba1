"""δ, seconds and prefilled tokens of a step by the number of turns, on a CPU, by how the engine gets the turns.

    requests   each turn is a request, which prefills the whole conversation so far
    cache      the same with a prefix cache, which has whole blocks of what came before
    sessions   keys and values stay in the engine's cache, which prefills only what is new (`qarl.rollout.sessions`)

Models with random weights and heads of 64. All conversations of a row have the same number of tokens and of turns: the
model's turns have 7 tokens of 10, and the environment answers with the others.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.proofs.align import random_twin
from benchmarks.proofs.harness import QUIET, ROOT, Record, Row, in_process, run_config
from benchmarks.proofs.lengths import IGNORED, PHASES, SHAPE
from qarl.kernels.cpu.attention_tiles import longest_exact_prompt

WAYS = ("requests", "cache", "sessions")
PROMPT = 40
FRAME = 3
"""Tokens that the chat template writes around an answer: the end of a turn that was cut, two roles."""
ENVIRONMENT = ROOT / "benchmarks" / "proofs" / "turns_environment.py"


def turn_costs(
    record: Record,
    *,
    kinds: tuple[str, ...] = ("dense",),
    schemes: tuple[str, ...] = ("w4a16",),
    tokens: tuple[int, ...] = (60, 1500),
    turns: tuple[int, ...] = (1, 3, 10),
    ways: tuple[str, ...] = WAYS,
    steps: int = 2,
    rank: int = 0,
) -> None:
    """Take steps with conversations of each number of tokens and turns, and keep the last.

    Eight conversations of four prompts. δ must be 0 with sessions at any length, and up to the border in every way.
    `rank`: of adapters; 0: none."""
    border = longest_exact_prompt(64)
    sizes = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    with tempfile.TemporaryDirectory() as parent:
        sources = {"dense": "tiny-qwen3", "experts": "tiny-qwen3-moe"}
        models = {
            kind: random_twin(Path(parent) / kind, source=sources[kind], **sizes) for kind in kinds
        }
        for kind, scheme, way in ((k, s, w) for k in kinds for s in schemes for w in ways):
            ending = f" | rank {rank}" if rank else ""
            names = {
                (total, count): f"{kind} | {scheme} | {total} | {count} | {way}{ending}"
                for total in tokens
                for count in turns
                if count == 1 or parts(total, count)[1] > FRAME
            }
            shapes = [shape for shape, name in names.items() if record.wants(name)]
            if not shapes:
                continue
            settings = keys(kind, models[kind], scheme, max(total for total, _ in shapes))
            settings |= {"lora.r": rank} if rank else {}
            settings |= {"rollout.enable_prefix_caching": True} if way == "cache" else {}
            (rows,) = in_process(measure, settings, way, shapes, steps)
            for shape, row in zip(shapes, rows, strict=True):
                promised = way == "sessions" or PROMPT + shape[0] <= border
                record.add(
                    names[shape],
                    row | {"border": border},
                    ok=row["turns"] == shape[1] and not (promised and row["max"]),
                )


def keys(kind: str, model: Path, scheme: str, total: int) -> Row:
    return QUIET | {
        "model.path": str(model),
        "data.train_batch_size": 4,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": total,
        "reward.function": "environment",
        "rollout.n": 2,
        "rollout.environment": f"{ENVIRONMENT}:answer",
        "rollout.cpu_kvcache_space_gib": 0.5,
        "multi_turn.max_assistant_turns": 99,
        "multi_turn.max_tool_response_length": 10_000,
        "quant.scheme": scheme,
        "quant.ignore": IGNORED[kind],
        "quant.mismatch_limit": 100.0,  # requests above the border are measured, whatever their δ is
        "actor.old_log_probs": "recompute",
        "actor.ppo_mini_batch_size": 4,
        "actor.ppo_micro_batch_size_per_gpu": 8,
        "actor.log_prob_micro_batch_size_per_gpu": 8,
        "trainer.report": False,
        "trainer.num_threads": 1,
    }


def measure(settings: Row, way: str, shapes: list[tuple[int, int]], steps: int) -> list[Row]:
    """Take `steps` with conversations of each shape, tokens and turns. Return what the last of them shows."""
    import torch

    from qarl.data.prompts import Prompt, PromptDataset
    from qarl.trainer.local import LocalTrainer
    from qarl.trainer.prepare import prepare_run

    class Trainer(LocalTrainer):
        def sample(self, prompts: Any, sampling: Any, seeds: Any = None, **more: Any) -> Any:
            endless = dataclasses.replace(sampling, ignore_eos=True)
            return super().sample(prompts, endless, seeds, **more)

    with tempfile.TemporaryDirectory() as folder:
        config = run_config("quickstart.yaml", settings | {"output_dir": folder})
        trainer = Trainer(config, prepare_run(config))
        conversations = trainer.parts.conversations
        assert conversations is not None
        conversations.sessions = 8 if way == "sessions" else None
        draw = torch.Generator().manual_seed(0)
        rows = []
        with trainer.engine:
            trainer.publish()
            for total, count in shapes:
                turn, answer = parts(total, count)
                extra = {"turns": count, "characters": answer - FRAME}
                conversations.limits = dataclasses.replace(
                    conversations.limits, response=total, turn=turn
                )
                tokens = torch.randint(3, 250, (4, PROMPT), generator=draw).tolist()
                prompts = [Prompt(i, "random", [], row, "", extra) for i, row in enumerate(tokens)]
                trainer.parts.train_prompts = PromptDataset(prompts)
                for _ in range(steps):
                    trainer.timer.pop()
                    metrics = trainer.train_step()
                seconds = trainer.timer.pop()
                rows.append(
                    {
                        "mean": metrics["mismatch/abs_mean"],
                        "max": metrics["mismatch/abs_max"],
                        "turns": round(metrics["turns/mean"]),
                        "sampled": round(metrics["response_length/mean"]),
                        "prefilled": prefilled(total, count, way),
                        "seconds": {name: round(seconds[f"timing_s/{name}"], 2) for name in PHASES},
                    }
                )
        return rows


def parts(total: int, count: int) -> tuple[int, int]:
    """Return the tokens of a turn, and of what is between two, so that `count` turns have at most `total` together."""
    if count == 1:
        return total, 0
    turn = total * 7 // (10 * count)
    return turn, (total - count * turn) // (count - 1)


def prefilled(total: int, count: int, way: str) -> int:
    """Return the tokens of a conversation that the engine prefills. Equal prompts of others are not thought of."""
    turn, answer = parts(total, count)
    starts = [PROMPT + number * (turn + answer) for number in range(count)]
    if way == "requests":
        return sum(starts)
    known = [0] + [start + turn - 1 for start in starts[:-1]]
    block = 32 if way == "cache" else 1
    return sum(start - have // block * block for start, have in zip(starts, known, strict=True))
