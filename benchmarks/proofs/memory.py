"""The memory plan (`qarl.checks.memory`) against the peak of real ranks: verl's FSDP2 engine on CPU with gloo."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.proofs.harness import Record, Row, on_ranks
from qarl.bench.model import Source, write_model
from qarl.checks.memory import estimate
from qarl.checks.model_size import ModelSize
from qarl.config import Config, build_config
from qarl.config.level import Level
from qarl.kernels.cpu.vllm_linears import VllmCpuWNA16Linear

RANKS = 2
PROMPT = 64
RESPONSE = 448
ROWS = 2
MICRO_BATCHES = 2
GROUP = 64
SIZES: dict[str, Row] = {
    "80M": {"hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 12},
    "160M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10},
}
SECONDS_BETWEEN_READINGS = 0.003
PHASES = ("old_log_prob", "update", "step")


def memory_plan(record: Record) -> None:
    """Predict the peak of each phase of a step with Muon, and measure it on two ranks; `ratio` is within 15%.

    A rank's peak is the largest anonymous memory (Linux' RssAnon, read every few milliseconds) over what it had before
    the model was built. Memory of mapped files is not counted: the kernel frees pages of libraries in between. The
    prediction is without vLLM, without what an engine keeps, and without the allowance for libraries.
    """
    os.environ |= {
        "VERL_PLATFORM": "cpu",
        "LOCAL_RANK": "0",
        "RAY_RAYLET_PID": "1",
        "RAY_JOB_ID": "01000000",
    }
    for size, changes in SIZES.items():
        if record.wants(name := f"{size} | fp32 | w4a16"):
            config = model_keys(changes)
            with tempfile.TemporaryDirectory() as folder:
                write_model(
                    Source(size, config), config["num_hidden_layers"], Path(folder) / "model"
                )
                every = on_ranks(measure_rank, RANKS, f"{folder}/model")
            row = predict(config)
            row["measured"] = {phase: max(peaks[phase] for peaks in every) for phase in PHASES}
            row["ratios"] = {
                phase: row["measured"][phase] / value for phase, value in row["predicted"].items()
            }
            row["ratio"] = max(row["measured"].values()) / max(row["predicted"].values())
            record.add(name, row, ok=1 / 1.15 <= row["ratio"] <= 1.15)


def model_keys(sizes: Row) -> Row:
    heads = sizes["hidden_size"] // 64
    return {
        "model_type": "qwen3",
        "vocab_size": 16384,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 64,
        "tie_word_embeddings": False,
    } | sizes


def run_config() -> Config:
    """Return the run that the measured steps are: a mini-batch a rank, `MICRO_BATCHES` of `ROWS` responses."""
    return build_config(
        {
            "name": "memory",
            "backend": "verl",
            "model": {"path": "random", "gradient_checkpointing": True},
            "data": {
                "train_files": "train.jsonl",
                "train_batch_size": RANKS * ROWS,
                "max_prompt_length": PROMPT,
                "max_response_length": RESPONSE,
            },
            "rollout": {"n": MICRO_BATCHES},
            "quant": {"scheme": "w4a16", "group_size": GROUP, "align": "linears"},
            "actor": {
                "ppo_mini_batch_size": RANKS * ROWS,
                "ppo_micro_batch_size_per_gpu": ROWS,
                "log_prob_micro_batch_size_per_gpu": ROWS,
            },
            "optim": {"name": "muon", "muon_lr": 1e-5, "master_dtype": "fp32"},
            "trainer": {
                "n_gpus_per_node": RANKS,
                "total_training_steps": 1,
                "val_before_train": False,
            },
        }
    )


def predict(config: Row) -> Row:
    size = ModelSize.from_config(config)
    kernels = dict.fromkeys(size.linears().values(), VllmCpuWNA16Linear)
    plan = estimate(size, run_config(), device="cpu", level=Level.LINEARS, kernels=kernels)
    elsewhere = ("vLLM", "libraries")
    counted = [part for part in plan.parts if not part.name.startswith(elsewhere)]
    return {
        "parameters": size.parameters,
        "parts": {part.name: part.bytes for part in counted},
        "predicted": {
            phase: sum(p.bytes for p in counted if phase in p.phases) for phase in PHASES
        },
    }


def anonymous() -> int:
    """Return the anonymous resident memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Phases:
    """Peaks of anonymous memory by phase, over the memory at the start. A thread reads it until the process ends."""

    def __init__(self) -> None:
        self.start, self.peaks = anonymous(), dict[str, int]()
        self._highest = self.start
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            self._highest = max(self._highest, anonymous())
            time.sleep(SECONDS_BETWEEN_READINGS)

    def end(self, name: str) -> None:
        now = anonymous()
        self.peaks[name] = max(
            self.peaks.get(name, 0), self._highest - self.start, now - self.start
        )
        self._highest = now


