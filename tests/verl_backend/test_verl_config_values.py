"""Our config as verl's: every key arrives, is refused, or is tested elsewhere."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from checkout import ROOT
from random_models import save_random_model
from reach_objectives import OBJECTIVES
from verl_runs import quickstart

from qarl.config import describe_keys
from qarl.errors import UserError
from qarl.verl.checks import refuse_unsupported
from qarl.verl.keys import worker_environment
from qarl.verl.run import differences, verl_config

pytest.importorskip("verl")

from omegaconf import OmegaConf

pytestmark = pytest.mark.usefixtures("own_environment")

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))

POLICY_LOSS, QUANT, OPTIM = f"{ACTOR}.policy_loss", f"{ACTOR}.fsdp_config.quant", f"{ACTOR}.optim"

VLLM = f"{ROLLOUT}.engine_kwargs.vllm"

REWARD = "reward.custom_reward_function"

W4A16 = f"{VLLM}.hf_overrides.quantization_config"

SAME: list[tuple[str, str, dict[str, object]]] = [
    ("data", "data", {"train_batch_size": 24, "shuffle": False, "prompt_key": "a", "filter_overlong_prompts": True}),
    ("model", MODEL, {"path": "org/other", "use_remove_padding": False}),
    ("rollout", ROLLOUT, {"n": 4, "max_num_seqs": 128, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.6}),
    ("actor", ACTOR, {"ppo_mini_batch_size": 12, "ppo_micro_batch_size_per_gpu": 12, "ppo_epochs": 2}),
    ("actor", ROLLOUT, {"log_prob_micro_batch_size_per_gpu": 16}),
    ("actor", POLICY_LOSS, {"seq_clip_ratio_high": 0.51, "seq_clip_ratio_low": 0.52, "neg_seq_clip_ratio_low": 0.53}),
    ("actor", POLICY_LOSS, {"neg_seq_clip_ratio_high": 0.54, "seq_tis_imp_ratio_cap": 3.0, "band_scaling": "length"}),
    ("actor", POLICY_LOSS, {"mismatch_outside_cap": "drop", "positive_band": "two_sided", "band_reference_length": 50}),
    ("algorithm", "algorithm", {"norm_adv_by_std_in_grpo": False}),
    ("quant", QUANT, {"align": "off"}),
    ("optim", OPTIM, {"lr": 1e-3, "betas": [0.8, 0.9], "weight_decay": 0.1, "lr_warmup_steps": 3}),
    ("optim", OPTIM, {"lr_scheduler_type": "constant", "min_lr_ratio": 0.2}),
    ("trainer", "trainer", {"total_training_steps": 60, "test_freq": 30, "val_before_train": False, "save_freq": 10}),
    ("trainer", "trainer", {"save_minutes": 5, "resume_mode": "disable"}),
]
"""Our section, verl's, and another value for each key of the same name."""

