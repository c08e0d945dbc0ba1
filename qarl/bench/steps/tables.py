"""Markdown tables from the JSON of `qarl.bench steps | rollout | trainer | publish`.

A figure is the median, minimum and maximum over launches. The value of a launch is the median of its rounds. With only
one launch, the figure is over its rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qarl.bench import report

Document = Mapping[str, Any]
Result = Mapping[str, Any]
Samples = Sequence[Sequence[float]]
"""A list for each launch, with one sample per round."""
PHASES = {
    "steps": ("rollout", "old_log_prob", "forward", "backward", "optimizer", "quantize", "publish", "step"),
    "trainer": ("old_log_prob", "forward", "backward", "optimizer", "quantize", "step"),
    "publish": ("publish.quantize", "publish.pack", "publish.prepare", "publish.validate", "publish.transfer",
                "publish.apply", "quantize", "publish"),
    "rollout": ("prefill", "decode", "rollout"),
}  # fmt: skip
RATIOS = {
    "steps": ("rollout", "prefill", "decode", "old_log_prob", "update", "step"),
    "trainer": ("old_log_prob", "update", "step"),
    "publish": ("publish",),
    "rollout": ("prefill", "decode", "rollout"),
}
"""PHASES: the columns of the tables of seconds. RATIOS: the columns of the tables of ratios. `quantize` has no ratio,
because bf16 has nothing to quantize."""


def units(samples: Samples) -> list[float]:
    """Return the median of each launch's rounds. For a single launch return its rounds."""
    return list(samples[0]) if len(samples) == 1 else [statistics.median(rounds) for rounds in samples]


def summary(samples: Samples) -> dict[str, float]:
    """Return median, minimum and maximum of `units(samples)`."""
    values = units(samples)
    return {"median": statistics.median(values), "minimum": min(values), "maximum": max(values)}


def ratio(base: Samples, other: Samples) -> dict[str, float]:
    """Summarize base / other, launch by launch, so that slow phases of the machine cancel out.

    If one of them has more launches, the additional ones are ignored."""
    both = zip(units(base), units(other), strict=False)
    return summary([[a / b] for a, b in both])


def markdown(document: Document) -> str:
    """Return a line about model and machine, then tables of seconds, ratios to BF16, and tokens/s with peak memory."""
    parts = [_head(document), _seconds(document), _ratios(document), _throughput(document)]
    parts += [f"Not measured: {name}: {why}" for name, why in document["failures"].items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(document: Document) -> str:
    model, work, given = document["model"], document["workload"], document["arguments"]
    lengths = given["response_length"]
    done = (f"{work['prompts']} prompts of {work['prompt_length']} tokens, {work['n']} responses of "
            f"{'/'.join(map(str, lengths))} to each")  # fmt: skip
    if document["kind"] in ("steps", "trainer"):
        batches = "mini-batch" if work["mini_batches"] == 1 else "mini-batches"
        done += f", {work['mini_batches']} {batches} of micro-batches of {work['micro_batch_size']}"
    depth, whole = model["layers"][-1], model["num_hidden_layers"]
    cut = "" if depth == whole else f" (the whole model has {whole}, but the others were not measured)"
    taken = [len(value["samples"]) for result in document["results"] for value in result["phases"].values()]
    launches = max(taken, default=given["launches"])
    over = f"{launches} launches" if launches > 1 else "the rounds of one launch"
    return (
        f"{model['name']}, {model['weights']} weights: {model['parameters'][-1] / 1e6:.0f}M parameters in {depth} "
        f"layers{cut}. {done}. {report.head(document)} Medians over {over} (minimum-maximum); ratios launch by launch."
    )


def _seconds(document: Document) -> str:
    phases = PHASES[document["kind"]]
    share = document["kind"] == "steps"
    titles = [f"{phase.removeprefix('publish.')}, s" for phase in phases]
    head = [*_label_titles(document), *titles, *(["publish / step"] if share else [])]

    def row(result: Result) -> Iterable[str]:
        found = result["phases"]
        yield from (seconds(summary(found[phase]["samples"])) if phase in found else "" for phase in phases)
        if share:
            part = ratio(found["publish"]["samples"], found["step"]["samples"])
            yield f"{part['median']:.1%}"

    return _table(document, head, row)


def _ratios(document: Document) -> str:
    """Return the table of speedups over BF16 at level `off` (as in the paper), and of each level's cost over `off`."""
    phases, results = RATIOS[document["kind"]], document["results"]
    level = document["kind"] in ("steps", "trainer")
    head = [*_label_titles(document), *phases, *(["step / `off`"] if level else [])]

    def row(result: Result) -> Iterable[str]:
        base = _other(results, result, scheme="bf16", level="off" if level else None)
        yield from (_ratio(base, result, phase) for phase in phases)
        if level:
            yield _ratio(result, _other(results, result, scheme=result["scheme"], level="off"), "step")

    return f"Speed relative to BF16{' at `off`' * level}:\n\n{_table(document, head, row)}"


def _other(results: Sequence[Result], result: Result, **wanted: str | None) -> Result | None:
    """Return the result with the same sizes, but with the scheme and level in `wanted`, or None."""
    same = {key: result.get(key) for key in ("layers", "batch", "response_length")} | wanted
    return next((one for one in results if all(one.get(key) == value for key, value in same.items())), None)


def _ratio(base: Result | None, other: Result | None, phase: str) -> str:
    if base is None or other is None or phase not in base["phases"] or phase not in other["phases"]:
        return ""
    found = ratio(base["phases"][phase]["samples"], other["phases"][phase]["samples"])
    return f"{found['median']:.2f} ({found['minimum']:.2f}-{found['maximum']:.2f})"


def _throughput(document: Document) -> str:
    """Return the table of tokens/s and peak memory. The first token of a response counts as prefill, not decode."""
    work = document["workload"]
    rates = document["kind"] in ("steps", "rollout")
    titles = ["prefill, tokens/s", "decode, tokens/s"] if rates else []

    def row(result: Result) -> Iterable[str]:
        sequences = result.get("batch") or work["sequences"]
        length = result.get("response_length") or work["response_length"]
        for phase, tokens in (("prefill", work["prompt_length"]), ("decode", length - 1)) if rates else ():
            yield f"{sequences * tokens / summary(result['phases'][phase]['samples'])['median']:.0f}"
        yield f"{result['peak_bytes']['step'] / 2**30:.2f}" if result["peak_bytes"].get("step") else ""

    return _table(document, [*_label_titles(document), *titles, "peak memory, GiB"], row)


def _label_titles(document: Document) -> list[str]:
    more = {"steps": ["level"], "trainer": ["level"], "rollout": ["batch", "tokens"], "publish": []}
    return ["scheme", *more[document["kind"]]]


def _labels(document: Document, result: Result) -> list[str]:
    applied = result.get("level_applied") or result["level"]
    values = {
        "scheme": result["scheme"],
        "level": f"`{result['level']}`" + (f" (ran as `{applied}`)" if applied != result["level"] else ""),
        "batch": str(result.get("batch")),
        "tokens": str(result.get("response_length")),
    }
    return [values[title] for title in _label_titles(document)]


def _table(document: Document, head: Sequence[str], row: Callable[[Result], Iterable[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join([*_labels(document, result), *row(result)])} |" for result in document["results"]]
    return "\n".join(lines)


def seconds(value: Mapping[str, float]) -> str:
    """Format as `1.23 (1.2-1.31)`, or `0` if it took no time."""
    return f"{value['median']:.3g} ({value['minimum']:.3g}-{value['maximum']:.3g})" if value["maximum"] else "0"
