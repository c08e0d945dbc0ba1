"""The check before the first step, on models that trainer and engine compute differently, and on healthy ones.

    python scripts/guard_models.py --json benchmarks/results/guard_models_cpu.json

Each wrong model is a config, or a buffer, that QaRL refuses by name. Here the refusal is switched off in this process,
so only the measured mismatch can stop the run (`qarl.trainer.probe`). Healthy are all families that can be trained, at
`off`, `linears` and, where it exists, `model`, in W4A16, the quickstart in the other schemes, and Falcon's ALiBi, which
is refused because it was never compared in all its combinations. Each family is healthy with responses of 1,000 tokens,
too: there the probe's limit of 64 tokens is raised. The exit code is 1 if the check is wrong about a model.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from family_keys import COMMIT, PROMPTS, arguments, write_config, write_weights
from family_rows import ALL, THETA, YARN
from pyarrow import parquet

from qarl.align.families import FAMILIES
from qarl.checkpoint.json_file import write_json
from qarl.config import load_config
from qarl.metrics.guard import MismatchError, noise_limit, resolve_limit
from qarl.metrics.tracker import cpu
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.probe import check, compare
from qarl.trainer.setup import prepare_run

MULTIPLIERS = {
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
PARTIAL = {"rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}}
LONG = 1000
FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}


@dataclass(frozen=True)
class Model:
    """A config of `family` with `changes`. `sharp`: factor of the weights of queries and keys. `cast`: round the rotary
    frequencies to BF16. `levels`: values of quant.align. `length`: the most tokens of a response; None: the probe's."""

    name: str
    family: str
    changes: dict[str, Any]
    sharp: float = 1.0
    cast: bool = False
    levels: tuple[str, ...] = ("linears",)
    wrong: bool = True
    scheme: str = "w4a16"
    length: int | None = None


def small(std: float, **changes: Any) -> dict[str, Any]:
    return {"initializer_range": std} | changes


WRONG = (
    Model("granite, partial rotary, multipliers", "granite", PARTIAL | MULTIPLIERS),
    Model("granite, YaRN attention_factor 2", "granite", {"rope_parameters": THETA | YARN | {"attention_factor": 2.0}}),
    Model("mistral, partial rotary, init 0.03", "mistral", small(0.03, **PARTIAL)),
    Model("mistral, partial rotary, init 0.08", "mistral", PARTIAL),
    Model("mistral, YaRN mscale", "mistral",
          {"rope_parameters": THETA | YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}}),
    Model("ernie4_5, partial rotary", "ernie4_5", PARTIAL),
    Model("gemma3_text, bidirectional", "gemma3_text", {"use_bidirectional_attention": True}),
    Model("gemma2, soft-cap 5 dropped", "gemma2", {"attn_logit_softcapping": 5.0}, sharp=4.0),
    Model("gemma2, soft-cap 50 dropped", "gemma2", {"attn_logit_softcapping": 50.0}, sharp=8.0),
    Model("falcon, new decoder, init 0.03", "falcon", small(0.03, **FALCON)),
    Model("falcon, new decoder, init 0.08", "falcon", FALCON),
    Model("quickstart, BF16 inv_freq", "quickstart", {}, cast=True, levels=("model", "linears")),
)  # fmt: skip
HEALTHY = (
    Model("falcon, ALiBi", "falcon", {"alibi": True}, wrong=False),
    *(
        Model(f"{family}, init {std}", family, small(std), wrong=False,
              levels=("off", "linears", "model") if family in FAMILIES else ("off", "linears"))
        for family in ALL
        for std in (0.03, 0.08)
    ),
    *(
        Model(f"quickstart{label}", "quickstart", {}, wrong=False, levels=("off", "linears", "model"), scheme=scheme)
        for scheme, label in (("w4a16", ""), ("w8a8", ", w8a8"), ("fp8", ", fp8"), ("bf16", ", bf16"))
    ),
    *(
        Model(f"{family}, {LONG} tokens, {scheme}", family, small(0.03, max_position_embeddings=2 * LONG), wrong=False,
              levels=("model",) if family in FAMILIES else ("linears",), scheme=scheme, length=LONG)
        for i, family in enumerate(ALL)
        for scheme in ("w4a16", ("w8a8", "bf16")[i % 2])
    ),
)  # fmt: skip


