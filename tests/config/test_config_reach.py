"""Every key of the config reaches its consumer in the local backend and changes what it should.

A row gives a key another value, runs the trainer with the policy in vLLM's place (`reach_local`) and compares something
that the key is there for, before and after: an argument that vLLM got, the rows of a forward, how far a weight moved, a
file. A key without a row fails. test_config_reach_verl.py does the same for verl.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reach_local import Run, run
from reach_rows import (
    EVALUATED,
    MATRIX,
    MUON,
    OPEN,
    RESUME_PATH,
    RESUMED,
    STEPS,
    W4A16,
    Observe,
    Refused,
    Row,
    Table,
    all_differ,
    each,
    forwards,
    leaves,
    make_files,
    merged,
    moved,
    remembers,
    spectral_norm,
    tensors_close,
    updates,
    written,
)
from reach_shared import SHARED, band, metric

from qarl.align.cpu import AlignedRMSNorm
from qarl.config import ConfigError, build_config
from qarl.quant.linear import QuantLinear
from qarl.rollout.engine_config import llm_arguments

pytestmark = pytest.mark.long


def argument(name: str) -> Observe:
    """One of `vllm.LLM`'s arguments."""
    return lambda run: run.llms[0].arguments.get(name)


def spread(tensor: torch.Tensor) -> float:
    """Between the quantiles of 5% and 95%."""
    low, high = tensor.flatten().quantile(torch.tensor([0.05, 0.95]))
    return float(high - low)


def gpu_argument(name: str) -> Observe:
    """The same on a machine with a GPU."""

    def observe(run: Run) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            return llm_arguments(run.trainer.engine.config)[name]

    return observe


def sampling(name: str) -> Observe:
    """The values of a field of `SamplingParams` in the first rollout."""
    return lambda run: {getattr(params, name) for params in run.requests()[1]}


def steps_with(name: str) -> Observe:
    return lambda run: [entry["step"] for entry in run.metrics if name in entry]


def files(pattern: str) -> Observe:
    return lambda run: run.files(pattern)


def says(text: str) -> Observe:
    return lambda run: text in run.output


def published(name: str) -> Observe:
    return lambda run: {key: tuple(t.shape) for key, t in run.trainer.engine.published.items() if name in key}


def modules(kind: type) -> Observe:
    return lambda run: sum(isinstance(module, kind) for module in run.trainer.policy.model.modules())


def prompts_in(first: int, count: int, doing: str = "rollout") -> Observe:
    """Whether all prompts of a call begin with the tokens of one file."""
    return lambda run: {prompt[0] for prompt in run.prompts(doing)} <= set(range(first, first + count))


def centred(run: Run) -> bool:
    """Whether advantages are rewards less their group's mean."""
    batch = run.trainer.batches[0]
    groups = batch.rewards.view(-1, 2)
    return torch.allclose(batch.advantages, (groups - groups.mean(1, keepdim=True)).flatten(), atol=1e-6)


def muon_buffer(run: Run) -> float:
    states = run.trainer.optimizer.state_dict()["inner"]["state"].values()
    return sum(float(state["momentum_buffer"].norm()) for state in states if "momentum_buffer" in state)


def rounding_seed(run: Run) -> int:
    return int(run.trainer.optimizer.state_dict()["inner"]["param_groups"][0]["seed"])


def quantization(run: Run) -> dict[str, Any]:
    return run.llms[0].arguments["hf_overrides"]["quantization_config"]


def group_size(run: Run) -> int:
    return quantization(run)["config_groups"]["group_0"]["weights"]["group_size"]


UNMOVED = {"optim.lr": 0.0, "quant.align": "model"}
AGREE = (
    lambda run: metric("mismatch/abs_max")(run) < 0.02,
    lambda run: metric("actor/seq_ratio_abs_dev_max")(run) < 1e-3,
)
"""Trainer and engine have the same log-probs, and without learning the ratio stays 1."""
ONE_PROCESS = "one process on one device"

