"""The memory plan (`qarl.checks.memory`) against the peak of real ranks: verl's FSDP2 engine on CPU with gloo.

    OMP_NUM_THREADS=1 python scripts/memory_plan.py --output result.json

Each row is a random model of the given size on two ranks. In a process of its own each rank builds the engine, encodes
a publish, computes old log-probs with entropies, and makes an update with Muon in two micro-batches, as a run does. A
rank's peak is the largest anonymous memory during a phase (Linux' RssAnon, read every few milliseconds) minus what it
had before the model was built: Python, torch, vLLM, verl and the process group. Memory of mapped files is not counted,
because the kernel frees pages of libraries in between. The prediction is the estimate without vLLM, without what an
engine keeps, and without the allowance for libraries. `ratio` is measured by predicted.

Rows of an existing output file are kept, unless they are measured again; their predictions are computed again. `commit`
is that of the measurement. glibc keeps small freed blocks, which a GPU's
allocator would use again; MALLOC_ settings make it return them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

RANKS, PROMPT, RESPONSE, ROWS, MICRO_BATCHES = 2, 64, 448, 2, 2
SIZES: dict[str, dict[str, Any]] = {
    "80M": {"hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 12, "vocab_size": 16384},
    "160M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "vocab_size": 16384},
    "moe": {
        "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 16384,
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True,
    },
}  # fmt: skip
GROUP = 64
SECONDS_BETWEEN_READINGS = 0.003
PHASES = ("old_log_prob", "update", "step")


def run_config(master: str, scheme: str) -> Any:
    """The run that the measured steps are: one mini-batch a rank, `MICRO_BATCHES` micro-batches of `ROWS` responses."""
    from qarl.config import build_config

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
            "quant": {"scheme": scheme, "group_size": GROUP, "align": "linears"},
            "actor": {
                "ppo_mini_batch_size": RANKS * ROWS,
                "ppo_micro_batch_size_per_gpu": ROWS,
                "log_prob_micro_batch_size_per_gpu": ROWS,
            },
            "optim": {"name": "muon", "muon_lr": 1e-5, "master_dtype": master},
            "trainer": {"n_gpus_per_node": RANKS, "total_training_steps": 1, "val_before_train": False},
        }
    )


def model_config(sizes: dict[str, Any]) -> Any:
    import transformers

    kind: Any = transformers.Qwen3MoeConfig if "num_experts" in sizes else transformers.Qwen3Config
    heads = sizes["hidden_size"] // 64
    return kind(
        **sizes, num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=64, tie_word_embeddings=False
    )


def make_model(folder: Path, sizes: dict[str, Any]) -> Path:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = model_config(sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(sizes["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t2").save_pretrained(folder)
    return folder


def predict(name: str, master: str, scheme: str) -> dict[str, Any]:
    from qarl.checks.memory import estimate
    from qarl.checks.memory_terms import Part
    from qarl.checks.model_size import ModelSize

    size = ModelSize.from_config(model_config(SIZES[name]))
    config = run_config(master, scheme)
    kernels = dict.fromkeys(size.linears().values(), "vllm_cpu_wna16" if scheme == "w4a16" else "")
    found = estimate(size, config, device="cpu", align="linears", kernels=kernels)
    elsewhere = ("vLLM", "libraries", "kept for delta publishes: engine")
    counted: list[Part] = [part for part in found.parts if not part.name.startswith(elsewhere)]
    return {
        "parameters": size.parameters,
        "parts": {part.name: part.bytes for part in counted},
        "predicted": {phase: sum(p.bytes for p in counted if phase in p.phases) for phase in PHASES},
    }


def anonymous() -> int:
    """The anonymous resident memory of this process, in bytes."""
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
        self.peaks[name] = max(self.peaks.get(name, 0), self._highest - self.start, now - self.start)
        self._highest = now


def measure_rank(rank: int, port: str, folder: Path, master: str, scheme: str, output: Path) -> None:
    """One rank's program. Rank 0 writes the peaks of all ranks."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"VERL_PLATFORM": "cpu", "LOCAL_RANK": "0", "RAY_RAYLET_PID": port, "RAY_JOB_ID": "01000000"}
    import torch
    import verl  # noqa: F401  registers its platform
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    torch.distributed.init_process_group("cpu:gloo", rank=rank, world_size=RANKS)
    config = run_config(master, scheme)
    settings = engine_settings(folder, config)
    from verl.workers.engine import EngineRegistry
    from vllm import _custom_ops  # noqa: F401  the engine's kernels are vLLM's

    torch.distributed.barrier()
    phases = Phases()
    engine = EngineRegistry.new(model_type="language_model", backend="fsdp2", **settings)
    engine.initialize()
    phases.end("load")
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-mean",
        policy_loss=tbpo(),
        fsdp_config=settings["engine_config"],
    )
    step = engine.optimizer_step

    def optimizer_step() -> float:
        phases.end("update")
        norm: float = step()
        phases.end("step")
        return norm

    engine.optimizer_step = optimizer_step
    for _ in engine._outbox.stream(engine._wire_tensors(), version=0, held=[None]):
        pass
    phases.end("publish")
    for _ in range(2):  # the second step has moments from the start
        with engine.eval_mode():
            engine.infer_batch(batch(rank, entropies=True))
        phases.end("old_log_prob")
        with engine.train_mode():
            engine.train_batch(batch(rank), partial(ppo_loss, config=actor))
        engine.lr_scheduler_step()
    every: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(every, {"start": phases.start, "peaks": phases.peaks})
    if rank == 0:
        output.write_text(json.dumps(every))
    torch.distributed.destroy_process_group()