MAPPED: dict[str, tuple[object, dict[str, object]]] = {
    f"{ours}.{name}": (value, {f"{verls}.{name}": value}) for ours, verls, keys in SAME for name, value in keys.items()
} | {
    "name": ("other", {"trainer.experiment_name": "other"}),
    "seed": (
        7,
        dict.fromkeys(
            ("data.seed", f"{ROLLOUT}.seed", f"{ACTOR}.data_loader_seed", f"{ACTOR}.fsdp_config.seed"),
            7,
        ),
    ),
    "output_dir": (
        "elsewhere",
        {"trainer.default_local_dir": str(ROOT / "elsewhere" / "quickstart_verl" / "checkpoints")},
    ),
    "model.trust_remote_code": (True, {f"{MODEL}.trust_remote_code": True, "data.trust_remote_code": True}),
    "model.gradient_checkpointing": (True, {f"{MODEL}.enable_gradient_checkpointing": True}),
    "data.train_files": (["a.parquet"], {"data.train_files": [str(ROOT / "a.parquet")]}),
    "data.val_files": (["b.parquet"], {"data.val_files": [str(ROOT / "b.parquet")]}),
    "data.max_prompt_length": (33, {"data.max_prompt_length": 33, f"{ROLLOUT}.max_model_len": 33 + 80}),
    "data.max_response_length": (81, {"data.max_response_length": 81, f"{ROLLOUT}.max_model_len": 32 + 81}),
    "reward.function": (
        "math_verify",
        {
            f"{REWARD}.path": "pkg://qarl.verl.plugin.reward",
            f"{REWARD}.name": "score",
            f"{REWARD}.reward_kwargs": {"function": "math_verify", "timeout_s": 60.0},
        },
    ),
    "reward.timeout_s": (None, {f"{REWARD}.reward_kwargs": {"function": "arithmetic", "timeout_s": None}}),
    "rollout.temperature": (0.9, {f"{ROLLOUT}.temperature": 0.9, f"{ROLLOUT}.top_p": 1.0}),
    "rollout.val_temperature": (
        0.5,
        {f"{ROLLOUT}.val_kwargs.temperature": 0.5, f"{ROLLOUT}.val_kwargs.do_sample": True},
    ),
    "rollout.cpu_kvcache_space_gib": (2.0, {f"{VLLM}.kv_cache_memory_bytes": 2**31}),
    "rollout.tensor_model_parallel_size": (
        2,
        {
            f"{ROLLOUT}.tensor_model_parallel_size": 2,
            f"{QUANT}.tensor_model_parallel_size": 2,
            f"{VLLM}.distributed_executor_backend": "mp",
        },
    ),
    "quant.scheme": ("fp8", {f"{QUANT}.scheme": "fp8", f"{W4A16}.config_groups.group_0.weights.type": "float"}),
    "quant.group_size": (
        64,
        {f"{QUANT}.group_size": 64, f"{W4A16}.config_groups.group_0.weights.group_size": 64},
    ),
    "quant.ignore": (
        ["lm_head", "re:.*down_proj"],
        {f"{QUANT}.ignore": ["lm_head", "re:.*down_proj"], f"{W4A16}.ignore": ["lm_head", "re:.*down_proj"]},
    ),
    "actor.grad_clip": (0.5, {f"{ACTOR}.grad_clip": 0.5, f"{OPTIM}.clip_grad": 0.5}),
    "optim.name": (
        "muon",
        {
            f"{OPTIM}.optimizer": "MuonAdamW",
            f"{OPTIM}.override_optimizer_config": {"eps": 1e-8, "seed": 0, "muon_lr": 0.02, "muon_momentum": 0.95},
        },
    ),
    "optim.master_dtype": (
        "bf16",
        {
            f"{OPTIM}.optimizer_impl": "qarl.optim.optimizer",
            f"{OPTIM}.override_optimizer_config": {"eps": 1e-8, "seed": 0},
            f"{ACTOR}.fsdp_config.model_dtype": "bf16",
        },
    ),
    "optim.eps": (1e-6, {f"{OPTIM}.override_optimizer_config": {"eps": 1e-6}}),
    "trainer.nnodes": (2, {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 1}),
    "trainer.n_gpus_per_node": (2, {"trainer.n_gpus_per_node": 2, "ray_kwargs.ray_init.num_gpus": 2}),
    "publish.delta": ("off", {f"{QUANT}.publish_delta": "off"}),
    "trainer.val_max_prompts": (100, {"data.val_max_samples": 100}),
    "trainer.num_threads": (3, {"ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS": "3"}),
    "trainer.save_final": (False, {"trainer.save_freq": -1}),
    "trainer.max_ckpt_to_keep": (2, {"trainer.max_actor_ckpt_to_keep": 2}),
}
"""Every key of ours that verl is given: another value, and what verl's config holds then."""

BY_TOKENS = {
    "use_dynamic_bsz": True,
    "ppo_max_token_len_per_gpu": 300,
    "log_prob_max_token_len_per_gpu": 500,
}
ROWS = {f"actor.{name}_micro_batch_size_per_gpu": None for name in ("ppo", "log_prob")}

ROWS_OF_REACH = ("model.dtype", "model.head_dtype", "actor.old_log_probs", "actor.old_log_probs_sample")

ELSEWHERE = {
    **dict.fromkeys((*OBJECTIVES, *ROWS_OF_REACH), "has a row in tests/config/test_config_reach_verl.py"),
    **{f"actor.{key}": "tested below: they go together" for key in BY_TOKENS},
    "backend": "which function is called",
    "rollout.router_replay": "tested below: it depends on the model",
    "rollout.enforce_eager": "tested below: it is false only on GPUs",
    "rollout.free_cache_engine": "has a row in tests/support/reach_verl_rows.py: it is true only on GPUs",
    "dry_run": "qarl.train",
    "trainer.logger": "our own tracker follows verl's file logger",
    "trainer.plots": "drawn from metrics.jsonl",
    "trainer.report": "written from the run folder; an environment variable asks the workers for samples",
    "quant.mismatch_limit": "qarl.metrics.guard looks at verl's metrics",
    "trainer.resume_from_path": "tested below, with resume_mode",
    "verl": "tested below",
    "actor.kl_loss_coef": "without actor.use_kl_loss it has no effect, and that key is refused",
}

REFUSED = {
    "rollout.rebuild_on_failure": True,
    "actor.use_kl_loss": True,
    "quant.kernels": "qarl",
    "rollout.top_p": 0.8,
    "rollout.top_k": 20,
}

ALSO = {
    "rollout.tensor_model_parallel_size": {"trainer.n_gpus_per_node": 2},
    "actor.seq_clip_ratio_low": {"actor.positive_band": "two_sided"},
    "actor.band_reference_length": {"actor.band_scaling": "length"},
}
"""What else a key needs in order to act."""

ONLY_WITH_MUON = {"optim.muon_lr": 3e-3, "optim.muon_momentum": 0.8}


def test_no_key_of_ours_is_left_out():
    leaves = {key for key in describe_keys() if not any(other.startswith(f"{key}.") for other in describe_keys())}
    assert leaves == set(MAPPED) | set(ELSEWHERE) | set(REFUSED) | set(ONLY_WITH_MUON)