LOCAL: Table = SHARED | {
    "name": Row("other", lambda run: [p.name for p in run.folder.glob("runs/*")], (["reach"], ["other"])),
    "seed": Row(
        7,
        each(
            Run.prompts,
            sampling("seed"),
            lambda run: run.trainer.optimizer.state_dict()["inner"]["param_groups"][0]["seed"],
        ),
        all_differ,
        {"optim.master_dtype": "bf16"},
    ),
    "backend": Row("verl", says("# verl's own config for this run"), (False, True), {"dry_run": True}),
    "output_dir": Row("there", lambda run: (run.folder / "there/reach/metrics.jsonl").is_file(), (False, True)),
    "dry_run": Row(
        True,
        lambda run: (run.trainer is None, run.files("*.yaml")),
        ((False, ["config.yaml"]), (True, ["dry_run.yaml"])),
    ),
    "verl": Refused({"trainer.val_only": True}, "backend=local does not use"),
    "model.path": Row(
        "llama",
        each(argument("model"), lambda run: type(run.trainer.policy.model).__name__),
        (["model", "Qwen3ForCausalLM"], ["llama", "LlamaForCausalLM"]),
    ),
    "model.dtype": Row(
        "fp16",
        each(argument("dtype"), lambda run: run.trainer.policy.model.dtype),
        (["bfloat16", torch.bfloat16], ["float16", torch.float16]),
    ),
    "model.head_dtype": Row(
        "fp32",
        each(argument("hf_overrides"), lambda run: run.trainer.policy.fp32_head),
        ([None, False], [{"head_dtype": "float32"}, True]),
    ),
    "model.trust_remote_code": [
        Row(True, argument("trust_remote_code"), (False, True)),
        Row(True, lambda run: (run.folder / "own_code_ran").exists(), (False, True), {"model.path": "own_code"}),
    ],
    "data.train_files": Row("other.parquet", each(prompts_in(3, 7), prompts_in(33, 7)), ([True, False], [False, True])),
    "data.val_files": Row(
        "other_val.parquet",
        each(prompts_in(43, 3, "eval"), prompts_in(53, 3, "eval")),
        ([True, False], [False, True]),
        EVALUATED,
    ),
    "data.train_batch_size": Row(6, each(lambda run: len(run.prompts()), updates), ([8, 2], [12, 3])),
    "data.max_prompt_length": Row(
        3,
        each(argument("max_model_len"), lambda run: max(map(len, run.prompts()))),
        ([14, 4], [11, 3]),
        {"data.filter_overlong_prompts": True, "data.shuffle": False},
    ),
    "data.max_response_length": Row(
        5,
        each(argument("max_model_len"), sampling("max_tokens"), lambda run: run.trainer.batches[0].responses.shape[1]),
        ([14, {8}, 8], [11, {5}, 5]),
    ),
    "data.shuffle": Row(False, lambda run: [p[0] for p in run.prompts()[::2]] == [3, 4, 5, 6], (False, True)),
    "data.prompt_key": Row("question", lambda run: {p[-1] for p in run.prompts()} == {63}, (False, True)),
    "data.filter_overlong_prompts": Row(True, lambda run: run.code, (2, 0), {"data.max_prompt_length": 3}),
    "reward.function": Row("rewards.py:length", lambda run: metric("critic/score/min")(run) >= 10, (False, True)),
    "reward.timeout_s": Row(0.05, lambda run: run.code, (0, 2), {"reward.function": "rewards.py:slow"}),
    "rollout.n": Row(3, lambda run: [run.prompts().count(prompt) for prompt in run.prompts()], ([2] * 8, [3] * 12)),
    "rollout.temperature": Row(
        0.5,
        each(sampling("temperature"), *AGREE),
        ([{1.0}, True, True], [{0.5}, True, True]),
        UNMOVED,
    ),
    # The trainer follows both, in the old log-probs and in the update.
    "rollout.top_p": Row(0.5, each(sampling("top_p"), *AGREE), ([{1.0}, True, True], [{0.5}, True, True]), UNMOVED),
    "rollout.top_k": Row(3, each(sampling("top_k"), *AGREE), ([{0}, True, True], [{3}, True, True]), UNMOVED),
    "rollout.val_temperature": Refused(0.5, "one greedy response per prompt"),
    "rollout.max_num_seqs": Row(7, argument("max_num_seqs"), (256, 7)),
    "rollout.max_num_batched_tokens": Row(5000, argument("max_num_batched_tokens"), (4096, 5000)),
    "rollout.gpu_memory_utilization": Row(0.3, gpu_argument("gpu_memory_utilization"), (0.5, 0.3)),
    "rollout.cpu_kvcache_space_gib": Row(0.5, argument("kv_cache_memory_bytes"), (2**30, 2**29)),
    "rollout.enforce_eager": Row(
        False, each(argument("enforce_eager"), lambda run: run.llms[0].eager_helpers), ([True, True], [False, False])
    ),
    "rollout.free_cache_engine": Row(False, gpu_argument("enable_sleep_mode"), (True, False)),
    "rollout.tensor_model_parallel_size": Refused(2, ONE_PROCESS),
    # The stand-in says that all tokens had the same experts, so replayed log-probs are others than those it sampled by.
    "rollout.router_replay": Row(
        "off",
        each(lambda run: metric("mismatch/abs_max")(run) > 0.01, argument("enable_return_routed_experts")),
        ([True, True], [False, True]),
        {"model.path": "moe", "quant.mismatch_limit": 100.0},
    ),
    "rollout.rebuild_on_failure": Row(
        True, each(lambda run: run.code, lambda run: len(run.llms)), ([2, 1], [0, 2]), stub={"failures": 1}
    ),
    "actor.use_kl_loss": Row(
        True, lambda run: "actor/kl_loss" in run.metrics[-1], (False, True), {"actor.ppo_epochs": 2}
    ),
    "actor.kl_loss_coef": Row(
        1e3,
        metric("actor/grad_norm"),
        lambda b, a: a > 1.01 * b > 0,
        OPEN | {"actor.use_kl_loss": True, "actor.ppo_epochs": 2},
    ),
    "publish.delta": Row("off", lambda run: run.trainer.engine.config.delta, (True, False)),
    "quant.scheme": Row(
        "w4a16",
        each(
            modules(QuantLinear),
            argument("hf_overrides"),
            published("q_proj.weight_packed"),
            metric("publish/quantized_ratio"),
        ),
        lambda b, a: b == [0, None, {}, 1.0] and a[0] == 14 and len(a[2]) == 2 and a[1] and a[3] < 0.3,
        {"quant.group_size": 32},
    ),
    "quant.group_size": Row(
        16,
        each(published("layers.0.self_attn.q_proj.weight_scale"), group_size),
        ([{MATRIX + "_scale": (128, 4)}, 32], [{MATRIX + "_scale": (128, 8)}, 16]),
        W4A16,
    ),
    "quant.kernels": Row(
        "dequantized",
        each(
            argument("additional_config"),
            lambda run: {m.kernel.name for m in run.trainer.policy.model.modules() if isinstance(m, QuantLinear)},
        ),
        lambda b, a: (
            b[0] is None
            and b[1].isdisjoint(a[1])
            and a == [{"qarl_linears": ["dequantized", "w4a16"]}, {"dequantized"}]
        ),
        W4A16,
    ),
    "quant.ignore": Row(
        ["lm_head", "re:.*down_proj"],
        each(published("down_proj.weight_packed"), modules(QuantLinear), lambda run: quantization(run)["ignore"]),
        lambda b, a: len(b[0]) == 2 and not a[0] and (b[1], a[1]) == (14, 12) and "re:.*down_proj" in a[2],
        W4A16,
    ),
    "quant.align": Row(
        "off",
        each(modules(QuantLinear), modules(AlignedRMSNorm), lambda run: run.trainer.policy.align),
        ([14, 5, "model"], [0, 0, "off"]),
        W4A16,
    ),
    "quant.mismatch_limit": Row(0.05, lambda run: run.code, (0, 2), stub={"noise": 0.1}),
    "actor.old_log_probs": Row(
        "rollout", forwards("old_log_prob"), ([4, 4] * 2, [4, 4]), {STEPS: 2, "actor.loss": "grpo"}
    ),
    "actor.old_log_probs_sample": Row(
        0.5, lambda run: run.trainer.source.fraction, (0.125, 0.5), {"actor.old_log_probs": "auto"}
    ),
    # An update lowers most negative samples. Of many, some rise.
    "actor.neg_seq_clip_ratio_high": band("neg_seq_clip_ratio_high", **{"rollout.n": 8}),
    "algorithm.norm_adv_by_std_in_grpo": Row(False, centred, (False, True)),
    "optim.name": Row(
        "muon", lambda run: spectral_norm(moved(0)(run)), lambda b, a: 0.7 < a < 1.5 and b > 5, {"optim.muon_lr": 1e-2}
    ),
    "optim.betas": [
        Row([0.5, 0.999], each(moved(0), moved(1)), remembers),
        Row([0.9, 0.5], each(moved(0), moved(1)), remembers),
        Row(
            [0.0, 0.0],
            lambda run: spread(moved(1)(run).abs()),  # every weight moves by the rate, unless its gradient is 0
            lambda b, a: b > 1e-4 and a < 1e-6,
            {"optim.eps": 1e-30},
        ),
    ],
    "optim.muon_lr": Row(3e-2, moved(0), lambda b, a: tensors_close(a, 3 * b) and float(b.norm()) > 0, MUON),
    # One update: the buffer holds (1 - momentum) of the gradient.
    "optim.muon_momentum": Row(
        0.0, muon_buffer, lambda b, a: b == pytest.approx(0.05 * a) and b > 0, MUON | {"actor.ppo_mini_batch_size": 4}
    ),
    "optim.master_dtype": Row("bf16", lambda run: len(run.trainer.optimizer.state_dict()["masters"]), (25, 0)),
    "trainer.nnodes": Refused(2, ONE_PROCESS),
    "trainer.n_gpus_per_node": Refused(2, ONE_PROCESS),
    STEPS: Row(3, steps_with("actor/lr"), ([1], [1, 2, 3])),
    "trainer.test_freq": Row(2, steps_with("val/accuracy"), ([], [2, 4, 5]), {STEPS: 5}),
    "trainer.val_before_train": Row(True, steps_with("val/accuracy"), ([], [0, 1])),
    "trainer.val_max_prompts": Row(2, lambda run: len(run.prompts("eval")), (3, 2), EVALUATED),
    "trainer.logger": [
        Row(["tensorboard"], files("tensorboard"), ([], ["tensorboard"])),
        Row(["console"], says("step 1/1"), (False, True)),
    ],
    "trainer.report": Row(False, files("*.html"), (["report.html"], [])),
    "trainer.plots": Row(True, lambda run: bool(run.files("plots/*.png")), (False, True)),
    "trainer.num_threads": Row(
        3, lambda run: run.environment["OMP_NUM_THREADS"], ("1", "3"), {"trainer.num_threads": 1}
    ),
    "trainer.save_final": Row(True, files("export/*.safetensors"), ([], ["model.safetensors"])),
    "trainer.save_freq": Row(2, files("checkpoints/*"), ([], ["step_2", "step_3"]), {STEPS: 3}),
    "trainer.save_minutes": Row(1e-9, files("checkpoints/*"), ([], ["step_3"]), {STEPS: 3}),
    "trainer.max_ckpt_to_keep": Row(
        2, files("checkpoints/*"), (["step_1", "step_2", "step_3"], ["step_2", "step_3"]), RESUMED
    ),
    "trainer.resume_mode": Row(
        "disable", lambda run: len(run.trainer.batches), (1, 3), RESUMED, first={**RESUMED, STEPS: 2}
    ),
    "trainer.resume_from_path": Row(
        "runs/reach/checkpoints/step_1",
        lambda run: len(run.trainer.batches),
        (1, 2),
        RESUMED | RESUME_PATH,
        first={**RESUMED, STEPS: 2},
    ),
}


