"""Steps of `QaRLTrainer` with a stub for the engine: rewards, the noise limit, and what a resume compares."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from bad_runs import edit_model_config
from datasets import Dataset
from glossary import glossary_metrics
from metrics_table import misplaced
from random_models import save_random_model

from qarl.align.levels import engine_arithmetic
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.metrics.mismatch_limit import MismatchError
from qarl.quant.convert import published_forward
from qarl.rollout.publish.manifest import PublishReport
from qarl.tbpo import tbpo_loss
from qarl.trl import QaRLConfig, QaRLTrainer, trainer
from qarl.trl.advantages import equal_responses
from qarl.trl.checks import check_resume
from qarl.trl.config import RUN_KEYS
from qarl.trl.log_probs import as_batch, log_probs_of_rows

TOKENS = 6
DATA = Dataset.from_dict({"prompt": ["t3 t4", "t5 t6 t7"] * 4})


class Engine:
    """Random responses with the log-probs of the engine's arithmetic. `wrong`: a factor of the attention's scale."""

    stale = False
    policy: Any = None
    wrong = 1.0

    def __init__(self, _: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def publish_from(self, source: Any, *, version: int) -> Any:
        return source(self, version=version)

    def publish(self, tensors: Any, *, version: int, prepared: Any) -> Any:
        return PublishReport.of(list(tensors), {}, version, {})

    def sleep(self) -> None:
        pass

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sampling: Any, seeds: list[int]) -> Any:
        responses = torch.randint(3, 60, (len(prompts), TOKENS), generator=self.generator).tolist()
        log_probs, policy = [], self.policy
        with ExitStack() as stack:
            if policy.align != "exact":
                stack.enter_context(engine_arithmetic(policy.model))
                stack.enter_context(published_forward(policy.model, policy.scheme, policy.ignore))
            attentions = [layer.self_attn for layer in policy.model.model.layers]
            for attention in attentions:
                attention.scaling *= self.wrong
            for prompt, response in zip(prompts, responses, strict=True):
                ids = torch.tensor([prompt + response])
                batch = as_batch(ids, torch.ones_like(ids), TOKENS)
                values, _ = log_probs_of_rows(
                    policy, batch, slice(0, 1), temperature=1.0, entropies=False
                )
                log_probs.append(values[0].tolist())
            for attention in attentions:
                attention.scaling /= self.wrong
        return SimpleNamespace(
            prompt_token_ids=prompts, response_token_ids=responses, rollout_log_probs=log_probs
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def nothing(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def nan_once(completions: list[str], **_: Any) -> list[float | None]:
    return [None, float("nan"), *[1.0] * (len(completions) - 2)]


def no_list(completions: list[str], **_: Any) -> None:
    """It has forgotten to return."""


def one_number(completions: list[str], **_: Any) -> float:
    return 1.0


def too_few(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def text(completions: list[str], **_: Any) -> list[str]:
    return ["1.0"] * len(completions)


def a_dict(completions: list[str], **_: Any) -> list[dict[str, float]]:
    return [{"score": 1.0}] * len(completions)


async def too_large(completions: list[str], **_: Any) -> list[float]:
    return [1e39] * len(completions)


def generated(completions: list[str], **_: Any) -> Any:
    return (float(len(completion)) for completion in completions)


async def infinite(completions: list[str], **_: Any) -> list[float]:
    return [float("inf")] * len(completions)


def build(
    model: Path,
    folder: Path,
    monkeypatch: Any,
    rewards: Any = length,
    wrong: float = 1.0,
    data: Dataset = DATA,
    **settings: Any,
) -> QaRLTrainer:
    monkeypatch.setattr(trainer, "RolloutEngine", Engine)
    base = {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": TOKENS,
        "quant_group_size": 32,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }
    made = QaRLTrainer(str(model), rewards, QaRLConfig(**base | settings), data)
    made.engine.policy, made.engine.wrong = made.policy, wrong
    return made


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (nothing, ["4 of 4 responses have no reward", "step 0, prompt 't", "nothing"]),
        ([nothing, nothing], ["4 of 4 responses have no reward", "nothing, nothing"]),
        ([length, nan_once], ["'nan_once' returned nan", "step 0, prompt 't"]),
        (infinite, ["'infinite' returned inf"]),
        (no_list, ["'no_list' returned None for 4 responses", "step 0", "a list"]),
        ([length, one_number], ["'one_number' returned 1.0 for 4 responses"]),
        (too_few, ["'too_few' returned 3 rewards for 4 responses"]),
        (text, ["'text' returned '1.0'", "step 0, prompt 't"]),
        (a_dict, ["'a_dict' returned {'score': 1.0}", "a finite number"]),
        (too_large, ["'too_large' returned 1e+39", "FP32"]),
    ],
    ids=[
        *("None", "two of None", "one NaN", "Inf", "no list", "one number", "too few", "text"),
        *("a dict", "too large"),
    ],
)
def test_a_response_without_a_reward_is_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewards: Any, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        build(model, tmp_path, monkeypatch, rewards).train()
    assert not [word for word in words if word not in str(caught.value)], caught.value


def test_a_function_may_leave_responses_to_others(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build(model, tmp_path, monkeypatch, [length, nothing, generated])
    assert made.reward_func_names == ["length", "nothing", "generated"]
    made.train()
    assert made.state.global_step == 1


def test_functions_by_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in another process, with the columns of the data; a function beside them stays in this one."""
    file = tmp_path / "rewards.py"
    file.write_text(
        "import os, torch\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    torch.set_grad_enabled(False)\n"
        "    assert (data_source, ground_truth, extra_info) == ('', '12', {})\n"
        f"    return float(os.getpid() != {os.getpid()})\n"
    )
    data = DATA.add_column("ground_truth", ["12"] * len(DATA))
    made = build(
        model,
        tmp_path,
        monkeypatch,
        [f"{file}:score", "arithmetic", length],
        data=data,
        reward_workers=1,
    )
    assert made.reward_func_names == ["score", "arithmetic", "length"]
    made.train()
    assert torch.is_grad_enabled() and made.state.log_history[0]["rewards/score/mean"] == 1
    with pytest.raises(UserError, match="no ground truths"):
        build(model, tmp_path, monkeypatch, "arithmetic").train()
    with pytest.raises(UserError, match="has no function 'scores'"):
        build(model, tmp_path, monkeypatch, f"{file}:scores")


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


