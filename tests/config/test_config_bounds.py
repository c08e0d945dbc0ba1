"""Sane bounds: a value outside is questioned everywhere, and no shipped config is."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_runs import EngineConstructed
from checkout import SHIPPED

from qarl.config import Config, load_config
from qarl.config.bounds import MOST_RESPONSES, unusual_values
from qarl.config.types import Sane, Section
from qarl.doctor.__main__ import main as doctor
from qarl.train import main

pytestmark = pytest.mark.usefixtures("startable_run")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_shipped_config_is_questioned(path: Path) -> None:
    assert unusual_values(load_config([f"config={path}"])) == []


def bounded(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Sane]]:
    """Dotted keys that have sane bounds, the values of a pair by their index."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from bounded(info.annotation, f"{prefix}{name}.")
        yield from ((f"{prefix}{name}", item) for item in info.metadata if isinstance(item, Sane))
        for i, kind in enumerate(typing.get_args(info.annotation)):
            for item in getattr(kind, "__metadata__", ()):
                if isinstance(item, Sane):
                    yield f"{prefix}{name}[{i}]", item


def with_value(config: Config, key: str, value: float) -> Config:
    """The config with a value that the other keys need not allow."""
    section, _, name = key.partition(".")
    name, _, index = name.partition("[")
    new: Any = value
    if index:
        new = list(getattr(getattr(config, section), name))
        new[int(index[0])] = value
        new = tuple(new)
    changed = getattr(config, section).model_copy(update={name: new})
    return config.model_copy(update={section: changed})


def test_a_value_is_questioned_outside_its_bounds_only() -> None:
    config, keys = load_config(["config=run.yaml"]), dict(bounded(Config))
    assert {"optim.lr", "rollout.n", "optim.betas[1]", "actor.clip_ratio_low", "trainer.num_threads"} <= set(keys)
    for key, sane in keys.items():
        whole = isinstance(sane.high, int)
        step = 1 if whole else abs(sane.high) * 1e-3
        for value, questioned in ((sane.low, False), (sane.high, False), (sane.high + step, True)):
            found = [unusual for unusual in unusual_values(with_value(config, key, value)) if unusual.key == key]
            if key not in ("optim.lr_warmup_steps", "rollout.top_k"):  # they have a question of another kind too
                assert [unusual.why for unusual in found] == [sane.above] * questioned, (key, value)
        if sane.below:
            low = sane.low - 1 if whole else sane.low - abs(sane.high) * 1e-3
            found = [unusual for unusual in unusual_values(with_value(config, key, low)) if unusual.key == key]
            assert [unusual.why for unusual in found] == [sane.below] and "choose" in found[0].fix, key


NONSENSE = {
    "optim.lr=4096": "optim.lr=4096.0 is above 0.01",
    "optim.eps=1e30": "optim.eps=1e+30 is above 0.01",
    "actor.ppo_epochs=900000000000000000": "actor.ppo_epochs=900000000000000000 is above 32",
    "rollout.n=100000": "rollout.n=100000 is above 1024",
    "optim.lr_warmup_steps=1": "covers the whole run of 1 steps",
    "optim.lr=0": "nothing would be learned",
    "rollout.top_k=1": "leaves nothing to sample",
}


@pytest.mark.parametrize(("argument", "words"), NONSENSE.items(), ids=NONSENSE)
def test_nonsense_is_questioned_by_a_run_a_dry_run_and_the_doctor(
    capsys: pytest.CaptureFixture[str], argument: str, words: str
) -> None:
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", argument])
    assert f"warning: {argument.partition('=')[0]}" in (printed := capsys.readouterr().err) and words in printed
    assert main(["config=run.yaml", argument, "dry_run=true"]) == 0
    assert words in capsys.readouterr().err
    doctor(["config=run.yaml", argument])
    assert words in " ".join(capsys.readouterr().out.split())


def test_too_many_responses_together() -> None:
    prompts = MOST_RESPONSES // 1024
    together = [f"data.train_batch_size={2 * prompts}", "rollout.n=1024"]
    (found,) = unusual_values(load_config(["config=run.yaml", *together]))
    assert found.key == "data.train_batch_size, rollout.n"
    assert unusual_values(load_config(["config=run.yaml", f"data.train_batch_size={prompts}", "rollout.n=1024"])) == []


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("actor.old_log_probs", ["actor.old_log_probs=rollout"]),
        ("rollout_correction.bypass_mode", ["rollout_correction.bypass_mode=true"]),
        ("actor.old_log_probs", ["actor.old_log_probs=rollout", "quant.scheme=w4a8"]),
        (None, ["actor.old_log_probs=auto"]),
        (None, ["actor.old_log_probs=rollout", "quant.align=model"]),
        (None, ["actor.old_log_probs=rollout", "quant.scheme=w8a8"]),
        (None, ["actor.old_log_probs=rollout", "actor.loss=reinforce", "actor.ppo_mini_batch_size=4"]),
    ],
)
def test_a_ratio_that_contains_the_mismatch_is_questioned(key: str | None, given: list[str]) -> None:
    keys = dict(one.split("=") for one in ["actor.loss=grpo", "quant.align=off", "data.train_batch_size=4", *given])
    found = unusual_values(load_config(["config=run.yaml", *(f"{name}={value}" for name, value in keys.items())]))
    assert [unusual.key for unusual in found] == ([] if key is None else [key])