@pytest.mark.parametrize("key", MAPPED)
def test_every_value_arrives_in_verls_config(key):
    value, expected = MAPPED[key]
    with_default = ALSO.get(key, {})
    resolved = verl_config(quickstart(**with_default, **{key: value}), on_cpu=True)
    plain = resolved_quickstart(*with_default.items())
    assert {name: selected(resolved, name) for name in expected} == expected
    assert any(selected(plain, name) != selected(resolved, name) for name in expected)


def test_micro_batches_by_tokens_arrive_in_verls_config():
    """The limit for log-probs is by default the one for the update, as in verl's own config."""
    tokens = {f"actor.{key}": value for key, value in BY_TOKENS.items()}
    for given, log_probs in ((500, 500), (None, 300)):
        resolved = verl_config(
            quickstart(**ROWS | tokens | {"actor.log_prob_max_token_len_per_gpu": given}), on_cpu=True
        )
        actor, rollout = resolved.actor_rollout_ref.actor, resolved.actor_rollout_ref.rollout
        assert (actor.use_dynamic_bsz, rollout.log_prob_use_dynamic_bsz) == (True, True)
        assert (actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu) == (300, log_probs)
        assert resolved.actor_rollout_ref.model.use_remove_padding is True
    plain = resolved_quickstart()
    assert plain.actor_rollout_ref.actor.use_dynamic_bsz is False


@pytest.mark.parametrize("key", ONLY_WITH_MUON)
def test_every_value_of_muon_arrives(key):
    resolved = verl_config(quickstart(**{"optim.name": "muon", key: ONLY_WITH_MUON[key]}), on_cpu=True)
    found = selected(resolved, f"{OPTIM}.override_optimizer_config")
    assert found[key.removeprefix("optim.")] == ONLY_WITH_MUON[key]


@lru_cache
def resolved_quickstart(*changes: tuple[str, object]) -> object:
    return verl_config(quickstart(**dict(changes)), on_cpu=True)


def selected(config: object, key: str) -> object:
    found = OmegaConf.select(config, key)
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


@pytest.mark.parametrize("key", REFUSED)
def test_what_verl_lacks_is_refused_by_name(key):
    with pytest.raises(UserError, match=key):
        refuse_unsupported(quickstart(**{key: REFUSED[key]}))


def test_a_cpu_never_compiles():
    """Its workers have TORCHDYNAMO_DISABLE, with which vLLM cannot compile."""
    config = quickstart(**{"rollout.enforce_eager": False})
    for on_cpu in (True, False):
        assert verl_config(config, on_cpu=on_cpu).actor_rollout_ref.rollout.enforce_eager is on_cpu
        assert ("TORCHDYNAMO_DISABLE" in worker_environment(config, on_cpu)) is on_cpu
        assert ("enforce_eager=false becomes true here" in " ".join(differences(config, on_cpu))) is on_cpu


GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("level", ["off", "linears", "model"])
def test_engines_on_gpus_compile_where_the_trainer_follows_none_of_their_operators(scheme, level):
    """As in the local backend (tests/rollout/test_gpu.py): vLLM's default for W4A16 and BF16 below `model`."""
    config = quickstart(**{"quant.scheme": scheme, "quant.align": level})
    wanted = None if scheme in ("bf16", "w4a16") and level != "model" else GRAPHS
    engine = verl_config(config, on_cpu=False).actor_rollout_ref.rollout.engine_kwargs.vllm
    assert engine.get("compilation_config") == wanted


def test_engines_capture_graphs_unless_they_are_eager():
    for asked, on_cpu, wanted in (
        (None, False, GRAPHS),
        (False, False, GRAPHS),
        (True, False, None),
        (None, True, None),
    ):
        resolved = verl_config(quickstart(**{"rollout.enforce_eager": asked}), on_cpu=on_cpu).actor_rollout_ref
        rollout = resolved.rollout
        assert rollout.engine_kwargs.vllm.get("compilation_config") == wanted
        assert rollout.enforce_eager is (wanted is None)
        assert on_cpu or resolved.actor.fsdp_config.quant.enforce_eager is rollout.enforce_eager
        assert rollout.free_cache_engine is not on_cpu


def test_engines_on_gpus_have_one_split_only_where_the_trainer_follows_it(tmp_path, monkeypatch):
    """`quant.align` is `model` in all of them."""

    def one_split(**changes) -> bool:
        rollout = verl_config(quickstart(**changes), on_cpu=False).actor_rollout_ref.rollout
        return "attention_config" in rollout.engine_kwargs.vllm

    assert one_split()
    assert not one_split(**{"trainer.n_gpus_per_node": 2, "rollout.tensor_model_parallel_size": 2})
    assert not one_split(**{"model.path": str(save_random_model(tmp_path, "qwen3_moe")), "quant.group_size": 32})
    assert one_split(**{"model.path": str(tmp_path / "missing")}), "the checks of a run refuse it"
    for capability, level in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert one_split() is level
