"""The Hydra groups that a verl user names on verl's own command line."""

from __future__ import annotations

import dataclasses

import pytest
import yaml
from checkout import ROOT
from verl_runs import NAMED, quickstart

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import PolicyLossConfig

from qarl.config.actor import RolloutCorrectionConfig
from qarl.config.objectives import objective_names
from qarl.errors import UserError
from qarl.kernels.cuda.layer_ops import ENGINE_ARGUMENTS
from qarl.objectives.settings import objective_settings
from qarl.schemes import scheme_names
from qarl.tbpo import TBPOConfig
from qarl.verl.check_before_ray import CheckBeforeRay
from qarl.verl.config import verl_keys
from qarl.verl.config_classes import actor_settings, tbpo_config
from qarl.verl.run import verl_config

pytestmark = pytest.mark.usefixtures("own_environment")


def flat(node: dict, prefix: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return leaves


@pytest.mark.parametrize("scheme", [name for name in scheme_names() if name != "w4a8"])
def test_hydra_groups_say_what_the_mapping_says(scheme):
    """The groups that a verl user names on verl's own command line."""
    group = composed(f"+qarl={scheme}", "+qarl_machine=cpu", "trainer.n_gpus_per_node=1")
    ours = quickstart(
        **{"quant.scheme": scheme, "quant.group_size": 128, "trainer.n_gpus_per_node": 1}
    )
    CheckBeforeRay().on_job_start(group, task_function=None)
    actor, rollout = group.actor_rollout_ref.actor, group.actor_rollout_ref.rollout
    assert (
        tbpo_config(omega_conf_to_dataclass(actor.policy_loss), actor.loss_agg_mode) == TBPOConfig()
    )
    overridable = set(actor.policy_loss) - {
        field.name for field in dataclasses.fields(PolicyLossConfig)
    }
    bands = {field.name for field in dataclasses.fields(TBPOConfig)} - {"loss_agg_mode"}
    assert overridable - {"_target_"} == bands | {"mis_imp_ratio_cap", "correction"}
    assert actor.policy_loss.correction == dict.fromkeys(RolloutCorrectionConfig.model_fields)
    assert omega_conf_to_dataclass(actor.fsdp_config).quant.align == ours.quant.align
    keys = verl_keys(ours, True)
    named = {key.removeprefix("+"): value for key, value in keys.items()}
    for key in ("fsdp_config._target_", "fsdp_config.quant.scheme", "strategy"):
        assert OmegaConf.select(actor, key) == named[f"actor_rollout_ref.actor.{key}"]
    assert (
        actor.kl_loss_type == named["actor_rollout_ref.actor.kl_loss_type"]
    )  # verl's own, low_var_kl, is biased
    for workers in (1, 2):  # the actor is told how many workers an engine has
        rollout.tensor_model_parallel_size = workers
        assert actor.fsdp_config.quant.tensor_model_parallel_size == workers
    rollout.tensor_model_parallel_size = 1
    for key in ("calculate_log_probs", "disable_log_stats"):
        assert rollout[key] == named[f"actor_rollout_ref.rollout.{key}"]
    vllm = OmegaConf.to_container(rollout.engine_kwargs.vllm, resolve=True)
    prefix = "actor_rollout_ref.rollout.engine_kwargs.vllm."
    settings = {
        key: value for key, value in vllm.items() if value is not None
    }  # verl drops the others
    resolved = verl_config(ours, on_cpu=True)
    assert settings == OmegaConf.to_container(
        OmegaConf.select(resolved, prefix.removesuffix(".")), resolve=True
    )
    machine = yaml.safe_load((ROOT / "qarl/verl/qarl_machine/cpu.yaml").read_text())
    assert (
        flat(machine)["actor_rollout_ref.actor.strategy"] == "fsdp2"
    )  # also without +qarl: verl's default is FSDP1
    for key, value in flat(machine).items():
        assert OmegaConf.select(resolved, key) == OmegaConf.select(group, key), (key, value)


SEARCH = "hydra.searchpath=[pkg://qarl.verl]"
FIXED = (SEARCH, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", *NAMED)


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*FIXED, *overrides])


