"""Every key of the config in verl: another value of it, and what that changes. A key without a row fails a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reach_rows import (
    EVALUATED,
    MATRIX,
    STEPS,
    W4A16,
    Observe,
    Refused,
    Row,
    Table,
    all_differ,
    each,
    moved,
    remembers,
    updates,
    written,
)
from reach_shared import SHARED, band, metric

from qarl.align.blocks import AlignedRMSNorm
from qarl.errors import UserError
from qarl.quant.linear import QuantLinear
from qarl.verl.keys import verl_keys


def on_gpus(key: str) -> Observe:
    """A key of verl's for which a CPU has one value."""
    return lambda run: verl_keys(run.config, False)[key]


def argument(name: str) -> Observe:
    """One of vLLM's arguments, from verl's server."""
    return lambda run: getattr(run.engine, name)


def sampling(name: str, validate: bool = False) -> Observe:
    """The values of one sampling parameter over the responses to a prompt."""
    return lambda run: {params[name] for params in run.sampled(validate)}


def fails(part: str) -> Observe:
    """Whether that part of verl ends with an error of ours."""

    def observe(run: Any) -> bool:
        try:
            getattr(run, part)
        except UserError:
            return True
        return False

    return observe


def steps(event: str) -> Observe:
    """At which steps verl's loop does it."""
    return lambda run: [step for what, step in run.events if what == event]


def prompts_in(first: int, count: int) -> Observe:
    return lambda run: {prompt[0] for prompt in run.prompts} <= set(range(first, first + count))


def train_rows(run: Any) -> int:
    return len(run.trainer.train_dataset)


def response_limit(run: Any) -> int:
    return run.server.config.response_length


def old_log_probs(run: Any) -> float:
    """Their mean."""
    return float(run.actor.columns.columns["old_log_probs"].values().mean())


def group_size(run: Any) -> int:
    return quantization(run)["config_groups"]["group_0"]["weights"]["group_size"]


def published(name: str) -> Observe:
    """Shapes of the tensors that verl's engine gives the rollout."""
    return lambda run: {key: shape for key, shape in run.published.items() if name in key}


def optimizer(run: Any) -> torch.optim.Optimizer:
    return run.actor.worker.actor.engine.optimizer


def muon_group(name: str) -> Observe:
    """A setting of the group of Muon's parameters."""
    return lambda run: next(group[name] for group in optimizer(run).param_groups if group["use_muon"])


def modules(kind: type) -> Observe:
    return lambda run: sum(isinstance(module, kind) for module in run.module.modules())


def family(run: Any) -> str:
    return str(type(run.module).__name__.removeprefix("FSDP"))


def quantization(run: Any) -> dict[str, Any]:
    return run.engine.hf_overrides["quantization_config"]


def update_seed(run: Any) -> int:
    return run.actor.columns.batch.extra_info["seed"]


def centred(run: Any) -> bool:
    """Whether advantages are rewards less their group's mean."""
    groups = run.actor.rewards.view(-1, 2)
    return torch.allclose(torch.tensor(run.actor.advantages), (groups - groups.mean(1, keepdim=True)).flatten())


VAL, OTHER_VAL = {"t43", "t44", "t45"}, {"t53", "t54", "t55"}
PATH = "runs/reach/checkpoints/global_step_"
MUON = {"optim.name": "muon"}

