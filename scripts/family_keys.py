"""Every accepted family with every optional key of its config class away from its default, and pairs of rotary keys.

    python scripts/family_keys.py --output benchmarks/results/family_keys_cpu.json

Each row of `family_rows.py` is a config.json in a folder with the quickstart's tokenizer. `qarl train ... dry_run=true`
accepts or refuses it. An accepted row gets random weights, biases and norms, and runs one training step of `qarl train`
in W4A16 and in BF16: prompts of the quickstart, 8 responses of up to 40 tokens. Then policies of each level compute the
log-probs of the same rollouts. Results: mean |δ| in nats per token by level, and under "ignored" that of a trainer
whose config has the key's default.

The file is written after each row, and rows that it has are not measured again, so the script can be stopped, and
several can run at once. A kernel may end the process: then the row says so.

--others measures the families that are refused for want of a measurement, with that refusal switched off.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import gc
import io
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from family_rows import ALL, LEVELS, content, rows
from pyarrow import parquet

from qarl.align.families import PADDED
from qarl.checkpoint.storage import write_text
from qarl.checks.layers import meta_model
from qarl.checks.model import applied_level
from qarl.checks.model_folder import load_hf_config
from qarl.config import load_config
from qarl.errors import UserError
from qarl.metrics.mismatch_limit import MismatchError
from qarl.metrics.tracker import cpu
from qarl.train import main as train
from qarl.trainer.batch import Batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.setup import prepare_run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "family_keys_cpu.json"
PROMPTS = ROOT / "data" / "column_addition" / "train.parquet"
TOKENIZER = ROOT / "models" / "tiny-qwen3"
COMMIT = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
LARGEST = 200_000_000
"""Parameters of a model that is measured."""
Row = dict[str, Any]


class Observed(LocalTrainer):
    """A trainer that remembers its last batch."""

    batch: Batch

    def rollout(self, *, top_tokens: bool = False) -> tuple[Batch, dict[str, float]]:
        self.batch, metrics = super().rollout(top_tokens=top_tokens)
        return self.batch, metrics


def arguments(folder: Path, scheme: str, level: str = "exact", *, length: int = 40) -> list[str]:
    """The arguments of `qarl train` for the model in `folder`. `length`: the most tokens of a response."""
    hf_config = load_hf_config(str(folder))
    changes = {
        "model.path": str(folder),
        "model.use_remove_padding": hf_config.model_type not in PADDED,
        "data.train_files": [str(folder.parent / "prompts.parquet")],
        "data.val_files": [],
        "data.train_batch_size": 4,
        "data.max_response_length": length,
        "rollout.n": 2,
        "rollout.cpu_kvcache_space_gib": 0.1,
        "quant.scheme": scheme,
        "quant.align": level,
        "quant.ignore": stays_bf16(hf_config),
        "actor.ppo_mini_batch_size": 4,
        "actor.ppo_micro_batch_size_per_gpu": 8,
        "actor.log_prob_micro_batch_size_per_gpu": 8,
        "trainer.total_training_steps": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.logger": [],
        "output_dir": str(folder.parent / "runs"),
    }
    return ["config=quickstart.yaml", *(f"{key}={json.dumps(value)}" for key, value in changes.items())]


def stays_bf16(hf_config: Any) -> list[str]:
    """The output embedding, which is `lm_head` but in a few families, and the routers of a mixture of experts."""
    try:
        model: Any = meta_model(hf_config)
    except UserError:  # the dry run says why
        return ["lm_head"]
    head = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    return [*head, *(["re:.*mlp[.]gate$"] if "moe" in hf_config.model_type else [])]


def write_config(folder: Path, family: str, changes: Row) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content(family, changes)))
    for file in (*TOKENIZER.glob("*token*"), TOKENIZER / "chat_template.jinja"):
        shutil.copy(file, folder)


def write_weights(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = load_hf_config(str(folder))
    if (size := sum(parameter.numel() for parameter in meta_model(config).parameters())) > LARGEST:
        raise UserError(f"not measured: {size / 1e6:.0f} million parameters with the sizes of family_rows.py")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def dry_run(folder: Path) -> str | None:
    """Return why `qarl train ... dry_run=true` refuses the model, or None."""
    try:
        given = arguments(folder, "w4a16")
    except UserError as error:
        return " ".join(str(error).split())
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = train([*given, "dry_run=true"])
    if code == 0:
        return None
    return " ".join(said.getvalue().partition("error: ")[2].split()) or f"exit code {code}"


def measure(family: str, changes: Row, schemes: Sequence[str]) -> Row:
    """Return the row of a config: "refused", or what each scheme found."""
    gc.collect()
    gc.freeze()  # the engine collects garbage six times, which the modules would make slow
    with tempfile.TemporaryDirectory() as parent:
        parquet.write_table(parquet.read_table(PROMPTS).slice(0, 16), Path(parent) / "prompts.parquet")
        folder, plain = Path(parent) / "model", Path(parent) / "plain"
        write_config(folder, family, changes)
        if why := dry_run(folder):
            return {"refused": why[:300]}
        write_weights(folder)
        if changes:
            write_config(plain, family, {})
            shutil.copy(folder / "model.safetensors", plain)
        return {scheme: step(folder, scheme, plain if changes else None) for scheme in schemes}


def step(folder: Path, scheme: str, plain: Path | None) -> Row:
    """Make one training step, and return mean |δ| of each level that applies, and of a trainer with the default."""
    config = load_config(arguments(folder, scheme))
    trainer = Observed(config, prepare_run(config))
    found: Row = {}
    with trainer.engine:
        trainer.publish()
        try:
            trainer.train_step()
        except MismatchError as error:
            found["stopped"] = str(error).splitlines()[0]
    for level in LEVELS:
        config = load_config(arguments(folder, scheme, level))
        if applied_level(config, trainer.policy.model.config)[0] == level:
            found[level] = mean_delta(Policy.load(config), trainer.batch)
    if plain is not None:
        try:
            ignoring = Policy.load(load_config(arguments(plain, scheme)))
            found["ignored"] = mean_delta(ignoring, trainer.batch)
        except (RuntimeError, UserError):
            found["ignored"] = "other shapes"
    return found


@torch.no_grad()
def mean_delta(policy: Policy, batch: Batch) -> float:
    parts = [policy.response_log_probs(batch, rows, temperature=1.0) for rows in batch.micro_batches(8)]
    delta = (torch.cat(parts) - batch.rollout_log_probs)[batch.response_mask].abs()
    return float(f"{float(delta.mean()):.3g}")


def attempt(family: str, changes: Row, schemes: Sequence[str]) -> Row:
    """`measure`, where a row may fail anywhere: that is the finding."""
    try:
        return measure(family, changes, schemes)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"}


def record(path: Path, key: str, found: Row) -> None:
    """Put a row into the file; another process may do the same."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = json.loads(path.read_text())["results"] if path.is_file() else {}
        results[key] = found
        head = {
            "date": str(datetime.date.today()),
            "commit": COMMIT,
            "cpu": cpu(),
            "amx_tiles": torch.cpu._is_amx_tile_supported(),
            "command": "python scripts/family_keys.py --output benchmarks/results/family_keys_cpu.json",
            "setting": "random models of 2 layers; one step of 8 responses of up to 40 tokens; mean |δ| in nats",
        }
        lines = [f"{json.dumps(key)}: {json.dumps(results[key])}" for key in sorted(results)]
        start = json.dumps(head, indent=1).removesuffix("\n}")
        write_text(path, f'{start},\n "results": {{\n  ' + ",\n  ".join(lines) + "\n }\n}\n")


def other_families() -> Iterator[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    yield from sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(ALL))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(ALL))
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--only", default="", help="a pattern that names of rows match")
    parser.add_argument("--again", action="store_true", help="measure rows that the file has")
    parser.add_argument("--schemes", nargs="+", default=["w4a16", "bf16"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if args.others:
            stack.enter_context(mock.patch("qarl.checks.model.check_family", lambda config: None))
        for family in other_families() if args.others else args.families:
            for name, changes in ({"defaults": {}} if args.others else rows(family)).items():
                key = f"{family} | {name}"
                have = json.loads(args.output.read_text())["results"] if args.output.is_file() else {}
                if (key in have and not args.again) or not re.search(args.only, name):
                    continue
                record(args.output, key, {"failed": "the process ended"})
                found = attempt(family, changes, args.schemes)
                record(args.output, key, found)
                print(key, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