@dataclass
class Row:
    """`abs_mean`: mean |δ|, of which `limit` is allowed. `times`: |δ| over the noise at `level`; `times_limit`: that
    which is allowed. `fired`: whether the run stops."""

    model: str
    asked: str
    level: str
    tokens: float
    abs_mean: float
    limit: float
    times: float | None
    times_limit: float
    fired: bool
    should_fire: bool


@contextlib.contextmanager
def refusals_off(model: Model) -> Iterator[None]:
    """Nothing refuses the config. A trainer drops the soft-cap of a wrong Gemma 2."""
    off: dict[str, Callable[..., Any]] = {
        "qarl.checks.model.check_config_keys": lambda config: None,
        "qarl.checks.model.check_checkpoint_layers": lambda model, family: None,
        "qarl.align.model.check_config_keys": lambda config: None,
        "qarl.align.packed_attention.check_arguments": lambda model: None,
    }
    if "attn_logit_softcapping" in model.changes:
        off["qarl.align.packed_attention._needs_scores"] = lambda given: False
    with contextlib.ExitStack() as stack:
        for name, function in off.items() if model.wrong or "alibi" in model.changes else ():
            stack.enter_context(mock.patch(name, function))
        if model.length:
            stack.enter_context(mock.patch("qarl.trainer.probe.PROBE_TOKENS", model.length))
        if model.cast:
            stack.enter_context(mock.patch.object(Policy, "load", cast_after(Policy.load)))
        yield


def cast_after(load: Callable[..., Policy]) -> Callable[..., Policy]:
    def loaded(config: Any, **options: Any) -> Policy:
        policy = load(config, **options)
        rotary = policy.model.base_model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.bfloat16().float()
        return policy

    return loaded


def measure(model: Model, level: str) -> Row:
    gc.collect()
    with tempfile.TemporaryDirectory() as parent, refusals_off(model):
        folder = Path(parent) / "model"
        if model.family == "quickstart":
            given = ["config=quickstart.yaml", f"output_dir={parent}"]
            given += [f"quant.align={level}", f"quant.scheme={model.scheme}"]
        else:
            parquet.write_table(parquet.read_table(PROMPTS).slice(0, 16), Path(parent) / "prompts.parquet")
            write_config(folder, model.family, model.changes)
            write_weights(folder)
            sharpen(folder, model.sharp)
            given = arguments(folder, model.scheme, level, length=model.length or 40)
        config = load_config(given)
        trainer = LocalTrainer(config, prepare_run(config))
        with trainer.engine:
            trainer.publish()
            found = compare(trainer)
        try:
            check(trainer, found)
            fired = False
        except MismatchError:
            fired = True
    tokens = found.tokens
    return Row(
        model.name,
        level,
        found.level,
        tokens,
        found.metrics["mismatch/abs_mean"],
        resolve_limit(None, trainer.policy.limit_level, response_length=tokens / len(found.batch.response_mask)),
        found.times,
        noise_limit(found.level, tokens),
        fired,
        model.wrong,
    )


def sharpen(folder: Path, factor: float) -> None:
    """Multiply the weights of queries and keys in the model's file."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] = tensors[name] * factor
    save_file(tensors, path, metadata={"format": "pt"})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the models' names")
    parser.add_argument("--json", type=Path, help="rows of this file are not measured again")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    old = json.loads(args.json.read_text())["rows"] if args.json and args.json.is_file() else []
    rows = [Row(**row) for row in old]
    done = {(row.model, row.asked) for row in rows}
    for model in (*WRONG, *HEALTHY):
        for level in model.levels if args.only in model.name else ():
            if (model.name, level) in done:
                continue
            rows.append(row := measure(model, level))
            verdict = ("fires" if row.fired else "silent") + " (WRONG)" * (row.fired != row.should_fire)
            print(f"{row.model} | {level}: mean |δ| {row.abs_mean:.2g} of {row.limit:.2g}, at {row.level} "
                  f"{row.times or 0:.2g} times the noise of {row.times_limit:.2g}: {verdict}", flush=True)  # fmt: skip
            if args.json:
                head: dict[str, Any] = {"date": str(datetime.date.today()), "commit": COMMIT, "cpu": cpu()}
                head["amx_tiles"] = torch.cpu._is_amx_tile_supported()
                write_json(args.json, head | {"rows": [asdict(row) for row in rows]})
    return int(any(row.fired != row.should_fire for row in rows))


if __name__ == "__main__":
    sys.exit(main())
