"""From the answers of all rounds to the numbers of one result, and from two depths to the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qarl.bench.steps.arguments import Arguments
from qarl.bench.steps.checks import worst
from qarl.bench.steps.spread import extrapolate, per_layer, ratios, spread
from qarl.errors import UserError

Answer = dict[str, Any]
Launches = Sequence[Sequence[Answer]]
"""Of each launch one answer a round."""
Samples = Mapping["Key", Launches]
NORMALISED = ("step", "rollout", "prefill", "decode", "old_log_prob", "update", "quantize", "publish")


@dataclass(frozen=True)
class Key:
    """What is measured. `level` is empty where there is no trainer, `batch` and `length` are of `rollout` alone."""

    scheme: str
    level: str
    layers: int
    batch: int = 0
    length: int = 0

    def __str__(self) -> str:
        parts = [self.scheme, f"level {self.level}" * bool(self.level), f"{self.layers} layers"]
        parts += [f"batch {self.batch}" * bool(self.batch), f"{self.length} tokens" * bool(self.length)]
        return ", ".join(part for part in parts if part)

    def plain(self) -> Key:
        """Plain BF16 of the same sizes: the base of ratios."""
        return replace(self, scheme="bf16", level="off" if self.level else "")


def check_release(document: Mapping[str, Any], where: str) -> None:
    """UserError for a file with other statistics than `qarl.bench.steps.spread.Spread`."""
    if any("mean" not in value for result in document["results"] for value in result["phases"].values()):
        raise UserError("a file of another release of qarl.bench", where=where, fix="measure again")


def results(
    arguments: Arguments, samples: Samples, peaks: Mapping[Key, Mapping[str, int]] | None = None
) -> list[dict[str, Any]]:
    """A result for each key, those of the whole model last where it was extrapolated, for which no peak is known."""
    peaks = peaks or {}
    found = [_entry(arguments, key, samples) | {"peak_bytes": dict(peaks.get(key, {}))} for key in samples]
    whole = arguments.source.layers
    if len(arguments.layers) == 2 and whole not in arguments.layers:
        first, second = arguments.layers
        pairs = {
            replace(key, layers=whole): (samples[key], samples[replace(key, layers=second)])
            for key in samples
            if key.layers == first and replace(key, layers=second) in samples
        }
        made = {key: _extrapolated(*pair, (first, second), whole) for key, pair in pairs.items()}
        for key, (shallow, deep) in pairs.items():
            layer, fixed = per_layer(_samples(shallow, "step"), _samples(deep, "step"), (first, second))
            parts = {"extrapolated": True, "step_per_layer": layer, "step_fixed": fixed}
            found.append(_entry(arguments, key, made) | {"peak_bytes": {}} | parts)
    return found


def _extrapolated(shallow: Launches, deep: Launches, depths: tuple[int, int], full: int) -> list[list[Answer]]:
    """Answers as the whole model would give them, round by round, with the checks of the deeper one."""
    names = [name for name in deep[0][0]["phases"] if name != "publish_share"]
    columns = {
        name: extrapolate(_samples(shallow, name), _samples(deep, name), depths, full)["samples"] for name in names
    }

    def answer(launch: int, number: int) -> Answer:
        phases = {name: column[launch][number] for name, column in columns.items()}
        if "publish_share" in deep[0][0]["phases"]:
            phases["publish_share"] = phases["publish"] / phases["step"]
        return {"phases": phases, "checks": deep[launch][number]["checks"]}

    return [[answer(launch, number) for number in range(len(rounds))] for launch, rounds in enumerate(deep)]


def _entry(arguments: Arguments, key: Key, samples: Samples) -> dict[str, Any]:
    """One result. Seconds, `publish_share` (of the step) and ratios are `qarl.bench.steps.spread.Spread`s; `speedup`
    is plain BF16's time over this one's, `to_off` this one's over that of the same scheme at `off`."""
    launches = samples[key]
    answers = [answer for rounds in launches for answer in rounds]
    names = [name for name in answers[0]["phases"] if name != "publish_share"]
    phases = {name: spread(_samples(launches, name)) for name in names}
    result: dict[str, Any] = {
        "scheme": key.scheme,
        "level": key.level or None,
        "layers": key.layers,
        "phases": phases,
        "tokens_per_s": _tokens_per_s(arguments, key, phases),
        "checks": worst([answer["checks"] for answer in answers]),
    }
    if key.batch:
        result |= {"batch": key.batch, "response_length": key.length}
    if "publish_share" in answers[0]["phases"]:
        result["publish_share"] = spread(_samples(launches, "publish_share"))
    shared = [name for name in NORMALISED if name in names]
    if base := samples.get(key.plain()):
        result["speedup"] = {name: ratios(_samples(base, name), _samples(launches, name)) for name in shared}
    if off := samples.get(replace(key, level="off")):
        result["to_off"] = {name: ratios(_samples(launches, name), _samples(off, name)) for name in shared}
    return result


def _tokens_per_s(arguments: Arguments, key: Key, phases: Mapping[str, Any]) -> dict[str, float]:
    """Of the means. The first token of a response comes from the prefill."""
    if "prefill" not in phases:
        return {}
    sequences = key.batch or arguments.sequences
    length = key.length or arguments.response_length[0]
    tokens = {"prefill": sequences * arguments.prompt_length, "decode": sequences * (length - 1)}
    return {name: count / phases[name]["mean"] for name, count in tokens.items()}


def _samples(launches: Launches, name: str) -> list[list[float]]:
    return [[answer["phases"][name] for answer in rounds] for rounds in launches]