def constant(completions: list[str], **_: Any) -> list[float]:
    return [0.7] * len(completions)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 2},
        {"loss_type": "dapo", "learning_rate": 1e-2},
        {"loss_type": "grpo", "scale_rewards": "batch", "master_dtype": "bf16"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_equal_rewards_leave_every_weight_as_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    size = {"per_device_train_batch_size": 8, "num_generations": 8, "learning_rate": 1e-3}
    made = build(model, tmp_path, monkeypatch, constant, **size | settings)
    before = {name: value.clone() for name, value in made.policy.model.state_dict().items()}
    made.train()
    assert made.state.global_step == settings.get("max_steps", 1)
    after = made.policy.model.state_dict()
    assert [name for name, value in after.items() if not torch.equal(value, before[name])] == []
    masters = [state["master"] for state in made.optimizer.state.values() if "master" in state]
    assert all(torch.equal(master, master.bfloat16().float()) for master in masters)


def test_an_evaluation_has_its_own_groups(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"per_device_eval_batch_size": 4, "num_generations_eval": 4}
    made = build(model, tmp_path, monkeypatch, constant, **sizes)
    groups: list[int] = []
    monkeypatch.setattr(
        trainer, "equal_responses", lambda *rows: groups.append(rows[2]) or equal_responses(*rows)
    )
    made.evaluate(DATA)
    assert set(groups) == {4}


def test_only_equal_groups_lose_their_advantages() -> None:
    nan = float("nan")
    rewards = torch.tensor([[0.7, nan], [0.7, nan], [0.7, 1.0], [0.1, 1.0], [0.3, 0.4], [0.4, 0.3]])
    ones = torch.ones(2)
    assert equal_responses(rewards, ones, 2, "sum_then_normalize").tolist() == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert equal_responses(rewards, ones, 2, "normalize_then_sum").tolist() == [
        True,
        True,
        *[False] * 4,
    ]


def test_weighted_sums_of_rewards_are_compared() -> None:
    """With the weights 1 and 0 only the first rewards count, and with 2 and 1 the sums are 1.0 and 1.1."""
    rewards = torch.tensor([[0.7, 0.1], [0.7, 0.4], [0.3, 0.4], [0.4, 0.3]])
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0])
    how = "sum_then_normalize"
    assert equal_responses(rewards, first, 2, how).tolist() == [True, True, False, False]
    assert equal_responses(rewards, second, 2, how).tolist() == [False] * 4