@pytest.mark.parametrize("scheme", ["w4a16", "fp8"])
def test_on_gpus_the_group_gives_the_engine_what_the_level_needs(scheme):
    """But for the sizes of CUDA graphs, which follow from the number of requests."""
    prefix = "+actor_rollout_ref.rollout.engine_kwargs.vllm."
    ours = verl_keys(quickstart(**{"quant.align": "model", "quant.scheme": scheme}), False)
    vllm = OmegaConf.to_container(
        composed(f"+qarl={scheme}").actor_rollout_ref.rollout.engine_kwargs.vllm, resolve=True
    )
    for key, value in ENGINE_ARGUMENTS.items():
        assert vllm[key] == ours[prefix + key] == value
    assert vllm.get("additional_config") == ours.get(prefix + "additional_config")
    quant = composed(
        "+qarl=w4a16", "actor_rollout_ref.rollout.enforce_eager=true"
    ).actor_rollout_ref.actor.fsdp_config
    assert quant.quant.enforce_eager is True


@pytest.mark.parametrize("scheme", [name for name in scheme_names() if name != "w4a8"])
def test_the_machine_may_be_named_before_or_after_the_scheme(scheme):
    machine, others = "+qarl_machine=cpu", (f"+qarl={scheme}", "+qarl_loss=grpo")
    orders = [
        composed(*order)
        for order in ((*others, machine), (machine, *others), (others[0], machine, others[1]))
    ]
    first, *rest = [OmegaConf.to_container(config, resolve=True) for config in orders]
    assert all(other == first for other in rest)
    vllm = first["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]
    assert (vllm["compilation_config"], vllm["attention_config"]) == (None, None)  # verl drops both
    assert (
        first["trainer"]["device"] == "cpu" and first["transfer_queue"]["backend"]["SimpleStorage"]
    )


@pytest.mark.parametrize("loss", [name for name in objective_names() if name != "tbpo"])
def test_the_group_of_a_loss_says_what_the_mapping_says(loss):
    group = composed("+qarl=w4a16", f"+qarl_loss={loss}")
    ours = quickstart(**{"actor.loss": loss})
    settings = actor_settings(
        omega_conf_to_dataclass(group.actor_rollout_ref.actor), "seq-mean-token-mean"
    )
    wanted = objective_settings(ours)
    assert group.data.max_response_length > 1
    unused = {"loss_scale_factor": group.data.max_response_length, "tbpo": TBPOConfig()}
    assert settings == wanted.model_copy(update=unused)
    estimator = verl_keys(ours, True)["algorithm.adv_estimator"]
    assert group.algorithm.adv_estimator == (estimator if loss == "reinforce" else "gae")


def test_a_correction_can_be_set_on_verls_command_line():
    key = "actor_rollout_ref.actor.policy_loss.correction"
    overrides = [f"{key}.rollout_rs=[seq_sum_k3]", f"{key}.rollout_rs_threshold=[1]"]
    group = composed("+qarl=w4a16", "+qarl_loss=grpo", *overrides)
    settings = actor_settings(
        omega_conf_to_dataclass(group.actor_rollout_ref.actor), "seq-mean-token-mean"
    )
    assert settings.correction == RolloutCorrectionConfig(
        rollout_rs=["seq_sum_k3"], rollout_rs_threshold=[1]
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+qarl_loss=grpo", "+qarl=w4a16"], "it is ignored"),
        (["+qarl=w4a16", "+actor_rollout_ref.actor.policy_loss.objective=ppo"], "objective=ppo"),
    ],
)
def test_an_objective_that_would_be_ignored_is_refused(overrides, words):
    actor = composed(*overrides).actor_rollout_ref.actor
    with pytest.raises(Exception, match=words):
        omega_conf_to_dataclass(actor.policy_loss)


def test_a_sum_without_its_divisor_is_refused():
    override = "actor_rollout_ref.actor.loss_scale_factor=null"
    actor = omega_conf_to_dataclass(
        composed("+qarl=w4a16", "+qarl_loss=grpo", override).actor_rollout_ref.actor
    )
    with pytest.raises(UserError, match="loss_scale_factor"):
        actor_settings(actor, "seq-mean-token-sum-norm")


