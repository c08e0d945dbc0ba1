"""Training on responses of older weights in verl: its keys, what is refused, the sampler, and a step's comparison."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from ranks import RAYS, run_ranks
from verl_runs import KWARGS, quickstart
from verl_stale_steps import SPOILT, STEPS

from qarl.config.errors import ConfigError
from qarl.errors import UserError
from qarl.verl.run import verl_config
from qarl.verl.sampler import StalePromptReplayBuffer
from qarl.verl.separate_checks import separate_conflicts
from qarl.verl.separate_keys import separate_keys
from qarl.verl.separate_trainer import QaRLTrainerSeparate
from qarl.verl.trainer import QaRLTrainer
from qarl.verl.versions import VersionStatistics, versions_to_keep

STALE: dict[str, Any] = {"trainer.staleness": 2}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each step of a run has seen."""
    folder = tmp_path_factory.mktemp("stale")
    (folder / "files").mkdir()
    run_ranks("verl_stale_steps.py", 1, folder / "files", folder / "steps.pt", **RAYS)
    return list(torch.load(folder / "steps.pt", weights_only=False))


def test_delta_is_that_of_the_version_that_sampled(steps: list[dict[str, Any]]) -> None:
    """0 in every bit, but for the one token that was changed."""
    assert len(steps) == STEPS
    for number, step in enumerate(steps, 1):
        metrics = step["metrics"]
        assert metrics["staleness/checked_frac"] == 1.0
        spoilt = number == SPOILT[0]
        assert (metrics["mismatch/of_version_abs_max"] > 0) == spoilt, number
        assert metrics["mismatch/of_version_abs_max"] < 1e-5


def test_the_ratio_is_that_between_versions(steps: list[dict[str, Any]]) -> None:
    for number, step in enumerate(steps, 1):
        metrics = step["metrics"]
        ratios = step["ratios"]
        assert metrics["staleness/ratio_abs_mean"] == pytest.approx(float(ratios.abs().mean()))
        k3 = float((ratios.exp() - 1 - ratios).mean())
        assert metrics["staleness/ratio_k3"] == pytest.approx(k3, rel=1e-6, abs=1e-12)
        assert (metrics["staleness/ratio_abs_mean"] > 1e-3) == (number > 1)


def test_ages_are_counted_from_the_weights_before_the_step(steps: list[dict[str, Any]]) -> None:
    for number, step in enumerate(steps, 1):
        ages = torch.tensor(step["ages"]).double()
        assert step["metrics"]["staleness/age_mean"] == pytest.approx(float(ages.mean()))
        assert step["metrics"]["staleness/age_max"] == min(number - 1, 2)
        assert step["metrics"]["staleness/mixed_frac"] == (0.375 if number > 1 else 0.0)


def test_old_log_probs_are_of_the_weights_before_the_step(steps: list[dict[str, Any]]) -> None:
    """Also in the second mini-batch, after an update: the weights that verl restores go through the quantized layers.
    verl's own copy would be the parameters' memory."""
    for step in steps:
        assert all(step["old"])
        assert all(step["moved"])


def test_verl_counts_otherwise() -> None:
    changes = {"optim.lr_warmup_steps": 3, "rollout.n_gpus_per_node": 2}
    keys = verl_config(quickstart(**STALE, **changes), on_cpu=True)
    separate = keys.trainer.v1
    assert separate.trainer_mode == "qarl_separate_async"
    assert separate.separate_async.num_warmup_batches == 2
    assert separate.separate_async.parameter_sync_step == 2  # 12 prompts, mini-batches of 6
    assert separate.sampler.max_off_policy_threshold == 3
    assert separate.sampler.max_off_policy_strategy == "wait"
    assert keys.actor_rollout_ref.actor.optim.lr_warmup_steps == 6
    assert keys.actor_rollout_ref.rollout.n_gpus_per_node == 2
    assert keys.ray_kwargs.ray_init.num_gpus == 3
    quant = keys.actor_rollout_ref.actor.fsdp_config.quant
    assert (quant.staleness, quant.old_log_probs) == (2, "recompute")