VERL: Table = SHARED | {
    "name": Row("other", lambda run: run.saved["path"], (f"{PATH}1", "runs/other/checkpoints/global_step_1")),
    "seed": Row(7, each(lambda run: run.prompts, argument("seed"), update_seed), all_differ),
    "backend": Row("local", lambda run: run.dispatched, ("verl", "local")),
    "output_dir": Row("there", lambda run: run.saved["path"], (f"{PATH}1", "there/reach/checkpoints/global_step_1")),
    "dry_run": Row(True, lambda run: run.dispatched, ("verl", "nothing")),
    "verl": Row({"trainer.val_only": True}, steps("step"), ([1], []), {"trainer.val_before_train": True}),
    "model.path": Row(
        "llama",
        each(family, lambda run: Path(run.engine.model).name),
        (["Qwen3ForCausalLM", "model"], ["LlamaForCausalLM", "llama"]),
    ),
    "model.dtype": Refused("fp16", "backend=verl trains in BF16"),
    "model.head_dtype": Row(
        "fp32",
        each(argument("hf_overrides"), lambda run: run.actor.worker.actor.engine._head.fp32, old_log_probs),
        lambda b, a: (
            (not b[0], b[1]) == (True, False)
            and a[0] == {"head_dtype": "float32"}
            and a[1]
            and 0 < abs(a[2] - b[2]) < 0.01
        ),
    ),
    "model.trust_remote_code": Row(True, argument("trust_remote_code"), (False, True)),
    "data.train_files": Row("other.parquet", each(prompts_in(3, 7), prompts_in(33, 7)), ([True, False], [False, True])),
    "data.val_files": Row("other_val.parquet", lambda run: run.first_words(run.trainer.val_dataset), (VAL, OTHER_VAL)),
    "data.train_batch_size": Row(6, each(lambda run: len(run.prompts), updates), ([4, 2], [6, 3])),
    "data.max_prompt_length": Row(
        3, each(argument("max_model_len"), train_rows), ([14, 7], [11, 5]), {"data.filter_overlong_prompts": True}
    ),
    "data.max_response_length": Row(5, each(argument("max_model_len"), response_limit), ([14, 8], [11, 5])),
    "data.shuffle": Row(False, lambda run: [prompt[0] for prompt in run.prompts] == [3, 4, 5, 6], (False, True)),
    "data.prompt_key": Row("question", lambda run: {prompt[-1] for prompt in run.prompts} == {63}, (False, True)),
    "data.filter_overlong_prompts": Row(True, train_rows, (7, 5), {"data.max_prompt_length": 3}),
    "reward.function": Row("rewards.py:length", lambda run: run.reward, (pytest.approx(1 / 3), 12.0)),
    "reward.timeout_s": Row(0.05, fails("reward"), (False, True), {"reward.function": "rewards.py:slow"}),
    "rollout.n": Row(3, lambda run: len(run.sampled()), (2, 3)),
    "rollout.temperature": Row(
        0.5,
        each(sampling("temperature"), old_log_probs, lambda run: metric("actor/seq_ratio_abs_dev_max")(run) < 1e-4),
        lambda b, a: (b[0], a[0]) == ({1.0}, {0.5}) and abs(b[1] - a[1]) > 0.05 and b[2] and a[2],
        {"optim.lr": 0.0},
    ),
    "rollout.top_p": Refused(0.5, "over the whole vocabulary"),
    "rollout.top_k": Refused(3, "over the whole vocabulary"),
    "rollout.val_temperature": Row(0.5, sampling("temperature", validate=True), ({0.0}, {0.5})),
    "rollout.max_num_seqs": Row(7, argument("max_num_seqs"), (256, 7)),
    "rollout.max_num_batched_tokens": Row(5000, argument("max_num_batched_tokens"), (8192, 5000)),
    "rollout.gpu_memory_utilization": Row(0.3, argument("gpu_memory_utilization"), (0.5, 0.3)),
    "rollout.cpu_kvcache_space_gib": Row(0.5, argument("kv_cache_memory_bytes"), (2**30, 2**29)),
    "rollout.enforce_eager": Row(True, on_gpus("actor_rollout_ref.rollout.enforce_eager"), (False, True)),
    "rollout.free_cache_engine": Row(False, on_gpus("actor_rollout_ref.rollout.free_cache_engine"), (True, False)),
    "rollout.tensor_model_parallel_size": Row(
        2, argument("tensor_parallel_size"), (1, 2), {"trainer.n_gpus_per_node": 2}
    ),
    "rollout.router_replay": Row(
        "off",
        each(argument("enable_return_routed_experts"), lambda run: run.actor.worker.actor.engine.quant.router_replay),
        ([True, "auto"], [False, "off"]),
        {"model.path": "moe"},
    ),
    "rollout.rebuild_on_failure": Refused(True, "backend=verl supports only"),
    "actor.use_kl_loss": Refused(True, "backend=verl supports only"),
    "actor.kl_loss_coef": Refused(2.0, "backend=verl supports only", {"actor.use_kl_loss": True}),
    "publish.delta": Row("off", lambda run: run.actor.worker.actor.engine.quant.publish_delta, ("auto", "off")),
    "quant.scheme": Row(
        "w4a16",
        each(modules(QuantLinear), argument("hf_overrides"), published("q_proj.weight_packed")),
        lambda b, a: b[0] == 0 and not b[1] and not b[2] and a[0] == 14 and a[1] and len(a[2]) == 2,
        {"quant.group_size": 32},
    ),
    "quant.group_size": Row(
        16,
        each(published("layers.0.self_attn.q_proj.weight_scale"), group_size),
        ([{MATRIX + "_scale": (128, 4)}, 32], [{MATRIX + "_scale": (128, 8)}, 16]),
        W4A16,
    ),
    "quant.kernels": Refused("qarl", "only to the engine of backend=local", {"quant.scheme": "w4a16"}),
    "quant.ignore": Row(
        ["lm_head", "re:.*down_proj"],
        each(published("down_proj.weight_packed"), modules(QuantLinear), lambda run: quantization(run)["ignore"]),
        lambda b, a: len(b[0]) == 2 and not a[0] and (b[1], a[1]) == (14, 12) and "re:.*down_proj" in a[2],
        W4A16,
    ),
    "quant.align": Row("off", each(modules(QuantLinear), modules(AlignedRMSNorm)), ([14, 5], [0, 0]), W4A16),
    "quant.mismatch_limit": Row(0.05, fails("actor"), (False, True), stub={"noise": 0.1}),
    "actor.old_log_probs": Row(
        "auto",
        lambda run: [type(run.trainer).__name__, run.trainer._quant["old_log_probs"]],
        (["QaRLTrainerSync", "rollout"], ["QaRLTrainerSync", "auto"]),
        {"actor.old_log_probs": "rollout", "actor.loss": "grpo"},
    ),
    "actor.old_log_probs_sample": Row(
        0.5, lambda run: run.trainer._quant["old_log_probs_sample"], (0.125, 0.5), {"actor.old_log_probs": "auto"}
    ),
    "actor.neg_seq_clip_ratio_high": band("neg_seq_clip_ratio_high", **{"actor.ppo_mini_batch_size": 1}),
    "algorithm.norm_adv_by_std_in_grpo": Row(False, centred, (False, True)),
    "optim.name": Row("muon", lambda run: type(optimizer(run)).__name__, ("AdamW", "MuonAdamW")),
    "optim.betas": [
        Row([0.5, 0.999], each(moved(0), moved(1)), remembers),
        Row([0.9, 0.5], each(moved(0), moved(1)), remembers),
    ],
    "optim.muon_lr": Row(0.03, each(metric("actor/muon_lr"), muon_group("lr")), ([0.02, 0.02], [0.03, 0.03]), MUON),
    "optim.muon_momentum": Row(0.5, muon_group("momentum"), (0.95, 0.5), MUON),
    "optim.master_dtype": Row(
        "bf16", lambda run: {p.dtype for p in run.module.parameters()}, ({torch.float32}, {torch.bfloat16})
    ),
    "trainer.nnodes": Row(2, lambda run: run.pools["global_pool"], ([1], [1, 1])),
    "trainer.n_gpus_per_node": Row(2, lambda run: run.pools["global_pool"], ([1], [2])),
    STEPS: Row(3, steps("step"), ([1], [1, 2, 3])),
    "trainer.test_freq": Row(2, steps("validate"), ([], [2, 4, 5]), {STEPS: 5}),
    "trainer.val_before_train": Row(True, steps("validate"), ([], [0, 1])),
    "trainer.val_max_prompts": Row(2, lambda run: len(run.trainer.val_dataset), (3, 2), EVALUATED),
    "trainer.logger": [
        Row(["tensorboard"], lambda run: "tensorboard" in run.ended["files"], (False, True)),
        Row(["console"], lambda run: "step 1/1" in run.ended["output"], (False, True)),
    ],
    "trainer.report": Row(False, lambda run: "report.html" in run.ended["files"], (True, False)),
    "trainer.plots": Row(True, lambda run: "plots" in run.ended["files"], (False, True)),
    "trainer.num_threads": Row(3, lambda run: run.environment["OMP_NUM_THREADS"], ("1", "3")),
    "trainer.save_final": Row(True, each(steps("save"), lambda run: run.ended["exports"]), ([[], 0], [[1], 1])),
    "trainer.save_minutes": Row(1e-9, steps("save"), ([], [1, 2]), {STEPS: 3}),
    "trainer.save_freq": Row(2, steps("save"), ([], [2, 3]), {STEPS: 3}),
    "trainer.max_ckpt_to_keep": Row(2, lambda run: run.saved["keep"], (None, 2)),
    "trainer.resume_mode": Row("disable", lambda run: run.resumed, (2, 0)),
    "trainer.resume_from_path": Row(
        f"{PATH}1",
        lambda run: run.resumed,
        (2, 1),
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": f"{PATH}2"},
    ),
}
ROWS = written(VERL)
