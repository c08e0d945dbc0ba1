"""Steps of `QaRLTrainer` with a stub for the engine: the noise limit, gradients, and what a resume compares."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from bad_runs import edit_model_config
from glossary import glossary_metrics
from metrics_table import misplaced
from random_models import save_random_model
from trl_steps import DATA, build, length, nothing

from qarl.config.level import Level
from qarl.errors import UserError
from qarl.metrics.mismatch_limit import MismatchError
from qarl.tbpo import tbpo_loss
from qarl.trl import metrics, trainer
from qarl.trl.checks import check_resume
from qarl.trl.config import RUN_KEYS
from qarl.trl.metrics import StepMetrics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("level", ["off", "linears"])
def test_another_model_in_the_engine_is_found_before_the_first_update(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Its mean |δ| is under the limit of the level, so only the noise shows it."""
    build(model, tmp_path, monkeypatch, quant_align=level).train()
    with pytest.raises(MismatchError, match="compute different models") as caught:
        build(model, tmp_path, monkeypatch, quant_align=level, wrong=1.5).train()
    assert "quant_mismatch_limit" in str(caught.value)
    assert not [key for key in RUN_KEYS if "." in key and key in str(caught.value)]
    limit = Level(level).tolerance.mismatch
    build(
        model, tmp_path, monkeypatch, quant_align=level, wrong=1.5, quant_mismatch_limit=limit
    ).train()


def test_the_guard_and_the_notes_speak_of_trls_fields(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "qarl.checks.model.lower_level", lambda *_: "quant.align=exact falls back to model"
    )
    with pytest.raises(MismatchError) as caught:
        build(model, tmp_path, monkeypatch, wrong=1.5, quant_mismatch_limit=1e-9).train()
    assert "of quant_mismatch_limit" in str(caught.value) and "quant." not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__  # printed once
    out, err = capsys.readouterr()
    assert "quant_align=exact falls back" in out + err


def test_a_resume_with_another_scheme_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1}
    build(model, tmp_path, monkeypatch, **saves).train()
    build(model, tmp_path, monkeypatch, max_steps=2, **saves).train(resume_from_checkpoint=True)
    for asked in (True, str(tmp_path / "checkpoint-1")):
        other = build(
            model, tmp_path, monkeypatch, max_steps=3, quant_scheme="w8a8", quant_group_size=128
        )
        with pytest.raises(UserError, match="quant_scheme was 'w4a16', now 'w8a8'") as caught:
            other.train(resume_from_checkpoint=asked)
        assert "set quant_scheme='w4a16', quant_group_size=32" in str(caught.value)
    lora: dict[str, Any] = {"r": 8, "alpha": 16, "target_modules": ["q_proj"]}
    file, args = tmp_path / "checkpoint-1" / "qarl.json", other.args
    for now, words in (
        ({"peft_config": lora, "base": "b"}, "another base"),
        (
            {"peft_config": lora | {"r": 16}, "base": "b"},
            r"LoraConfig\(r=8, lora_alpha=16, target_modules=\['q_proj'\]\);",
        ),
    ):
        file.write_text(json.dumps({"peft_config": lora, "base": "a"}))
        with pytest.raises(UserError, match=words):
            check_resume(str(file.parent), args, now)
    file.unlink()
    with pytest.raises(UserError, match=r"qarl\.json is missing"):
        build(model, tmp_path, monkeypatch).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )


def test_a_resume_with_another_model_config_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    checkpoint = tmp_path / "checkpoint-1"
    build(copy, tmp_path, monkeypatch, save_strategy="steps", save_steps=1).train()
    monkeypatch.chdir(tmp_path)
    edit_model_config(rms_norm_eps=1e-2)
    other = build(copy, tmp_path, monkeypatch, nothing)
    with pytest.raises(UserError, match="what it reads has changed") as caught:
        check_resume(str(checkpoint), other.args, other._settings)
    said = str(caught.value)
    assert (
        "rms_norm_eps of the model's config.json was 1e-06, now 0.01" in said
        and "another output_dir" in said
    )
    file = checkpoint / "qarl.json"
    saved = json.loads(file.read_text())
    saved["inputs"]["model"]["rms_norm_eps"] = 1e-2
    file.write_text(json.dumps(saved))
    check_resume(str(checkpoint), other.args, other._settings)
    assert "the source of the reward function changed" in capsys.readouterr().err
    del saved["inputs"]
    file.write_text(json.dumps(saved))
    check_resume(str(checkpoint), other.args, other._settings)
    assert "has no record of model config" in capsys.readouterr().err