def test_staleness_0_is_the_synchronous_trainer() -> None:
    """Every key that engines of their own set has the value that it has in verl or in QaRL's synchronous trainer."""
    zero = verl_config(quickstart(**{"trainer.staleness": 0}), on_cpu=True)
    found = {
        key.removeprefix("+"): OmegaConf.select(zero, key.removeprefix("+"))
        for key in separate_keys(quickstart(**STALE), on_cpu=True)
    }
    sampler = "trainer.v1.sampler"
    assert found == {
        "trainer.v1.trainer_mode": "qarl_sync",
        "trainer.v1.separate_async.num_warmup_batches": 1,
        "trainer.v1.separate_async.parameter_sync_step": 4,
        f"{sampler}.max_off_policy_threshold": 8,
        f"{sampler}.max_off_policy_strategy": "drop",
        f"{sampler}.custom_sampler.path": "pkg://qarl.verl.trainer",
        f"{sampler}.custom_sampler.name": "PromptReplayBuffer",
        "actor_rollout_ref.hybrid_engine": True,
        f"{ROLLOUT}.nnodes": 0,
        f"{ROLLOUT}.n_gpus_per_node": 1,
        f"{ROLLOUT}.free_cache_engine": False,
        f"{ROLLOUT}.checkpoint_engine.backend": "naive",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module": None,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
        f"{SHARDS}.quant.old_log_probs": "auto",
        f"{SHARDS}.quant.staleness": None,
        "ray_kwargs.ray_init.num_cpus": 24,
        "ray_kwargs.ray_init.num_gpus": 1,
    }


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"backend": "local"}, "trainer.staleness"),
        ({"trainer.nnodes": 2}, "trainer.nnodes"),
        ({"rollout.tensor_model_parallel_size": 2}, "rollout.tensor_model_parallel_size"),
        ({"lora.r": 8}, "lora.r"),
        ({"rollout.environment": "a.py:b"}, "rollout.environment"),
        ({"rollout.stop": ["</answer>"]}, "rollout.stop"),
        ({"actor.old_log_probs": "rollout", "actor.loss": "grpo"}, "actor.old_log_probs"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        quickstart(**STALE, **changes)
    assert key in [problem.key for problem in caught.value.problems]


ROLLOUT = "actor_rollout_ref.rollout"
SHARDS = "actor_rollout_ref.actor.fsdp_config"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.filter_groups.enable", True),
        (f"{ROLLOUT}.free_cache_engine", True),
        (f"{ROLLOUT}.name", "sglang"),
        ("actor_rollout_ref.actor.use_kl_loss", True),
        ("algorithm.use_kl_in_reward", True),
        (f"{ROLLOUT}.nnodes", 2),
        (f"{ROLLOUT}.data_parallel_size", 2),
        ("trainer.v1.sampler.custom_sampler.name", "PromptReplayBuffer"),
        ("trainer.v1.sampler.custom_sampler.name", None),
        (f"{ROLLOUT}.checkpoint_engine.custom_backend_module", None),
        (f"{SHARDS}.param_offload", True),
        (f"{SHARDS}.reshard_after_forward", False),
        ("critic.enable", True),
    ],
)
def test_verls_keys_that_do_not_go_with_it_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        verl_config(quickstart(**STALE, verl={key: value}), on_cpu=True)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [(f"{SHARDS}.quant.old_log_probs", None), ("algorithm.adv_estimator", "gae")],
)
def test_on_verls_command_line(key: str, value: Any) -> None:
    """Without the key the actor would take `auto`."""
    composed = verl_config(quickstart(**STALE), on_cpu=True)
    assert list(separate_conflicts(composed)) == []
    OmegaConf.update(composed, key, value, force_add=True)
    assert [conflict.key for conflict in separate_conflicts(composed)] == [key]


@pytest.mark.parametrize(
    "key",
    [
        "trainer.v1.separate_async.num_warmup_batches",
        "trainer.v1.sampler.max_off_policy_threshold",
        "actor_rollout_ref.hybrid_engine",
        f"{ROLLOUT}.checkpoint_engine.backend",
        f"{ROLLOUT}.n_gpus_per_node",
    ],
)
def test_keys_with_a_key_of_qarl(key: str) -> None:
    with pytest.raises(UserError, match="QaRL has its own keys"):
        verl_config(quickstart(**STALE, verl={key: 1}), on_cpu=True)


def stale_buffer(
    monkeypatch: pytest.MonkeyPatch, strategy: str, state: dict[str, Any], staleness: int = 1
) -> Any:
    """The sampler over `state` in the place of TransferQueue."""
    refilled: list[int] = []
    arguments = {"trainer_mode": "separate_async", "max_off_policy_threshold": staleness + 1}
    buffer = StalePromptReplayBuffer(
        **KWARGS | arguments | {"max_off_policy_strategy": strategy, "refill_fn": refilled.append}
    )
    cleared: list[str] = []

    class Queue:
        @staticmethod
        def kv_list(*_: Any) -> Any:
            return {"train": {key: dict(tag) for key, tag in state.items()}}

        @staticmethod
        def kv_clear(*, keys: list[str], partition_id: str) -> None:
            cleared.extend(keys)
            for key in keys:
                state.pop(key, None)

    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.tq", Queue)
    monkeypatch.setattr(
        buffer, "_preemptions", type("None_", (), {"since_last": lambda self: None})()
    )
    return buffer, refilled, cleared


