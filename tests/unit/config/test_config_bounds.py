"""Sane bounds: a value outside is questioned everywhere, and no shipped config is."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_runs import EngineConstructed
from checkout import SHIPPED

from qarl.config import load_config
from qarl.config.hints import unusual_values
from qarl.doctor.__main__ import main as doctor
from qarl.train import main

pytestmark = pytest.mark.usefixtures("startable_run")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_shipped_config_is_questioned(path: Path) -> None:
    assert unusual_values(load_config([f"config={path}"])) == []


NONSENSE = {
    "optim.lr=4096": "optim.lr=4096.0 is above 0.01",
    "optim.lr=0": "optim.lr=0.0 is below 1e-09",
}


@pytest.mark.parametrize(("argument", "words"), NONSENSE.items(), ids=NONSENSE)
def test_nonsense_is_questioned_by_a_run_a_dry_run_and_the_doctor(
    capsys: pytest.CaptureFixture[str], argument: str, words: str
) -> None:
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", argument])
    assert "warning: " in (printed := capsys.readouterr().err) and words in printed
    assert main(["config=run.yaml", argument, "dry_run=true"]) == 0
    assert words in capsys.readouterr().err
    doctor(["config=run.yaml", argument])
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("key", "extra"),
    [
        ("actor.old_log_probs", ["actor.old_log_probs=rollout"]),
        ("rollout_correction.bypass_mode", ["rollout_correction.bypass_mode=true"]),
        (None, ["actor.old_log_probs=rollout", "quant.align=model"]),
        (None, ["actor.old_log_probs=rollout", "quant.scheme=w8a8"]),
        (
            None,
            ["actor.old_log_probs=rollout", "actor.loss=reinforce", "actor.ppo_mini_batch_size=4"],
        ),
    ],
)
def test_a_ratio_that_contains_the_mismatch_is_questioned(
    key: str | None, extra: list[str]
) -> None:
    keys = dict(
        pair.split("=")
        for pair in ["actor.loss=grpo", "quant.align=off", "data.train_batch_size=4", *extra]
    )
    findings = unusual_values(
        load_config(["config=run.yaml", *(f"{name}={value}" for name, value in keys.items())])
    )
    assert [unusual.where for unusual in findings] == ([] if key is None else [key])


@pytest.mark.parametrize(("word", "meant"), [("no", "false"), ("Off", "false"), ("on", "true")])
def test_words_for_booleans_in_the_chat_templates_variables(word: str, meant: str) -> None:
    """Qwen3's template asks `is false`, so the text `no` would leave the model thinking."""

    def questioned(value: str) -> list[str]:
        variables = f"data.apply_chat_template_kwargs={{enable_thinking: {value}}}"
        return [
            unusual.what for unusual in unusual_values(load_config(["config=run.yaml", variables]))
        ]

    name = "data.apply_chat_template_kwargs.enable_thinking"
    assert questioned(word) == [f"{name} is the text '{word}', and not {meant}"]
    assert questioned(meant) == questioned("never") == []


@pytest.mark.parametrize(
    ("arguments", "questioned"),
    [
        (["actor.loss=grpo", "trainer.staleness=1"], ["trainer.staleness"]),
        (["actor.loss=grpo", "trainer.staleness=0"], []),
        (["actor.loss=grpo", "trainer.staleness=1", "rollout_correction.rollout_is=token"], []),
        (["actor.loss=tbpo", "trainer.staleness=1"], []),
    ],
)
def test_staleness_that_nothing_corrects(arguments: list[str], questioned: list[str]) -> None:
    findings = unusual_values(load_config(["config=run.yaml", "backend=verl", *arguments]))
    assert [unusual.where for unusual in findings] == questioned