def test_the_last_update_of_an_epoch_is_the_mean_of_its_own_responses(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three micro-batches of four responses: the first two are one update, and the third is the other."""
    steps = {"steps_per_generation": 3, "gradient_accumulation_steps": 2}
    trained = build(model, tmp_path, monkeypatch, max_steps=-1, num_train_epochs=1, **steps)
    sizes: list[int] = []
    monkeypatch.setattr(
        trainer,
        "tbpo_loss",
        lambda *tensors, global_batch_size: (
            sizes.append(global_batch_size)
            or tbpo_loss(*tensors, global_batch_size=global_batch_size)
        ),
    )
    trained.train()
    assert sizes == [8, 8, 4] and trained.state.global_step == 2


def test_gradients_of_micro_batches_are_summed_in_fp32(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF16 would round 1 + 2^-9 to 1."""
    trained = build(model, tmp_path, monkeypatch)
    trained.create_optimizer()
    for parameter in trained.policy.model.parameters():
        parameter.sum().backward()
        (parameter * 2**-9).sum().backward()
        assert set(parameter.grad.flatten().tolist()) == {1 + 2**-9}


@pytest.mark.parametrize("loss_type", ["tbpo", "grpo"])
def test_the_metrics_have_the_names_of_the_other_backends(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    """Two optimizer steps for each rollout, so the second has ratios other than 1."""
    steps = {"steps_per_generation": 2, "max_steps": 2, "learning_rate": 1e-3, "logging_steps": 2}
    trained = build(model, tmp_path, monkeypatch, length, loss_type=loss_type, **steps)
    trained.train()
    (log,) = (entry for entry in trained.state.log_history if "mismatch/k3" in entry)
    ours = {name for name in log if name.partition("/")[0] in ("actor", "mismatch", "tokens")}
    assert ours - glossary_metrics() == set()
    assert misplaced(ours, "local") == []
    contributions = {
        f"actor/{p}{name}"
        for p in ("", "rollout_")
        for name in ("k1", "k3", "zero_centred_loss_neg")
    }
    assert ours >= contributions | {"mismatch/w_to_101", "mismatch/ppl_ratio", "actor/update_size"}
    assert (
        log["actor/k3"] == pytest.approx(log["actor/rollout_k3"], rel=0.5) and log["actor/k3"] > 0
    )
    assert any(name.startswith("tokens/neg_now_") for name in ours)


def test_the_mismatch_is_that_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has two tokens with |δ| 0.1 and 0.3, and the other has one with 0.8."""
    config: Any = SimpleNamespace(quant=SimpleNamespace(mismatch_limit=9.0))
    config.rollout = SimpleNamespace(temperature=1.0)
    policy: Any = SimpleNamespace(limit_level=Level.LINEARS)
    accelerator = SimpleNamespace(is_main_process=True)
    here, there = (StepMetrics(config, policy, accelerator) for _ in range(2))
    sampled = torch.tensor([[-1.0, -1.0]])
    there.compare(sampled - 0.8, sampled, torch.tensor([[1, 0]]), trained=True)
    here.compare(sampled + torch.tensor([0.1, -0.3]), sampled, torch.ones(1, 2), trained=True)
    others = there._pairs.parts
    monkeypatch.setattr(metrics, "gather_object", lambda own: own + others)
    found = here.take(None)
    assert found["mismatch/abs_mean"] == pytest.approx(0.4)
    assert found["mismatch/abs_max"] == pytest.approx(0.8)


def test_the_limit_is_that_of_responses_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the other backends: TRL has masked two of three responses, and the limit grows as responses get shorter."""
    config: Any = SimpleNamespace(quant=SimpleNamespace(mismatch_limit=9.0))
    policy: Any = SimpleNamespace(limit_level=Level.LINEARS)
    accelerator = SimpleNamespace(device="cpu", reduce=lambda sums, reduction: 2 * sums)
    step = StepMetrics(config, policy, accelerator)
    asked: list[Any] = []
    monkeypatch.setattr(step, "_check", lambda *values, **_: asked.append(values))
    sampled = torch.full((3, 4), -1.0)
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    step.compare(sampled.masked_fill(mask == 0, torch.nan) - 0.5, sampled, mask, trained=False)
    assert asked == [(0.5, 3.0)]


def test_a_log_without_a_token_has_no_mismatch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No random response ends with EOS, so all are cut off and masked."""
    trained = build(
        model, tmp_path, monkeypatch, length, mask_truncated_completions=True, logging_steps=1
    )
    trained.train()
    assert not any("mismatch/k3" in entry for entry in trained.state.log_history)


@pytest.mark.parametrize("loss", ["tbpo", "grpo"])
@pytest.mark.parametrize("interval", [1, 2])
def test_steps_whose_responses_are_all_masked(
    model: Path, tmp_path: Path, monkeypatch: Any, loss: str, interval: int
) -> None:
    """TRL masks truncated responses, and all of the stub's are: no step has a token, and nothing is learned."""
    trained = build(
        model,
        tmp_path,
        monkeypatch,
        loss_type=loss,
        max_steps=2,
        logging_steps=interval,
        mask_truncated_completions=True,
        weight_decay=0.0,
        per_device_eval_batch_size=4,
    )
    before = {name: weight.clone() for name, weight in trained.policy.model.named_parameters()}
    trained.train()
    steps = [entry for entry in trained.state.log_history if "loss" in entry]
    assert len(steps) == 2 // interval
    assert all(entry["loss"] == 0 for entry in steps)
    assert not [name for entry in steps for name in entry if name.startswith("mismatch/")]
    assert trained.evaluate(DATA)["eval_loss"] == 0
    assert all(
        torch.equal(weight, before[name])
        for name, weight in trained.policy.model.named_parameters()
    )


def test_the_noise_limit_waits_for_a_batch_with_tokens(
    model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    trained = build(model, tmp_path, monkeypatch, wrong=3.0, mask_truncated_completions=True)
    trained.train()
    assert trained._step_metrics._noise_is_checked is False
