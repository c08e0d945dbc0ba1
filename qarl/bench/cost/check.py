"""`python -m qarl.bench plan check=STEPS.json ceilings=FILE`: what the cost model predicts beside what
`qarl.bench steps` measured, for every scheme, level and phase.

The ceilings come from single operations of other sizes, and nothing of the measured steps goes into the prediction.
Exit code 1 where a step is off by more than `tolerance`, a phase of some weight was predicted to take nothing, or none
could be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qarl.bench import report
from qarl.bench.cost.arguments import PlanArguments
from qarl.bench.cost.ceilings import Ceilings, read_json
from qarl.bench.cost.doubts import warn
from qarl.bench.cost.step import Step, predict
from qarl.bench.cost.workload import Workload
from qarl.bench.steps.results import check_release
from qarl.checks.memory import ModelSize
from qarl.errors import UserError

COMPARED = (
    "prefill", "decode", "old_log_prob", "forward", "backward", "optimizer", "quantize", "publish", "step",
)  # fmt: skip
NEGLIGIBLE = 0.01
"""Share of a step below which a phase that is predicted to take nothing is let pass: quantize in BF16 takes
microseconds to find out that there is nothing to do."""
FACTS = ("commit", "date", "seconds", "rounds")
"""Of the ceilings, in the file that is written."""


def workload_of(document: Mapping[str, Any]) -> Workload:
    """What the steps in a file of `qarl.bench steps` had to do."""
    given = document["workload"]
    return Workload(
        prompts=given["prompts"],
        n=given["n"],
        prompt_length=given["prompt_length"],
        response_length=given["response_length"],
        response_max=given["response_length"],
        mini_batches=given["mini_batches"],
        micro_batch_size=given["micro_batch_size"],
        log_prob_micro_batch_size=given["micro_batch_size"],
        master_dtype=given.get("master_dtype", "fp32"),
        group_size=given.get("group_size", 128),
        max_num_batched_tokens=max(4096, given["prompt_length"] + given["response_length"]),
        max_num_seqs=max(256, given["prompts"] * given["n"]),
    )


def compare(document: Mapping[str, Any], ceilings: Ceilings) -> list[dict[str, Any]]:
    """For each result: scheme, level, layers, and by phase `predicted` and `measured` seconds and the relative `error`;
    `not_predicted` names the phases that took more than `NEGLIGIBLE` of the step and were predicted to take nothing.

    Raises:
        UserError: the file is none of `qarl.bench steps`, or of another number of threads.
    """
    if document.get("kind") != "steps":
        raise UserError("this is no file of qarl.bench steps", where="check", why=f"kind is {document.get('kind')!r}")
    check_release(document, "check")
    work, threads = workload_of(document), document["workload"].get("threads")
    if threads != ceilings.facts.get("threads"):
        raise UserError(
            f"the steps ran on {threads} threads, the ceilings on {ceilings.facts.get('threads')}",
            where="check",
            fix="measure both with the same threads=",
        )
    kept = {
        built["keeps_freed_memory"] for built in document.get("built", {}).values() if "keeps_freed_memory" in built
    }
    if kept and kept != {ceilings.facts.get("keeps_freed_memory", False)}:
        raise UserError(
            "one of steps and ceilings was measured with freed memory kept, the other was not",
            where="check",
            why="where each step gets its memory anew, an update takes a third longer",
            fix="measure both in the same environment (LD_PRELOAD, MALLOC_*, GLIBC_TUNABLES)",
        )
    size = ModelSize.from_config({**document["model"], "num_hidden_layers": 1})
    found = []
    for result in document["results"]:
        level = result["level"] or "off"
        if level not in ceilings.blocks and level != "linears":
            print(f"not predicted: level {level} has no ceilings", file=sys.stderr)
            continue
        step = predict(replace(size, layers=result["layers"]), ceilings, work, result["scheme"], level)
        phases = {
            phase: _pair(_predicted(step, phase), result["phases"][phase]["mean"])
            for phase in COMPARED
            if phase in result["phases"]
        }
        whole = phases["step"]["measured"] or 0.0
        found.append(
            {
                "scheme": result["scheme"],
                "level": level,
                "layers": result["layers"],
                "extrapolated": bool(result.get("extrapolated")),
                "phases": phases,
                "not_predicted": [
                    phase
                    for phase, pair in phases.items()
                    if not pair["predicted"] and (pair["measured"] or 0.0) > NEGLIGIBLE * whole
                ],
            }
        )
    return found


def _predicted(step: Step, phase: str) -> float:
    return step.step if phase == "step" else step.seconds(phase)


def _pair(predicted: float, measured: float) -> dict[str, float | None]:
    """`error` is -1 where nothing was predicted and something measured, None where nothing was measured to relate it
    to."""
    error = predicted / measured - 1 if measured > 0 else 0.0 if not predicted else None
    return {"predicted": predicted, "measured": measured, "error": error}


def failures(compared: list[dict[str, Any]], tolerance: float) -> list[dict[str, Any]]:
    """Those whose step is off by more than `tolerance`, or has no measured time, or a phase that is not predicted."""
    return [entry for entry in compared if entry["not_predicted"] or not abs(_error(entry)) <= tolerance]


def _error(entry: dict[str, Any]) -> float:
    error = entry["phases"]["step"]["error"]
    return float("inf") if error is None else float(error)


def table(compared: list[dict[str, Any]]) -> str:
    """Markdown: predicted (measured) seconds, and the relative error of the step."""
    lines = [f"| scheme | level | layers | {' | '.join(COMPARED)} | error |", "|---" * (len(COMPARED) + 4) + "|"]
    for entry in compared:
        cells = []
        for phase in COMPARED:
            pair = entry["phases"].get(phase)
            cells.append("" if pair is None else f"{pair['predicted']:.3g} ({pair['measured']:.3g})")
        error = f"{_error(entry):+.0%}"
        lines.append(f"| {entry['scheme']} | {entry['level']} | {entry['layers']} | {' | '.join(cells)} | {error} |")
    return "\n".join(lines)


def run_check(arguments: PlanArguments) -> int:
    """Print the table, write the JSON; the exit code."""
    assert arguments.check and arguments.ceilings
    ceilings, document = Ceilings.load(arguments.ceilings), read_json(arguments.check)
    compared = compare(document, ceilings)
    print(f"{document['model']['name']} on {document['device']}: seconds predicted (measured), error of the step\n")
    print(table(compared))
    warn(ceilings, workload_of(document))
    for entry in compared:
        for phase in entry["not_predicted"]:
            seconds = entry["phases"][phase]["measured"]
            print(f"not predicted: {phase} of {entry['scheme']} {entry['level']}, {seconds:.3g} s (error -100%)")
    failed = failures(compared, arguments.tolerance)
    worst = max((abs(_error(entry)) for entry in compared), default=0.0)
    within = sum(abs(_error(entry)) <= arguments.tolerance for entry in compared)
    print(f"\n{within} of {len(compared)} steps within {arguments.tolerance:.0%}, worst {worst:.0%}")
    if arguments.json:
        content = {
            "kind": "plan_check",
            "device": document["device"],
            "model": document["model"],
            "workload": document["workload"],
            "commit": report.commit(),
            "steps": {key: document.get(key) for key in ("commit", "date", "versions")},
            "ceilings": {"device": ceilings.device, **{k: ceilings.facts.get(k) for k in FACTS}},
            "tolerance": arguments.tolerance,
            "results": compared,
        }
        report.write_json(arguments.json, content)
    return 1 if failed or not compared else 0
