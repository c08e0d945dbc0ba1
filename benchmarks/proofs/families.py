"""Model families: every optional key of a family's config away from its default, and families that nobody has measured.

A row is the keys of config.json that it sets in a small random model (`family_values.yaml`), with random biases and
norms, so that none can be left out unseen. The keys are read from the installed transformers: a key for which no value
is written ends the proof and fails a test.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from pyarrow import parquet

from benchmarks.proofs.harness import (
    LEVELS,
    QUIET,
    ROOT,
    TINY,
    Record,
    Row,
    arguments,
    delta,
    rows_of,
)
from qarl.align.compared_keys import SIZES as SIZE_KEYS
from qarl.align.compared_keys import read_keys
from qarl.align.model_config import UNREAD, refused_keys
from qarl.checks.layers import meta_model
from qarl.checks.model import applied_level
from qarl.checks.model_folder import load_hf_config
from qarl.config import load_config
from qarl.errors import UserError
from qarl.families import ALIGNED, MEASURED, family_named, family_of
from qarl.metrics.mismatch_limit import MismatchError
from qarl.train import main as train
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import prepare_run

ALL = (*ALIGNED, *MEASURED)
PROMPTS = ROOT / "data" / "column_addition" / "train.parquet"
VALUES: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("family_values.yaml").read_text(encoding="utf-8")
)
THETA = {"rope_theta": 10000.0}
LARGEST = 200_000_000
"""Parameters of a model that is measured."""


def optional_keys(family: str) -> list[str]:
    """Return the keys of the family's config class that a forward may read, without sizes and rotary parameters."""
    import transformers

    kind = transformers.CONFIG_MAPPING[family]
    general = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    names = [field.name for field in dataclasses.fields(kind)]
    own = [name for name in names if name not in general or name in kind.__annotations__]
    return [name for name in own if name not in SIZE_KEYS | UNREAD and not name.startswith("_")]


def engine_keys(family: str) -> list[str]:
    """Return the keys without a field in the config class that vLLM or transformers reads all the same."""
    read = read_keys(family)
    keys = [
        key
        for key in sorted(refused_keys())
        if key in family_named(family).refuses or (family in MEASURED and key in read)
    ]
    return [key for key in keys if key not in optional_keys(family) and key in VALUES["values"]]


@cache
def rows(family: str) -> dict[str, Row]:
    """Return name of a row -> keys of config.json. The row "defaults" sets none."""
    import transformers

    default = transformers.CONFIG_MAPPING[family]()
    changes: list[Row] = []
    for key in (*optional_keys(family), *engine_keys(family)):
        usual = getattr(default, key, None)
        if key not in VALUES["values"] and not isinstance(usual, bool):
            raise KeyError(
                f"{family}: write another value than {usual!r} for {key} into family_values.yaml"
            )
        changes.append({key: not usual if isinstance(usual, bool) else VALUES["values"][key]})
    changes += VALUES["more"].get(family, [])
    labelled = {
        ", ".join(f"{key}: {json.dumps(value)}" for key, value in change.items()): change
        for change in changes
    }
    return (
        {"defaults": {}, "sizes": _settable(default, VALUES["other_sizes"])}
        | labelled
        | rotary_rows()
    )


@cache
def rotary_rows() -> dict[str, Row]:
    """Each type of rotary embedding alone, with each paired key, with its own factors, and the default with both."""
    cases: dict[str, Row] = {}
    paired = VALUES["paired"]
    for kind, keys in VALUES["types"].items():
        cases |= {f"rotary {kind}": keys} if kind != "default" else {}
        more = paired | VALUES["scaling"].get(kind, {})
        cases |= {f"rotary {kind}, {name}": keys | change for name, change in more.items()}
    cases["rotary default, both"] = (
        VALUES["types"]["default"] | paired["rope_theta"] | paired["partial_rotary_factor"]
    )
    return {name: {"rope_parameters": THETA | keys} for name, keys in cases.items()}