def test_the_last_update_of_an_epoch_is_the_mean_of_its_own_responses(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three micro-batches of four responses: the first two are one update, and the third is the other."""
    steps = {"steps_per_generation": 3, "gradient_accumulation_steps": 2}
    made = build(model, tmp_path, monkeypatch, max_steps=-1, num_train_epochs=1, **steps)
    sizes: list[int] = []
    monkeypatch.setattr(
        trainer,
        "tbpo_loss",
        lambda *tensors, global_batch_size: (
            sizes.append(global_batch_size)
            or tbpo_loss(*tensors, global_batch_size=global_batch_size)
        ),
    )
    made.train()
    assert sizes == [8, 8, 4] and made.state.global_step == 2


def test_gradients_of_micro_batches_are_summed_in_fp32(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF16 would round 1 + 2^-9 to 1."""
    made = build(model, tmp_path, monkeypatch)
    made.create_optimizer()
    for parameter in made.policy.model.parameters():
        parameter.sum().backward()
        (parameter * 2**-9).sum().backward()
        assert set(parameter.grad.flatten().tolist()) == {1 + 2**-9}


@pytest.mark.parametrize("loss_type", ["tbpo", "grpo"])
def test_the_metrics_have_the_names_of_the_other_backends(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    """Two optimizer steps for each rollout, so the second has ratios other than 1."""
    steps = {"steps_per_generation": 2, "max_steps": 2, "learning_rate": 1e-3, "logging_steps": 2}
    made = build(model, tmp_path, monkeypatch, length, loss_type=loss_type, **steps)
    made.train()
    (log,) = (entry for entry in made.state.log_history if "mismatch/k3" in entry)
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


def test_a_log_without_a_token_has_no_mismatch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No random response ends with EOS, so all are cut off and masked."""
    made = build(
        model, tmp_path, monkeypatch, length, mask_truncated_completions=True, logging_steps=1
    )
    made.train()
    assert not any("mismatch/k3" in entry for entry in made.state.log_history)


@pytest.mark.parametrize("loss", ["tbpo", "grpo"])
@pytest.mark.parametrize("interval", [1, 2])
def test_steps_whose_responses_are_all_masked(
    model: Path, tmp_path: Path, monkeypatch: Any, loss: str, interval: int
) -> None:
    """TRL masks truncated responses, and all of the stub's are: no step has a token, and nothing is learned."""
    made = build(
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
    before = {name: weight.clone() for name, weight in made.policy.model.named_parameters()}
    made.train()
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    assert len(steps) == 2 // interval
    assert all(entry["loss"] == 0 for entry in steps)
    assert not [name for entry in steps for name in entry if name.startswith("mismatch/")]
    assert made.evaluate(DATA)["eval_loss"] == 0
    assert all(
        torch.equal(weight, before[name]) for name, weight in made.policy.model.named_parameters()
    )


def test_the_noise_limit_waits_for_a_batch_with_tokens(
    model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    made = build(model, tmp_path, monkeypatch, wrong=3.0, mask_truncated_completions=True)
    made.train()
    assert made._step_metrics._noise_is_checked is False