def measure_rank(folder: str) -> dict[str, int]:
    """One rank's program: load, a publish, and two steps; the second has moments from the start."""
    import torch
    import verl  # noqa: F401  registers its platform
    from verl.workers.config import FSDPActorConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.utils.losses import ppo_loss
    from vllm import _custom_ops  # noqa: F401  the engine's kernels are vLLM's

    from qarl.verl.config_classes import QaRLPolicyLossConfig

    settings = engine_settings(folder, run_config())
    wide: Row = {
        "seq_clip_ratio_high": 10.0,
        "neg_seq_clip_ratio_low": 1.0,
        "neg_seq_clip_ratio_high": 10.0,
    }
    actor = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode="seq-mean-token-mean",
        policy_loss=QaRLPolicyLossConfig(**wide), fsdp_config=settings["engine_config"],
    )  # fmt: skip
    torch.distributed.barrier()
    phases = Phases()
    engine = EngineRegistry.new(model_type="language_model", backend="fsdp2", **settings)
    engine.initialize()
    phases.end("load")
    step = engine.optimizer_step

    def optimizer_step() -> float:
        phases.end("update")
        norm: float = step()
        phases.end("step")
        return norm

    engine.optimizer_step = optimizer_step
    for _ in engine._outbox.stream(engine._wire_tensors(), version=0, receivers=[None]):
        pass
    phases.end("publish")
    rank = torch.distributed.get_rank()
    for _ in range(2):
        with engine.eval_mode():
            engine.infer_batch(batch(rank, entropies=True))
        phases.end("old_log_prob")
        with engine.train_mode():
            engine.train_batch(batch(rank), partial(ppo_loss, config=actor))
        engine.lr_scheduler_step()
    return phases.peaks


def engine_settings(folder: str, config: Config) -> dict[str, Any]:
    """Return the arguments of verl's engine, as a run of `config` would give them."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig

    from qarl.verl.config import optim_keys
    from qarl.verl.config_classes import QuantFSDPEngineConfig

    optim_settings = {key.rpartition(".")[2]: value for key, value in optim_keys(config).items()}
    quant = {name: getattr(config.quant, name) for name in ("scheme", "group_size", "align")}
    parts = ["model", "optimizer", "extra"]
    return {
        "model_config": HFModelConfig(
            path=folder,
            use_remove_padding=True,
            enable_gradient_checkpointing=True,
            override_config={"attn_implementation": "sdpa", "attention_dropout": 0.0},
        ),
        "engine_config": QuantFSDPEngineConfig(
            quant=quant | {"ignore": list(config.quant.ignore), "mismatch_limit": 100.0},
            strategy="fsdp2",
            use_torch_compile=False,
            model_dtype=config.optim.master_dtype,
            use_no_sync_for_gradient_accumulation=False,
        ),
        "optimizer_config": FSDPOptimizerConfig(**optim_settings, total_training_steps=10),
        "checkpoint_config": CheckpointConfig(save_contents=parts, load_contents=parts),
    }


def batch(rank: int, entropies: bool = False) -> Any:
    """Return verl's data of one rank: rows of full length, with old log-probs near those of a random model."""
    import torch
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(rank)
    length = PROMPT + RESPONSE
    rows = MICRO_BATCHES * ROWS
    ids = [torch.randint(3, 16000, (length,), generator=generator) for _ in range(rows)]
    likely = torch.full((RESPONSE,), -9.7)
    columns = {
        "input_ids": ids,
        "prompts": [row[:PROMPT] for row in ids],
        "responses": [row[PROMPT:] for row in ids],
        "position_ids": [torch.arange(length)] * rows,
        **{
            name: [torch.ones(RESPONSE, dtype=torch.long)] * rows
            for name in ("response_mask", "loss_mask")
        },
        "advantages": [torch.full((RESPONSE,), float(1 - 2 * (i % 2))) for i in range(rows)],
        "old_log_probs": [likely] * rows,
        "rollout_log_probs": [likely + 1e-3] * rows,
    }
    nested: dict[str, Any] = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        for name, values in columns.items()
    }
    data = tu.get_tensordict(nested, {})
    tu.assign_non_tensor(
        data, temperature=1.0, calculate_entropy=entropies, use_remove_padding=True, use_dynamic_bsz=False,
        use_fused_kernels=False, micro_batch_size_per_gpu=ROWS, global_batch_size=RANKS * rows, pad_token_id=2,
        update_lr_scheduler=True,
    )  # fmt: skip
    return data
