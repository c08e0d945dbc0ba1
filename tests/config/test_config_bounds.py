"""Sane bounds: every numeric key has a row, what is outside is questioned everywhere, and no shipped config is."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
from bad_runs import EngineConstructed
from checkout import SHIPPED

from qarl.config import Config, load_config
from qarl.config.bounds import MOST_RESPONSES, TABLE, Bounds, Exempt, unusual_values
from qarl.config.schema import Section
from qarl.doctor.__main__ import main as doctor
from qarl.train import main

pytestmark = pytest.mark.usefixtures("startable_run")


def numeric_keys(section: type[Section], prefix: str = "") -> list[str]:
    """Dotted keys whose type has a number in it, the values of a pair by their index."""
    keys = []
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            keys += numeric_keys(info.annotation, f"{prefix}{name}.")
            continue
        pair = typing.get_origin(info.annotation) is tuple
        count = len(typing.get_args(info.annotation)) if pair else 1
        names = [f"{prefix}{name}[{i}]" for i in range(count)] if pair else [f"{prefix}{name}"]
        keys += names if {int, float} & set(kinds(info.annotation)) else []
    return keys


def kinds(annotation: Any) -> list[Any]:
    """The plain types that a type is made of."""
    parts = typing.get_args(annotation)
    return [kind for part in parts for kind in kinds(part)] if parts else [annotation]


def test_every_numeric_key_has_a_row() -> None:
    keys = numeric_keys(Config)
    assert {"seed", "rollout.n", "optim.betas[1]", "trainer.num_threads", "rollout.max_num_batched_tokens"} <= set(keys)
    assert "model.path" not in keys and "model.gradient_checkpointing" not in keys
    assert sorted(TABLE) == sorted(keys)
    for row in TABLE.values():
        assert isinstance(row, Bounds) or row.why


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_shipped_config_is_questioned(path: Path) -> None:
    assert unusual_values(load_config([f"config={path}"])) == []


BY_ROWS = ("ppo", "log_prob")


def allowed(key: str, value: float) -> Config | None:
    """The config with this value, and others that go with it, if the types take it."""
    name, _, index = key.partition("[")
    text = repr(value) if not index else f"[{value!r}, 0.99]" if index == "0]" else f"[0.9, {value!r}]"
    extra = {
        "actor.seq_clip_ratio_low": ["actor.positive_band=two_sided"],
        "actor.band_reference_length": ["actor.band_scaling=length"],
        "optim.muon_lr": ["optim.name=muon"],
        "optim.muon_momentum": ["optim.name=muon"],
        "rollout.val_temperature": ["backend=verl"],
        "optim.lr_warmup_steps": ["trainer.total_training_steps=10000000"],
        "rollout_correction.rollout_is_threshold": ["actor.loss=grpo", "rollout_correction.rollout_is=token"],
        "rollout_correction.rollout_is_threshold_lower": [
            "actor.loss=grpo",
            "rollout_correction.rollout_is=token",
            "rollout_correction.rollout_is_mode=clip",
        ],
        "rollout.max_num_batched_tokens": ["rollout.max_num_seqs=1"],
        "actor.old_log_probs_sample": ["actor.old_log_probs=auto"],
        "actor.kl_loss_coef": ["actor.use_kl_loss=true", "actor.loss=grpo"],
        "actor.clip_ratio_low": ["actor.loss=grpo"],
        "actor.clip_ratio_high": ["actor.loss=grpo"],
        "actor.clip_ratio_c": ["actor.loss=dual_clip"],
        "actor.tau_pos": ["actor.loss=sapo"],
        "actor.tau_neg": ["actor.loss=sapo"],
        "actor.mis_imp_ratio_cap": ["actor.loss=mis_gspo"],
    }
    extra |= {key: ["backend=verl"] for key in ("trainer.nnodes", "trainer.n_gpus_per_node")}
    extra |= {"rollout.tensor_model_parallel_size": ["backend=verl"]}
    if key in ("data.train_batch_size", "actor.ppo_mini_batch_size"):
        extra[key] = [f"data.train_batch_size={value}", f"actor.ppo_mini_batch_size={value}"]
    if key == "actor.ppo_micro_batch_size_per_gpu":
        extra[key] = [f"data.train_batch_size={value}", f"actor.ppo_mini_batch_size={value}"]
    if "max_token_len" in key:
        extra[key] = ["actor.use_dynamic_bsz=true", *(f"actor.{by}_micro_batch_size_per_gpu=null" for by in BY_ROWS)]
        extra[key] += ["actor.ppo_max_token_len_per_gpu=1000000"] if key.startswith("actor.log_prob") else []
    given = ["actor.ppo_micro_batch_size_per_gpu=1", f"{name}={text}", *extra.get(key, [])]
    arguments = {argument.partition("=")[0]: argument for argument in given}
    try:
        return load_config(["config=run.yaml", *arguments.values()])
    except Exception:
        return None


@pytest.mark.parametrize("key", [key for key, row in TABLE.items() if isinstance(row, Bounds)])
def test_a_value_is_questioned_outside_its_bounds_only(key: str) -> None:
    row = TABLE[key]
    assert isinstance(row, Bounds)
    whole = isinstance(row.high, int)
    outside = {row.high + 8 if whole else row.high * 1.0005, row.low - 1 if whole else row.low * 0.99 - (row.low == 0)}
    seen = 0
    for value in outside:
        if (config := allowed(key, value)) is not None:
            found = [unusual for unusual in unusual_values(config) if unusual.key == key]
            assert [unusual.what for unusual in found], (key, value)
            assert found[0].why and found[0].fix and str(value)[:5] in found[0].what
            seen += 1
    assert seen, f"{key}: the types refuse {outside}, so the row questions nothing"
    for value in (row.low, row.high):
        if (config := allowed(key, value)) is not None:
            assert [unusual for unusual in unusual_values(config) if unusual.key == key] == []


NONSENSE = {
    "optim.lr=4096": "optim.lr=4096.0 is above 0.01",
    "optim.eps=1e30": "optim.eps=1e+30 is above 0.01",
    "actor.ppo_epochs=9000000000000000000": "actor.ppo_epochs=9000000000000000000 is above 32",
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


def test_a_seed_has_no_bounds() -> None:
    assert isinstance(TABLE["seed"], Exempt)
    assert unusual_values(load_config(["config=run.yaml", "seed=4294967295"])) == []