def group(uid: str, step: int, status: str = "finished") -> dict[str, Any]:
    prompt = {uid: {"is_prompt": True, "status": status, "global_steps": step}}
    return prompt | ({f"{uid}_0_0": {"response_len": 3}} if status == "finished" else {})


def test_drop_says_what_it_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At step 5 a prompt of step 3 is 2 steps old."""
    state = group("old", 3) | group("new", 4)
    buffer, refilled, cleared = stale_buffer(monkeypatch, "drop", state)
    with caplog.at_level("WARNING", "qarl.verl"):
        batch, metrics = buffer.sample(5, "train", 1)
    assert batch.keys == ["new_0_0"]
    assert refilled == [1] and "old_0_0" in cleared
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert "1 prompts were dropped" in caplog.text and "older than 1 steps" in caplog.text


def test_wait_waits_for_what_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished prompt is there, but one of the step before still runs and is as old as it may get."""
    state = group("lags", 4, "running") | group("new", 5)
    buffer, _, _ = stale_buffer(monkeypatch, "wait", state)
    polls: list[int] = []

    def poll(partition_id: str, last: float) -> float:
        polls.append(1)
        if len(polls) == 3:
            state.update(group("lags", 4))
        return last

    monkeypatch.setattr(buffer, "_wait_for_next_poll", poll)
    batch, metrics = buffer.sample(5, "train", 1)
    assert len(polls) == 3 and batch.keys == ["lags_0_0"]
    assert metrics["staleness/waited"] == 1.0
    assert buffer.sample(5, "train", 1)[1]["staleness/waited"] == 0.0


def test_all_versions_are_kept_that_wait_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts of the first weights, two of which lag until they must be used, and one of each later step."""
    staleness = 2
    state = group("a", 1) | group("b", 1, "running") | group("c", 1, "running")
    buffer, _, _ = stale_buffer(monkeypatch, "wait", state, staleness)
    keys = [buffer.sample(1, "train", 1)[0].keys]
    state.update(group("d", 2))
    keys.append(buffer.sample(2, "train", 1)[0].keys)
    state.update(group("b", 1) | group("c", 1) | group("e", 3))
    keys += [buffer.sample(step, "train", 1)[0].keys for step in (3, 4)]
    taken = [uid[0] for uids in keys for uid in uids]
    assert (taken[:2], sorted(taken[2:])) == (["a", "d"], ["b", "c"])
    oldest = 4 - 1  # sampled at step 1, used at step 4
    assert oldest > staleness
    assert versions_to_keep(staleness) == oldest + 1
    assert [versions_to_keep(count) for count in (0, 1)] == [1, 2]


@pytest.mark.parametrize("compared", [False, True])
def test_a_step_that_compares_nothing_says_nothing_of_the_limit(
    monkeypatch: pytest.MonkeyPatch, compared: bool
) -> None:
    """So it is in the first steps after a resume."""
    monkeypatch.setattr(QaRLTrainer, "_compute_metrics", lambda *_: None)
    trainer: Any = object.__new__(QaRLTrainerSeparate)
    trainer.config = OmegaConf.from_dotlist([f"{ROLLOUT}.temperature=1.0"])
    trainer.actor_rollout_wg = SimpleNamespace(over_limit=lambda *_: [None])
    trainer._versions = VersionStatistics()
    trainer._versions.add_rows([[(3, 2)]], current=4)
    if compared:
        trainer._versions.add_checked(*torch.zeros(3, 2))
    metrics: dict[str, Any] = {}
    trainer._compute_metrics(None, metrics)
    assert metrics["staleness/checked_frac"] == float(compared)
    assert metrics.get("mismatch/over_limit") == (0.0 if compared else None)


def test_a_step_that_computes_its_metrics_twice_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So does a step that is saved. The workers may be dead the second time."""
    monkeypatch.setattr(QaRLTrainer, "_compute_metrics", lambda *_: None)
    trainer: Any = object.__new__(QaRLTrainerSeparate)
    trainer.config = OmegaConf.from_dotlist([f"{ROLLOUT}.temperature=1.0"])
    trainer.global_steps = 4
    warnings = iter([["δ is too large", "δ is too large"]])
    trainer.actor_rollout_wg = SimpleNamespace(over_limit=lambda *_: next(warnings))
    trainer._versions = VersionStatistics()
    trainer._versions.add_rows([[(3, 2)]], current=4)
    trainer._versions.add_checked(*torch.eye(3, 2))
    for _ in range(2):
        metrics: dict[str, Any] = {}
        trainer._compute_metrics(None, metrics)
        assert metrics["mismatch/over_limit"] == 1.0
    assert caplog.messages == ["step 4: δ is too large"]


def test_the_sampler_is_for_verls_own_mode() -> None:
    with pytest.raises(UserError, match="trainer_mode=sync"):
        StalePromptReplayBuffer(**KWARGS)