ROWS = written(LOCAL)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs by what they were given, made once. The collector is spared what was there before: engines collect."""
    folder = tmp_path_factory.mktemp("reach")
    make_files(folder / "files")
    gc.collect()
    gc.freeze()
    made: dict[str, Run] = {}

    def make(changes: dict[str, Any], row: Row, capsys: Any) -> Run:
        name = repr((changes, row.stub, row.first))
        if name not in made:
            here = folder / str(len(made))
            if row.first is not None:
                run(here, folder / "files", row.first, {}, capsys)
                (here / "runs/reach/summary.json").unlink()
            made[name] = run(here, folder / "files", changes, row.stub, capsys)
        return made[name]

    yield make
    gc.unfreeze()


def test_every_key_has_a_row():
    assert set(LOCAL) == leaves()


@pytest.mark.parametrize(("key", "row"), ROWS)
def test_a_key_changes_what_it_should(workshop, capsys, key, row):
    if isinstance(row, Refused):
        with pytest.raises(ConfigError) as caught:
            build_config(merged(**row.given | {key: row.value}))
        assert key in str(caught.value) and row.why in str(caught.value)
        return
    before = row.observe(workshop(row.given, row, capsys))
    after = row.observe(workshop(row.given | row.also | {key: row.value}, row, capsys))
    row.check(before, after)