def content(family: str, changes: Row) -> Row:
    """Return a config.json of a small model of `family` with `changes`."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    default = CONFIG_MAPPING[family]()
    sizes = _settable(default, VALUES["sizes"] | VALUES["experts"])
    for alias, key in type(default).attribute_map.items():  # the other name would undo the change
        if alias in changes or key in changes:
            sizes = {name: value for name, value in sizes.items() if name not in (alias, key)}
    if getattr(default, "sliding_window", None) and family not in ALIGNED:
        sizes["sliding_window"] = 24
    if family == "qwen2":
        sizes["vocab_size"] = 289  # transformers' tokenizer for this family adds <|endoftext|>
    if family == "qwen3_moe":
        sizes["mlp_only_layers"] = [1]
    class_names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    name = class_names[0] if isinstance(class_names, tuple | list) else class_names
    return {"model_type": family, "architectures": [name], "dtype": "bfloat16", **sizes, **changes}


def small_config(family: str, **changes: Any) -> Any:
    """Return the config that transformers makes of `content`."""
    from transformers import CONFIG_MAPPING

    keys = copy.deepcopy(content(family, changes))  # a config class may write into a nested value
    return CONFIG_MAPPING[family](**{key: value for key, value in keys.items() if key != "dtype"})


def _settable(config: Any, values: Row) -> Row:
    owners = {key: getattr(type(config), key, None) for key in values if hasattr(config, key)}
    return {
        k: values[k]
        for k, owner in owners.items()
        if not (isinstance(owner, property) and owner.fset is None)
    }


def write_config(folder: Path, family: str, changes: Row) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content(family, changes)))
    for file in (*TINY.glob("*token*"), TINY / "chat_template.jinja"):
        shutil.copy(file, folder)


def write_weights(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = load_hf_config(str(folder))
    if (size := sum(parameter.numel() for parameter in meta_model(config).parameters())) > LARGEST:
        raise UserError(
            f"not measured: {size / 1e6:.0f} million parameters with the sizes of family_values.yaml"
        )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def write_prompts(parent: Path) -> None:
    parquet.write_table(parquet.read_table(PROMPTS).slice(0, 16), parent / "prompts.parquet")


def run_arguments(
    folder: Path, scheme: str, level: str = "exact", *, length: int = 40
) -> list[str]:
    """Return the arguments of `qarl train` for the model in `folder`. `length`: the most tokens of a response."""
    hf_config = load_hf_config(str(folder))
    settings = QUIET | {
        "model.path": folder,
        "model.use_remove_padding": family_of(hf_config).packs,
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
        "trainer.logger": [],
        "output_dir": folder.parent / "runs",
    }
    return ["config=quickstart.yaml", *arguments(settings)]


def stays_bf16(hf_config: Any) -> list[str]:
    """Return the output embedding, which is `lm_head` but in a few families, and the routers of experts."""
    try:
        model: Any = meta_model(hf_config)
    except UserError:  # the dry run says why
        return ["lm_head"]
    head = [
        name for name, module in model.named_modules() if module is model.get_output_embeddings()
    ]
    return [*head, *(["re:.*mlp[.]gate$"] if "moe" in hf_config.model_type else [])]


def dry_run(folder: Path) -> str | None:
    """Return why `qarl train ... dry_run=true` refuses the model, or None."""
    try:
        arguments = run_arguments(folder, "w4a16")
    except UserError as error:
        return " ".join(str(error).split())
    printed = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
        code = train([*arguments, "dry_run=true"])
    return (
        " ".join(printed.getvalue().partition("error: ")[2].split()) or f"exit code {code}"
        if code
        else None
    )


def measure(family: str, changes: Row, schemes: tuple[str, ...]) -> Row:
    """Return the row of a config: "refused", or by scheme and level the mean and the largest |δ| after one step."""
    gc.collect()
    gc.freeze()  # the engine collects garbage six times, which the modules would make slow
    try:
        with tempfile.TemporaryDirectory() as parent:
            write_prompts(Path(parent))
            folder = Path(parent) / "model"
            plain = Path(parent) / "plain"
            write_config(folder, family, changes)
            if why := dry_run(folder):
                return {"refused": why[:300]}
            write_weights(folder)
            if changes:
                write_config(plain, family, {})
                shutil.copy(folder / "model.safetensors", plain)
            return {scheme: _step(folder, scheme, plain if changes else None) for scheme in schemes}
    except Exception as error:  # a row may fail anywhere: that is the finding
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"}


def _step(folder: Path, scheme: str, plain: Path | None) -> Row:
    """Make one training step. "ignored" is a trainer whose config has the default."""
    config: Any = load_config(run_arguments(folder, scheme))
    batches: list[Any] = []

    class Observed(LocalTrainer):
        def rollout(self, **options: Any) -> Any:
            sampled = super().rollout(**options)
            batches.append(sampled[0])
            return sampled

    trainer = Observed(config, prepare_run(config))
    row: Row = {}
    with trainer.engine:
        trainer.publish()
        try:
            trainer.train_step()
        except MismatchError as error:
            row["stopped"] = str(error).splitlines()[0]
    for level in LEVELS:
        config = load_config(run_arguments(folder, scheme, level))
        if applied_level(config, trainer.policy.model.config).level == level:
            row[level] = _figures(Policy.load(config), batches[-1])
    if plain is not None:
        try:
            row["ignored"] = _figures(
                Policy.load(load_config(run_arguments(plain, scheme))), batches[-1]
            )
        except (RuntimeError, UserError):
            row["ignored"] = "other shapes"
    return row


def _figures(policy: Policy, batch: Any) -> Row:
    deltas = delta(policy, batch)
    return {"mean": float(f"{float(deltas.mean()):.3g}"), "max": float(deltas.max())}


def _mean(figures: Any) -> Any:
    return figures["mean"] if isinstance(figures, dict) else figures


def family_keys(
    record: Record, *, families: tuple[str, ...] = ALL, schemes: tuple[str, ...] = ("w4a16", "bf16")
) -> None:
    """Give each row to `qarl train`: a dry run, then, if it is accepted, one step of 8 responses in each scheme."""
    for family in families:
        for name, changes in rows(family).items():
            if record.wants(key := f"{family} | {name}"):
                record.add(
                    key, {"failed": "the process ended"}, ok=False
                )  # by a kernel: then this is the finding
                figures = measure(family, changes, schemes)
                means = {
                    s: {level: _mean(v) for level, v in row.items()}
                    for s, row in figures.items()
                    if s in schemes
                }
                record.add(key, figures | means, ok="failed" not in figures)


def families(record: Record, *, schemes: tuple[str, ...] = ("w4a16",)) -> None:
    """Measure every causal language model of transformers with the defaults, also those that QaRL refuses as new."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    with mock.patch("qarl.checks.registry.check_family", lambda config: None):
        for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            for key, scheme in ((f"{family} {scheme}", scheme) for scheme in schemes):
                if record.wants(key):
                    record.add(key, {"failed": "the process ended"})
                    figures = measure(family, {}, (scheme,))
                    record.add(key, figures.get(scheme, figures))


def results() -> Iterator[tuple[str, str, Row]]:
    """Yield family, name of the row, and what was measured, of the committed result."""
    file = ROOT / "benchmarks" / "results" / "family_keys_cpu.json"
    for key, row in rows_of(json.loads(file.read_text(encoding="utf-8"))).items():
        family, _, name = key.partition(" | ")
        yield (
            family,
            name,
            {
                key: value
                for key, value in row.items()
                if key not in ("ok", "date", "commit", "cpu")
            },
        )
