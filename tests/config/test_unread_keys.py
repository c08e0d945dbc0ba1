"""Keys that another key switches off: an error, unless only the command line switches off what a file sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from qarl.config import ConfigError, load_config
from qarl.config.schema import default_values, flat_values
from qarl.config.unread import RULES, Rule, unread

DEFAULTS = default_values()
OFF = {
    "actor.loss": "reinforce",
    "actor.positive_band": "upper",
    "actor.band_scaling": "none",
    "actor.use_kl_loss": False,
    "actor.old_log_probs": "recompute",
    "optim.name": "adamw",
    "optim.lr_scheduler_type": "constant",
}
"""Each decider with a value for which its keys are not read."""
VALUES = {
    "actor.mismatch_outside_cap": "drop",
    "actor.positive_band": "two_sided",
    "actor.band_scaling": "length",
    "actor.band_reference_length": 100,
}
"""Values other than the default; elsewhere 0.5 or, for keys that must be above 1, 2.5."""
ROWS = [(rule, key) for rule in RULES for key in rule.keys]


def other(key: str) -> Any:
    return VALUES.get(key, 2.5 if key in ("actor.clip_ratio_c", "actor.seq_tis_imp_ratio_cap") else 0.5)


@pytest.mark.parametrize(("rule", "key"), ROWS, ids=lambda part: part if isinstance(part, str) else part.decider)
def test_a_key_that_is_not_read(tmp_path: Path, rule: Rule, key: str) -> None:
    section, _, name = key.partition(".")
    values = yaml.safe_load(Path("configs/quickstart.yaml").read_text(encoding="utf-8"))
    for flat in flat_values({part: values.get(part, {}) for part in ("actor", "optim")} | REST, set()):
        if flat in {key for _, key in ROWS} or flat in OFF:
            values.get(flat.partition(".")[0], {}).pop(flat.partition(".")[2], None)
    values.setdefault(section, {})[name] = other(key)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    off = f"{rule.decider}={OFF[rule.decider]}"
    with pytest.raises(ConfigError) as caught:
        load_config([f"config={file}", f"{key}={other(key)}", off])
    (problem,) = [problem for problem in caught.value.problems if problem.key == key]
    assert problem.reason.startswith("it has no effect with ") and problem.source == "command line"
    assert flat_values(load_config([f"config={file}", off]).model_dump(), set())[key] == DEFAULTS[key]


REST: dict[str, Any] = {
    name: {} for name in ("model", "data", "reward", "rollout", "quant", "publish", "algorithm", "trainer")
} | {"rollout_correction": {}}


def test_a_resolved_config_has_only_values_that_act() -> None:
    config = load_config(["config=quickstart.yaml", "actor.loss=grpo", "optim.lr_scheduler_type=constant"])
    assert list(unread(flat_values(config.model_dump(), set()), DEFAULTS)) == []
