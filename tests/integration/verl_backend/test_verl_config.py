"""Our config as verl's: verl's schema accepts it, and the run follows it. The arguments of
engines and workers that follow from several keys: compilation, graphs, splits, tokens."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest
import torch
import yaml
from checkout import ROOT
from random_models import save_random_model
from verl_runs import quickstart

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)

from qarl.config import describe_keys, load_config
from qarl.errors import UserError
from qarl.rollout.engine_config import capture_sizes
from qarl.trainer.master_optimizer import lr_scale
from qarl.verl.config import verl_keys
from qarl.verl.environment import (
    LONGEST_SOCKET,
    SOCKET,
    TEMP_DIR,
    check_sockets,
    worker_environment,
)
from qarl.verl.keys import OWN_KEYS, STOPS, environment_keys
from qarl.verl.run import dry_run, verl_config

pytestmark = pytest.mark.usefixtures("own_environment")

VERL_CONFIGS = sorted(
    path.name
    for path in (ROOT / "configs").glob("*.yaml")
    if yaml.safe_load(path.read_text()).get("backend") == "verl"
)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("name", VERL_CONFIGS)
def test_shipped_configs_resolve_against_verls_schema(name, on_cpu):
    config = load_config([f"config={name}"])
    resolved = verl_config(config, on_cpu=on_cpu)
    mode = "tbpo" if config.actor.loss == "tbpo" else "qarl"
    assert resolved.actor_rollout_ref.actor.policy_loss.loss_mode == mode
    assert (
        resolved.actor_rollout_ref.actor.use_kl_loss is False
        and resolved.algorithm.use_kl_in_reward is False
    )


def test_workers_get_the_environment_where_ray_runs_already(monkeypatch):
    """As verl merges it, in verl/trainer/main_ppo.py."""
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    config = quickstart()
    resolved = verl_config(config, on_cpu=True)
    merged = OmegaConf.merge(
        get_ppo_ray_runtime_env(resolved), resolved.ray_kwargs.ray_init.runtime_env
    )
    variables = OmegaConf.to_container(merged, resolve=True)["env_vars"]
    assert variables["VERL_FILE_LOGGER_PATH"] == str((config.run_dir / "verl.jsonl").resolve())
    assert variables["VERL_PLATFORM"] == "cpu" and variables["OMP_NUM_THREADS"] == "1"
    assert variables["VLLM_CPU_ATTN_SPLIT_KV"] == "1"  # the user's
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in variables  # verl's
    assert all(isinstance(value, str) for value in variables.values())
    mine = verl_config(
        quickstart(verl={"+ray_kwargs.ray_init.runtime_env.env_vars.NCCL_ALGO": "Ring"}),
        on_cpu=False,
    )
    variables = mine.ray_kwargs.ray_init.runtime_env.env_vars
    assert (
        variables.NCCL_ALGO == "Ring"
        and "VERL_FILE_LOGGER_PATH" in variables
        and "VERL_PLATFORM" not in variables
    )


def test_threads_are_shared_on_a_cpu_and_rays_own_on_gpus(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    config = quickstart(**{"trainer.num_threads": None, "trainer.n_gpus_per_node": 4})
    assert worker_environment(config, True)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in worker_environment(config, False)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dry_run_says_that_the_level_falls_back(workers, startable_run):
    changes = {"trainer.n_gpus_per_node": 2, "rollout.tensor_model_parallel_size": workers}
    text = dry_run(quickstart(**{"model.path": str(startable_run / "model"), **changes}))
    note = "# note: quant.align=model falls back to linears: model: rollout.tensor_model_parallel_size=2: each worker"
    assert (note in text) == (workers == 2)


def test_keys_of_verls_own_are_passed_on_and_unknown_ones_are_not():
    nested = {
        "actor_rollout_ref": {"rollout": {"ignore_eos": True}},
        "+trainer.extra": 1,
        "trainer.val_only": True,
    }
    resolved = verl_config(quickstart(verl=nested), on_cpu=True)
    assert resolved.actor_rollout_ref.rollout.ignore_eos is True
    assert resolved.trainer.extra == 1 and resolved.trainer.val_only is True
    with pytest.raises(UserError, match=r"verl\.trainer\.total_step"):
        verl_config(quickstart(verl={"trainer.total_step": 1}), on_cpu=True)
    on_command_line = load_config(
        ["config=quickstart_verl.yaml", "verl.actor_rollout_ref.rollout.top_k=40"]
    )
    assert on_command_line.verl == {"actor_rollout_ref.rollout.top_k": 40}
    with pytest.raises(UserError, match="backend=local does not use"):
        load_config(["config=quickstart.yaml", "verl.trainer.val_only=true"])


CORRECTION, ACTOR = "algorithm.rollout_correction", "actor_rollout_ref.actor"
REFUSED = [
    ("actor_rollout_ref.rollout.top_p", 0.9),
    ("actor_rollout_ref.rollout.top_k", 20),
    ("actor_rollout_ref.rollout.temperature", 0.005),
    ("+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype", "fp8"),
    ("trainer.v1.trainer_mode", "separate_async"),
    ("trainer.use_v1", False),
    ("trainer.logger", ["console"]),
    ("trainer.max_actor_ckpt_to_keep", 1),
    (f"{CORRECTION}.bypass_mode", True),
    (f"{CORRECTION}.rollout_is", "token"),
    (f"{ACTOR}.ulysses_sequence_parallel_size", 2),
    (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 2),
    (f"{ACTOR}.fsdp_config.offload_policy", True),
    (f"{ACTOR}.fsdp_config.qat.enable", True),
    ("actor_rollout_ref.model.lora_rank", 8),
    ("actor_rollout_ref.model.use_fused_kernels", True),
    ("actor_rollout_ref.model.enable_activation_offload", True),
]
UNEXPORTED = [
    ("trainer.save_freq", -1),
    ("trainer.default_local_dir", "/elsewhere"),
    (f"{ACTOR}.checkpoint.save_contents", ["hf_model"]),
]


@pytest.mark.parametrize(("key", "value"), REFUSED + UNEXPORTED)
def test_keys_of_the_section_verl_that_qarl_cannot_use_are_refused_by_name(key, value):
    with pytest.raises(UserError, match="cannot be used") as caught:
        verl_config(quickstart(verl={key: value}), on_cpu=True)
    assert caught.value.where.endswith(
        key.removeprefix("+").replace("fsdp_config.ulysses", "ulysses")
    )


@pytest.mark.parametrize(
    ("verl", "more"),
    [
        ({f"{CORRECTION}.bypass_mode": True, f"{ACTOR}.policy_loss.loss_mode": "gspo"}, {}),
        ({"trainer.logger": ["file", "wandb"]}, {}),
        *(({key: value}, {"trainer.save_final": False}) for key, value in UNEXPORTED),
    ],
)
def test_what_qarl_can_use_is_not_refused(verl, more):
    assert verl_config(quickstart(verl=verl, **more), on_cpu=True)


@pytest.mark.parametrize(
    ("word", "fix"), [("no", "write false"), ("On", "write true"), ("", "write true or false")]
)
def test_a_word_is_no_boolean_of_verl(word, fix):
    """YAML 1.2 reads `no` as text, and verl asks `if config.trainer.val_only`."""
    with pytest.raises(UserError, match="and not true or false") as caught:
        verl_config(quickstart(verl={"trainer.val_only": word}), on_cpu=True)
    assert caught.value.where == "verl.trainer.val_only" and caught.value.fix == fix


def test_an_interpolation_counts_as_its_value(monkeypatch):
    """`oc.env` gives a text, which verl would take for true; `oc.decode` and other keys give a boolean."""
    monkeypatch.setenv("QARL_TEST_WORD", "false")

    def value(text: str) -> bool:
        config = quickstart(verl={"trainer.val_only": text})
        return verl_config(config, on_cpu=True).trainer.val_only

    assert value("${oc.decode:${oc.env:QARL_TEST_WORD}}") is False
    assert value("${data.shuffle}") is True
    with pytest.raises(UserError, match="is the text 'false', and not true or false"):
        value("${oc.env:QARL_TEST_WORD}")
    with pytest.raises(UserError, match="has no value"):
        value("${oc.env:QARL_TEST_NOTHING}")


def test_a_run_on_a_cpu_starts_its_own_ray():
    """Also where RAY_ADDRESS names one, or one runs: neither accepts num_cpus."""
    ours = verl_config(quickstart(), on_cpu=True).ray_kwargs.ray_init
    assert ours.address == "local" and ours.num_cpus
    assert "address" not in verl_config(quickstart(), on_cpu=False).ray_kwargs.ray_init


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_that_is_too_long_for_rays_sockets(monkeypatch, name):
    """The longest that is allowed has room for the longest name that Ray's own check accepts."""
    from ray._private.utils import validate_socket_filepath

    for variable in ("TMPDIR", "RAY_TMPDIR", "RAY_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    config = quickstart()
    appended = f"/ray{SOCKET}"
    longest = "/" + "x" * (LONGEST_SOCKET - len(appended) - 1)
    monkeypatch.setenv(name, longest)
    check_sockets(config, on_cpu=True)
    validate_socket_filepath(longest + appended)
    monkeypatch.setenv(name, f"{longest}x")
    with pytest.raises(UserError, match="too long for Ray") as caught:
        check_sockets(config, on_cpu=False)
    assert name in caught.value.where and "RAY_TMPDIR" in caught.value.fix
    with pytest.raises(OSError, match="cannot exceed"):
        validate_socket_filepath(f"{longest}x{appended}")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_sockets(config, on_cpu=False)
    with pytest.raises(UserError):
        check_sockets(config, on_cpu=True)


@pytest.mark.parametrize("added", ["", "+"])
def test_rays_own_folder_counts_in_place_of_the_temporary_one(monkeypatch, added):
    """Ray appends no `ray` to it (`Node._init_temp`)."""
    from ray._private.utils import validate_socket_filepath

    monkeypatch.setenv("RAY_TMPDIR", "/" + "x" * LONGEST_SOCKET)
    longest = "/" + "y" * (LONGEST_SOCKET - len(SOCKET) - 1)
    check_sockets(quickstart(verl={f"{added}{TEMP_DIR}": longest}), on_cpu=True)
    validate_socket_filepath(longest + SOCKET)
    with pytest.raises(UserError, match="too long for Ray") as caught:
        check_sockets(quickstart(verl={f"{added}{TEMP_DIR}": f"{longest}y"}), on_cpu=True)
    assert caught.value.where == f"verl.{TEMP_DIR}"


@pytest.mark.parametrize("key", environment_keys())
def test_an_environment_has_no_keys_of_verls_loops_beside_it(key):
    """Both sections set the same key of verl, and the section `verl` would win without a word."""
    environment = {"rollout.environment": "qarl.demo.calculator:answer"}
    run = quickstart(**environment, verl={key: None})
    with pytest.raises(UserError, match="but QaRL has its own keys for that") as caught:
        verl_config(run, on_cpu=True)
    assert caught.value.where == f"verl.{key}" and environment_keys()[key] in caught.value.fix


@pytest.mark.parametrize("key", OWN_KEYS)
def test_what_qarl_has_a_key_for_is_not_set_in_the_section_verl(key):
    """What QaRL checked, and the steps by which it tells a finished run, would be those of another run."""
    composed = verl_config(quickstart(), on_cpu=True)
    assert OmegaConf.select(composed, key, throw_on_missing=True) is not None or (
        key.endswith("path") or key.startswith(STOPS)  # verl has no such keys
    )
    for sign in ("", "+"):
        with pytest.raises(UserError, match="but QaRL has its own keys for that") as caught:
            verl_config(
                quickstart(verl={f"{sign}{key}": OmegaConf.select(composed, key)}), on_cpu=True
            )
        assert caught.value.where == f"verl.{sign}{key}" and OWN_KEYS[key] in caught.value.fix
    assert OWN_KEYS[key] in describe_keys()


@pytest.mark.parametrize(
    "key", ["algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups"]
)
def test_what_verls_sampler_alone_can_do_leaves_it_in_place(key):
    sampler = verl_config(quickstart(), on_cpu=True).trainer.v1.sampler
    assert sampler.custom_sampler.name == "PromptReplayBuffer"
    sampler = verl_config(quickstart(verl={key: True}), on_cpu=True).trainer.v1.sampler
    assert sampler.custom_sampler.path is None and sampler.custom_sampler.name is None


def test_what_verls_own_checks_say_is_an_error_of_ours():
    with pytest.raises(UserError, match="verl refuses the configuration"):
        verl_config(quickstart(verl={"actor_rollout_ref.rollout.mode": "sync"}), on_cpu=True)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rates_are_those_of_the_local_backend(schedule, warmup):
    lowest = {"optim.min_lr_ratio": 0.1} if schedule == "cosine" else {}
    config = quickstart(
        **{"optim.lr_scheduler_type": schedule, "optim.lr_warmup_steps": warmup, **lowest}
    )
    keys = verl_keys(config, True)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    steps, optim = keys["trainer.total_training_steps"], "actor_rollout_ref.actor.optim"
    warmup_steps, ratio = keys[f"{optim}.lr_warmup_steps"], keys[f"{optim}.min_lr_ratio"]
    scheduler = get_constant_schedule_with_warmup(optimizer, warmup_steps)
    if schedule == "cosine":
        scheduler = get_cosine_schedule_with_warmup(optimizer, warmup_steps, steps, ratio)
    for step in range(steps):
        assert scheduler.get_last_lr()[0] == pytest.approx(
            lr_scale(step, config.optim, steps), rel=1e-12
        )
        optimizer.step()
        scheduler.step()
    assert lr_scale(steps + 5, config.optim, steps) == pytest.approx(
        1.0 if schedule == "constant" else 0.1
    )


def test_reward_functions_are_found_by_verl():
    from verl.trainer.ppo.reward import get_custom_reward_fn

    for function in (
        "arithmetic",
        "qarl.data.rewards:arithmetic",
        f"{ROOT}/qarl/data/rewards.py:arithmetic",
    ):
        resolved = verl_config(quickstart(**{"reward.function": function}), on_cpu=True)
        reward = get_custom_reward_fn(resolved)
        arguments = {"data_source": "x", "ground_truth": "12", "extra_info": {}}
        assert asyncio.run(reward(solution_str="5+7=12", **arguments)) == 1.0


def test_functions_with_other_letters_are_found_by_verl(tmp_path):
    """Names of metrics are ASCII, those of functions any that Python allows."""
    from verl.trainer.ppo.reward import get_custom_reward_fn

    file = tmp_path / "own.py"
    file.write_text("def größe(solution_str, **_): return len(solution_str)")
    functions = [{"function": f"{file}:größe", "weight": 0.5}, {"function": "arithmetic"}]
    resolved = verl_config(quickstart(**{"reward.functions": functions}), on_cpu=True)
    arguments = {"data_source": "x", "ground_truth": "3", "extra_info": {}}
    outcome = asyncio.run(get_custom_reward_fn(resolved)(solution_str="12", **arguments))
    assert outcome["score"] == 1.0 and outcome["rewards/größe"] == 2.0


def test_a_cpu_never_compiles():
    """Its workers have TORCHDYNAMO_DISABLE, with which vLLM cannot compile."""
    config = quickstart(**{"rollout.enforce_eager": False})
    for on_cpu in (True, False):
        assert verl_config(config, on_cpu=on_cpu).actor_rollout_ref.rollout.enforce_eager is on_cpu
        assert ("TORCHDYNAMO_DISABLE" in worker_environment(config, on_cpu)) is on_cpu


GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("level", ["off", "linears", "model"])
def test_engines_on_gpus_compile_where_the_trainer_follows_none_of_their_operators(scheme, level):
    """As in the local backend (test_gpu_sharing.py): vLLM's default for W4A16 and BF16 below `model`."""
    config = quickstart(**{"quant.scheme": scheme, "quant.align": level})
    wanted = None if scheme in ("bf16", "w4a16") and level != "model" else GRAPHS
    rollout = verl_config(config, on_cpu=False).actor_rollout_ref.rollout
    if scheme == "fp8" and level == "model":
        wanted = GRAPHS | capture_sizes(65, rollout.max_num_seqs)
    assert rollout.engine_kwargs.vllm.get("compilation_config") == wanted


def test_engines_capture_graphs_unless_they_are_eager():
    for asked, on_cpu in ((None, False), (False, False), (True, False), (None, True)):
        wanted = None if asked or on_cpu else GRAPHS
        resolved = verl_config(
            quickstart(**{"rollout.enforce_eager": asked}), on_cpu=on_cpu
        ).actor_rollout_ref
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
    experts = {
        "model.path": str(save_random_model(tmp_path, "qwen3_moe")),
        "quant.group_size": 32,
        "quant.ignore": ["lm_head", "re:.*[.]mlp[.]gate$"],
    }
    assert not one_split(**experts)  # Marlin's tokens depend on each other
    assert one_split(**experts, **{"quant.kernels": "qarl"})
    assert one_split(**{"model.path": str(tmp_path / "missing")}), "the checks of a run refuse it"
    for capability, level in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        properties = SimpleNamespace(name="a GPU", total_memory=80 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda capability=capability: capability
        )
        assert one_split() is level


@pytest.mark.parametrize(
    ("on_cpu", "changes", "asked"),
    [
        (True, {}, None),
        (True, {"quant.scheme": "w4a8"}, {"qarl_linears": ["qarl", "w4a8"]}),
        (False, {}, {"qarl_linears": ["qarl", "w4a16"], "qarl_followed": True}),
        (False, {"quant.align": "linears"}, {"qarl_linears": ["qarl", "w4a16"]}),
    ],
)
def test_both_sides_get_the_kernels_of_the_config(on_cpu, changes, asked):
    """The engine by an entry of vLLM's `additional_config`, the actor by its settings."""
    if asked:
        changes = changes | {"quant.kernels": "qarl"}
    resolved = verl_config(quickstart(**changes), on_cpu=on_cpu).actor_rollout_ref
    assert resolved.rollout.engine_kwargs.vllm.get("additional_config") == asked
    quant = resolved.actor.fsdp_config.quant
    assert quant.kernels == ("qarl" if asked else "engine")
