"""The suites of `scripts/ablate.py`: YAML files in scripts/suites, checked here before any run starts.

A suite names a config, overrides for all runs (`set`), seeds, and arms: each a mapping of config keys. A suite with
`settings` is a search: each setting is a mapping of config keys too, and `SEARCH_ARMS` run in one setting after the
other until a setting is found in which the first arm collapses in most seeds and the second in none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qarl.errors import UserError

SUITES = Path(__file__).with_name("suites")
SEARCH_ARMS = ("off", "model")
_KEYS = {"title", "question", "config", "set", "seeds", "baseline", "arms", "settings", "most_runs"}
SCREENED = 2
"""Seeds that each arm of a search runs before the others are worth their time."""


@dataclass(frozen=True)
class Run:
    """One run of a suite. `overrides`: config keys and values, in the order of suite, setting and arm."""

    arm: str
    seed: int
    overrides: Mapping[str, Any]
    setting: str = ""

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.setting, self.arm, f"s{self.seed}") if part)


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    question: str
    config: str
    seeds: tuple[int, ...]
    arms: Mapping[str, Mapping[str, Any]]
    set: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    most_runs: int = 24

    def run(self, arm: str, seed: int, setting: str = "") -> Run:
        overrides = {**self.set, **(self.settings[setting] if setting else {}), **self.arms[arm]}
        return Run(arm, seed, overrides, setting)

    def runs(self) -> list[Run]:
        """Return the runs of a suite without settings, seed by seed, so that an early stop leaves whole comparisons."""
        return [self.run(arm, seed) for seed in self.seeds for arm in self.arms]


def suite_names() -> list[str]:
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


def load_suite(name: str) -> Suite:
    """Return a suite by its name. Raise UserError if there is none, or if a part of it is missing or unknown."""
    path = SUITES / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"there is no suite {name!r}", where=str(SUITES), fix=f"choose from {', '.join(suite_names())}")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    missing = {"title", "question", "config", "seeds", "arms"} - set(content)
    unknown = set(content) - _KEYS
    if missing or unknown:
        why = "; ".join(
            f"{kind}: {', '.join(sorted(keys))}" for kind, keys in (("missing", missing), ("unknown", unknown)) if keys
        )
        raise UserError(
            f"the suite {name} cannot be read", where=str(path), why=why, fix=f"its keys are {', '.join(sorted(_KEYS))}"
        )
    baseline = content.get("baseline")
    if baseline is not None and baseline not in content["arms"]:
        raise UserError(f"the baseline {baseline!r} is not an arm", where=str(path), fix="name one of its arms")
    if content.get("settings") and tuple(content["arms"]) != SEARCH_ARMS:
        raise UserError("a search has other arms", where=str(path), fix=f"name its arms {' and '.join(SEARCH_ARMS)}")
    content["arms"] = {arm: overrides or {} for arm, overrides in content["arms"].items()}
    content["settings"] = {name: overrides or {} for name, overrides in (content.get("settings") or {}).items()}
    return Suite(name=name, **{**content, "seeds": tuple(content["seeds"])})


def as_arguments(overrides: Mapping[str, Any]) -> list[str]:
    """Return key=value words for `python -m qarl.train`. Values are written as JSON, which YAML reads."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()]


Outcomes = Mapping[tuple[str, str, int], bool]
"""(setting, arm, seed) -> whether that run collapsed."""


def search_step(suite: Suite, outcomes: Outcomes) -> tuple[list[Run], str]:
    """Return the next runs of a search, and a verdict in words once there are none.

    In each setting `off` runs with two seeds. If neither collapses, the setting is given up. Then `model` runs with two
    seeds. If one collapses, the setting is given up. Then the other seeds decide. The search ends with the first
    setting in which `off` collapses in more than half of the seeds and `model` in none, or before it would exceed
    `most_runs`.
    """
    tried = []
    first, second = SEARCH_ARMS
    for setting in suite.settings:
        for arm, seeds in (
            (first, suite.seeds[:SCREENED]),
            (second, suite.seeds[:SCREENED]),
            (first, suite.seeds),
            (second, suite.seeds),
        ):
            known = [outcomes[setting, arm, seed] for seed in seeds if (setting, arm, seed) in outcomes]
            wanted = [suite.run(arm, seed, setting) for seed in seeds if (setting, arm, seed) not in outcomes]
            reason = _given_up(arm, sum(known), len(known), len(seeds), len(suite.seeds))
            if reason:
                tried.append(f"{setting}: {reason}")
                break
            if wanted:
                if len(outcomes) + len(wanted) > suite.most_runs:
                    return [], f"not found in {len(outcomes)} runs. " + "; ".join(tried)
                return wanted, ""
        else:
            return [], f"found: {setting}. " + "; ".join(tried)
    return [], f"not found in {len(outcomes)} runs. " + "; ".join(tried)


def _given_up(arm: str, collapsed: int, known: int, asked: int, seeds: int) -> str:
    """Return why a setting is given up after `known` of `asked` runs of an arm, or an empty text."""
    if arm == SEARCH_ARMS[1]:
        return f"{arm} collapsed in {collapsed} of {known}" if collapsed else ""
    if known < asked:
        return ""
    still = seeds - known
    if collapsed == 0 or 2 * (collapsed + still) <= seeds:
        return f"{arm} collapsed in {collapsed} of {known}"
    return ""
