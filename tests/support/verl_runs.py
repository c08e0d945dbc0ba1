"""Configs of runs on verl, and what its replay buffer is made with."""

from __future__ import annotations

import yaml
from checkout import ROOT

from qarl.config import Config, build_config
from qarl.config.unread import RULES


def quickstart(**changes: object) -> Config:
    values = yaml.safe_load((ROOT / "configs" / "quickstart_verl.yaml").read_text())
    for dotted, value in changes.items():
        *sections, leaf = dotted.split(".")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    for rule in RULES:  # a key of the file that a change switches off is dropped, as on the command line
        if rule.decider in changes and not rule.reads(changes[rule.decider]):
            for section, _, leaf in (key.partition(".") for key in rule.keys if key not in changes):
                values.get(section, {}).pop(leaf, None)
    return build_config(values)


KWARGS = {
    "trainer_mode": "sync",
    "trainer_config": {},
    "max_off_policy_threshold": 8,
    "max_off_policy_strategy": "drop",
    "sampler_kwargs": {"filter_groups": False, "sync_refill_failed_groups": False},
    "refill_fn": print,
}