def tbpo() -> Any:
    from qarl.verl.plugin.config import TBPOPolicyLossConfig

    wide: dict[str, Any] = {"seq_clip_ratio_high": 10.0, "neg_seq_clip_ratio_low": 1.0, "neg_seq_clip_ratio_high": 10.0}
    return TBPOPolicyLossConfig(**wide)


def engine_settings(folder: Path, config: Any) -> dict[str, Any]:
    """The arguments of verl's engine, as a run of `config` would give them."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig

    from qarl.verl.keys import optim_keys
    from qarl.verl.plugin.config import QuantFSDPEngineConfig

    given = {key.rpartition(".")[2]: value for key, value in optim_keys(config).items()}
    quant = {name: getattr(config.quant, name) for name in ("scheme", "group_size", "align")}
    parts = ["model", "optimizer", "extra"]
    return {
        "model_config": HFModelConfig(
            path=str(folder),
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
        "optimizer_config": FSDPOptimizerConfig(**given, total_training_steps=10),
        "checkpoint_config": CheckpointConfig(save_contents=parts, load_contents=parts),
    }


def batch(rank: int, entropies: bool = False) -> Any:
    """verl's data of one rank: rows of full length, with old log-probs near those of a random model."""
    import torch
    from verl.utils import tensordict_utils as tu

    random = torch.Generator().manual_seed(rank)
    length, rows = PROMPT + RESPONSE, MICRO_BATCHES * ROWS
    ids = [torch.randint(3, 16000, (length,), generator=random) for _ in range(rows)]
    likely = torch.full((RESPONSE,), -9.7)
    columns = {
        "input_ids": ids,
        "prompts": [row[:PROMPT] for row in ids],
        "responses": [row[PROMPT:] for row in ids],
        "position_ids": [torch.arange(length)] * rows,
        **{name: [torch.ones(RESPONSE, dtype=torch.long)] * rows for name in ("response_mask", "loss_mask")},
        "advantages": [torch.full((RESPONSE,), float(1 - 2 * (i % 2))) for i in range(rows)],
        "old_log_probs": [likely] * rows,
        "rollout_log_probs": [likely + 1e-3] * rows,
    }
    nested: dict[str, Any] = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()
    }
    data = tu.get_tensordict(nested, {})
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=entropies,
        use_remove_padding=True,
        use_dynamic_bsz=False,
        use_fused_kernels=False,
        micro_batch_size_per_gpu=ROWS,
        global_batch_size=RANKS * rows,
        pad_token_id=2,
        update_lr_scheduler=True,
    )
    return data


def measure(name: str, master: str, scheme: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder, output = make_model(Path(temporary) / "model", SIZES[name]), Path(temporary) / "peaks.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, "-W", "ignore", __file__, "--output", str(output), "--model", str(folder)]
        command += ["--masters", master, "--scheme", scheme, "--port", port, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(RANKS)]
        if any(rank.wait(timeout=3600) for rank in ranks):
            raise SystemExit(f"a rank of {name} failed")
        every = json.loads(output.read_text())
    row = {"model": name, "masters": master, "scheme": scheme, "imports": [one["start"] for one in every]}
    return row | {"measured": {phase: max(one["peaks"][phase] for one in every) for phase in PHASES}}


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """Return `row` with the prediction and its ratios."""
    row |= predict(row["model"], row["masters"], row["scheme"])
    row["ratio"] = max(row["measured"].values()) / max(row["predicted"].values())
    row["ratios"] = {phase: row["measured"][phase] / value for phase, value in row["predicted"].items()}
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), help=f"of {', '.join(SIZES)}; none: only predict")
    parser.add_argument("--masters", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is not None:
        measure_rank(given.rank, given.port, given.model, given.masters[0], given.scheme, given.output)
        return 0
    from qarl.checkpoint.json_file import write_json
    from qarl.metrics.tracker import write_versions

    with tempfile.TemporaryDirectory() as folder:
        versions = json.loads(write_versions(folder).read_text())
    rows = json.loads(given.output.read_text())["rows"] if given.output and given.output.exists() else []
    for name in given.sizes:
        for master in given.masters:
            rows = [row for row in rows if (row["model"], row["masters"]) != (name, master)]
            rows.append(compared(measure(name, master, given.scheme) | {"commit": versions["git_commit"]}))
            shown = {key: rows[-1][key] for key in ("model", "masters", "predicted", "measured", "ratio")}
            print(json.dumps(shown), flush=True)
    rows = [compared(row) for row in rows]
    good = all(1 / 1.15 <= row["ratio"] <= 1.15 for row in rows)
    if given.output:
        date = datetime.date.today().isoformat()
        found = {"date": date, "versions": versions, "ranks": RANKS, "rows": rows, "within_15_percent": good}
        write_json(given.output, found)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
