"""`python -m qarl.bench plan`: predicted seconds of a training step on N GPUs, for every scheme, and what binds.

Each low-bit scheme has two rows: `off`, quantized rollouts under a BF16 trainer, and the level asked for, whose forward
multiplies by the same low-bit tensors. Speed-ups are over BF16 at `off`. Below, for the same step, FSDP2's all-gather
and the publish with low-bit tensors in place of BF16. docs/cost_model.md has all assumptions.
"""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

from qarl.bench import report
from qarl.bench.cost.arguments import PlanArguments
from qarl.bench.cost.ceilings import Ceilings
from qarl.bench.cost.doubts import warn
from qarl.bench.cost.gpus import assumed_ceilings
from qarl.bench.cost.step import PHASES, Layout, Step, predict
from qarl.bench.cost.workload import Workload
from qarl.bench.steps.models import find_model
from qarl.checks.memory import ModelSize

LINKS = ((False, False), (True, False), (False, True), (True, True))
"""(low-bit gather, low-bit publish)."""


def workload_of(arguments: PlanArguments) -> Workload:
    """On GPUs rows are packed, prompts are prefilled once for all their responses, and blocks computed twice."""
    on_gpu = arguments.gpu != "cpu"
    mean, longest = arguments.response_length
    return Workload(
        prompts=arguments.prompts,
        n=arguments.n,
        prompt_length=arguments.prompt_length,
        response_length=mean,
        response_max=longest,
        mini_batches=arguments.mini_batches,
        micro_batch_size=arguments.micro_batch,
        log_prob_micro_batch_size=arguments.log_prob_micro_batch,
        master_dtype=arguments.master_dtype,
        group_size=arguments.group_size,
        padded=not on_gpu,
        prefix_caching=on_gpu,
        checkpointing=on_gpu,
        max_num_batched_tokens=max(8192 if on_gpu else 4096, arguments.prompt_length),
        seed=arguments.seed,
    )


def plan(arguments: PlanArguments, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each scheme and level, BF16 at `off` first."""
    size = ModelSize.from_config(find_model(arguments.model).config)
    work = workload_of(arguments)
    layout = Layout(arguments.gpus, arguments.tensor_parallel, arguments.gpu_memory_utilization)
    base = predict(size, ceilings, work, "bf16", "off", layout)
    rows = [_row("bf16", "off", base, base)] if "bf16" in arguments.scheme else []
    for scheme in arguments.scheme:
        like: Step | None = None  # the level does not change the rollout, nor do tensors on the trainer's links
        for level in ("off", arguments.level) if scheme != "bf16" else ():
            step = like = predict(size, ceilings, work, scheme, level, layout, like=like)
            row = _row(scheme, level, step, base)
            if arguments.gpus > 1 and level != "off":
                layouts = [replace(layout, low_bit_gather=gather, low_bit_publish=publish) for gather, publish in LINKS]
                row["links"] = [
                    _links(predict(size, ceilings, work, scheme, level, one, like=step), one) for one in layouts
                ]
            rows.append(row)
    return rows


def _row(scheme: str, level: str, step: Step, base: Step) -> dict[str, Any]:
    return {
        "scheme": scheme,
        "level": level,
        "phases": {phase: {"seconds": step.seconds(phase), "bound": step.bound(phase)} for phase in PHASES},
        "parts": {phase: [dataclasses.asdict(part) for part in parts] for phase, parts in step.phases.items()},
        "rollout": step.rollout,
        "step": step.step,
        "decode_batch": step.mean_batch,
        "decode_steps": step.decode_steps,
        "speedup": {"rollout": base.rollout / step.rollout, "step": base.step / step.step},
    }


def _links(step: Step, layout: Layout) -> dict[str, Any]:
    return {
        "low_bit_gather": layout.low_bit_gather,
        "low_bit_publish": layout.low_bit_publish,
        "communication": step.seconds("communication"),
        "publish": step.seconds("publish"),
        "step": step.step,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: seconds, each with the first letter of what binds it."""
    heads = ["scheme", "level", *PHASES, "step", "rollout x", "step x"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [f"{row['phases'][p]['seconds']:.3g} {row['phases'][p]['bound'][0]}" for p in PHASES]
        cells += [f"{row['step']:.4g}", *(f"{row['speedup'][name]:.2f}" for name in ("rollout", "step"))]
        lines.append(f"| {row['scheme']} | {row['level']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def links_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: seconds of communication, of the publish and of the step, with and without low-bit tensors on the
    links; empty for one GPU."""
    lines = []
    for row in rows:
        for entry in row.get("links", ()):
            gather, publish = ("low-bit" if entry[key] else "BF16" for key in ("low_bit_gather", "low_bit_publish"))
            figures = " | ".join(f"{entry[key]:.3g}" for key in ("communication", "publish", "step"))
            lines.append(f"| {row['scheme']} | {gather} | {publish} | {figures} |")
    if not lines:
        return ""
    head = "| scheme | all-gather | publish | communication | publish, s | step |\n|---|---|---|---|---|---|\n"
    return head + "\n".join(lines)


def run(arguments: PlanArguments) -> int:
    """Print the tables, write the files; the exit code."""
    ceilings = Ceilings.load(arguments.ceilings) if arguments.ceilings else assumed_ceilings(arguments.gpu)
    rows = plan(arguments, ceilings)
    warn(ceilings, workload_of(arguments))
    print(describe(arguments, ceilings))
    print("\nSeconds; c: bound by compute, m: memory, o: overhead, l: link.\n")
    print(table(rows))
    if links := links_table(rows):
        print(f"\nLow-bit tensors on the links:\n\n{links}")
    document = {
        "kind": "plan",
        "commit": report.commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "arguments": report.given(arguments) | {"model": find_model(arguments.model).name},
        "ceilings": ceilings.to_json(),
        "results": rows,
    }
    if arguments.json:
        report.write_json(arguments.json, document)
    if arguments.plot:
        plot(arguments.plot, rows, describe(arguments, ceilings))
    return 0


def describe(arguments: PlanArguments, ceilings: Ceilings) -> str:
    """What is predicted, in a line."""
    mean, longest = arguments.response_length
    kind = "assumed from data sheets, not measured" if ceilings.assumed else "measured"
    return (
        f"{find_model(arguments.model).name} on {arguments.gpus} x {ceilings.device} ({kind}), "
        f"{arguments.prompts} x {arguments.n} responses of {mean} tokens (at most {longest}) to prompts of "
        f"{arguments.prompt_length}"
    )


def plot(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """PNG: stacked seconds of each phase, and the speed-ups of rollout and step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"{row['scheme']} {row['level']}" for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(max(10, 1.4 * len(rows)), 5))
    bottom = [0.0] * len(rows)
    for phase in PHASES:
        heights = [row["phases"][phase]["seconds"] for row in rows]
        left.bar(names, heights, bottom=bottom, label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    left.set(title="predicted step", ylabel="seconds")
    left.legend(fontsize=7)
    places = range(len(rows))
    for shift, name in ((-0.2, "rollout"), (0.2, "step")):
        right.bar([i + shift for i in places], [row["speedup"][name] for row in rows], 0.4, label=name)
    right.axhline(1.0, color="black", linewidth=0.8)
    right.set_xticks(places, names)
    right.set(title="times as fast as BF16")
    right.legend(fontsize=7)
    for axis in (left, right):
        axis.tick_params(axis="x", rotation=60, labelsize=8)
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