SECTION = "actor_rollout_ref.actor.fsdp_config.quant"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
VERLS_RECEIVER = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
# Keys of verl's that contradict the group of the scheme, and words of the error besides the first key.
CONTRADICTIONS = [
    (
        {f"{SECTION}.scheme": "w8a8"},
        (f"{ENGINE}.hf_overrides.quantization_config", "weights.num_bits=4", "=w8a8"),
    ),
    ({f"{SECTION}.scheme": "bf16"}, ("gives nothing quantized, but", "weights.num_bits=4")),
    (
        {f"{ENGINE}.hf_overrides.quantization_config.config_groups.group_0.weights.group_size": 64},
        ("group_size=64",),
    ),
    ({f"{ENGINE}.hf_overrides.quantization_config.ignore": []}, (f"{SECTION}.ignore=['lm_head']",)),
    ({f"+{ENGINE}.hf_overrides.head_dtype": "float32"}, (f"{SECTION}.head_dtype=model",)),
    (
        {f"{SECTION}.kernels": "qarl"},
        ("would run different kernels", "additional_config.qarl_linears=[qarl,w4a16]"),
    ),
    ({f"{SECTION}.tensor_model_parallel_size": 4}, ("actor_rollout_ref.rollout makes it",)),
    ({f"{ENGINE}.worker_extension_cls": None}, ("no receiver",)),
    ({f"{ENGINE}.worker_extension_cls": VERLS_RECEIVER}, ("no receiver",)),
    ({"actor_rollout_ref.rollout.calculate_log_probs": False}, ("policy_loss.loss_mode=tbpo",)),
    ({"actor_rollout_ref.actor.strategy": "fsdp"}, ("set it to fsdp2",)),
    ({"algorithm.rollout_correction.bypass_mode": True}, ("TBPO would see no mismatch",)),
    (
        {"actor_rollout_ref.actor.policy_loss.seq_clip_ratio_high": -1},
        ("loss_mode=tbpo is not valid",),
    ),
    (
        {
            "+trainer.save_minutes": 5,
            f"+{SECTION}.old_log_probs": "recompute",
            "trainer.v1.trainer_mode": "sync",
        },
        ("save_minutes=5",),
    ),
    (
        {f"+{SECTION}.old_log_probs": "auto", "trainer.v1.trainer_mode": "sync"},
        ("old_log_probs=auto",),
    ),
]


@pytest.mark.parametrize(("keys", "words"), CONTRADICTIONS)
def test_a_contradiction_is_refused_before_ray_starts_through_both_doors(keys, words, capsys):
    overrides = [f"{key}={'null' if value is None else value}" for key, value in keys.items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer", overrides=[*FIXED, "+qarl=w4a16", *overrides], return_hydra_config=True
        )
    with pytest.raises(SystemExit) as ended:  # Hydra only warns of other exceptions of a callback
        instantiate(config.hydra.callbacks.qarl).on_job_start(config, task_function=None)
    text = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    with pytest.raises(UserError) as refused:
        verl_config(quickstart(verl=keys), on_cpu=False)
    for message in (text, " ".join(str(refused.value).split())):
        assert [word for word in (*words, *keys_in(keys)) if word not in message] == [], message


def keys_in(keys: dict[str, object]) -> list[str]:
    """The first key, as an error names it: parts of the engine's settings are compared together."""
    key = next(iter(keys)).removeprefix("+").partition(".config_groups")[0].removesuffix(".ignore")
    return [key.replace(f"{ENGINE}.hf_overrides.head_dtype", f"{SECTION}.head_dtype")]


def test_hydra_finds_the_groups_without_a_warning():
    """`python -m verl.trainer.main_ppo 'hydra.searchpath=[...]'` warns of a package that it cannot list."""
    from hydra._internal.core_plugins.importlib_resources_config_source import (
        ImportlibResourcesConfigSource,
    )

    for package in ("qarl.verl", "pkg://qarl.verl"):
        source = ImportlibResourcesConfigSource(
            provider="qarl", path=f"pkg://{package.removeprefix('pkg://')}"
        )
        assert source.available() and source.is_config("qarl/w4a16")


def test_the_groups_are_in_the_package_that_is_built():
    import tomllib

    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "qarl/verl").rglob("*.yaml")}
    globs = [
        (package.replace(".", "/"), glob)
        for package, many in tools["package-data"].items()
        for glob in many
    ]
    packaged = {
        path.relative_to(ROOT).as_posix()
        for folder, glob in globs
        for path in (ROOT / folder).glob(glob)
    }
    assert len(files) == 13 and files <= packaged
    modules = [path.parent.relative_to(ROOT) for path in ROOT.glob("qarl/**/__init__.py")]
    assert {path.as_posix().replace("/", ".") for path in modules} <= set(tools["packages"])
