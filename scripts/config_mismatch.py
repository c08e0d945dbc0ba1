"""The mismatch by rotary embedding, by config key and by model family: mean and largest |δ| against a real vLLM.

    python scripts/config_mismatch.py rotary   --output benchmarks/results/rotary_cpu.json
    python scripts/config_mismatch.py keys     --output benchmarks/results/config_keys_cpu.json
    python scripts/config_mismatch.py families --output benchmarks/results/families_cpu.json

Random models of two layers, whose biases and norms are random too, so that none can be left out unseen; `--responses`
rows of `--tokens` tokens at temperature 1 after prompts of 40. A refused config is written down with the reason,
and so is a level that falls back. --unchecked runs what would be refused; --keep adds to the file.

    rotary     every level, Llama with each rotary type
    keys       `model` and `exact`: Llama, Qwen2, Qwen3 and Qwen3-MoE with one key off its default (`config_values.py`),
               and as proof that the key counts, the same engine against a trainer with the key at its default
    families   `off` and `linears`, each causal language model of transformers
    compared   `off` and `linears`, each family of `SHOWN` with keys away from their defaults
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from config_values import FAMILY_KEYS, KEYS, LEVELS, REFUSED_VALUES, ROTARY, refused_row, small_config

from qarl.align.families import FAMILIES, PADDED
from qarl.checkpoint.json_file import write_json
from qarl.checks.layers import meta_model
from qarl.checks.model import check_served
from qarl.checks.model_folder import load_hf_config
from qarl.config import load_config
from qarl.errors import UserError
from qarl.metrics.tracker import cpu
from qarl.quant import get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.trainer.batch import make_batch
from qarl.trainer.policy import Policy

TOKENIZER = Path(__file__).resolve().parents[1] / "models" / "tiny-qwen3"
LARGEST = 200_000_000
"""Parameters of a model that is measured."""
Case = tuple[str, Any, Any]
"""Name, config, and the config of the other trainer that is to disagree, or None."""


def save_model(config: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config.initializer_range = 0.08
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    for file in TOKENIZER.glob("tokenizer*"):  # vLLM asks for one, though prompts are given as tokens
        shutil.copy(file, folder)


def policy(folder: Path, scheme: str, level: str) -> Policy:
    """The trainer's model, loaded as a run loads it."""
    hf_config = load_hf_config(str(folder))
    changes = {
        "model.path": str(folder),
        "model.use_remove_padding": hf_config.model_type not in PADDED,
        "quant.scheme": scheme,
        "quant.group_size": 32,
        "quant.align": level,
        "quant.ignore": list(stays_bf16(meta_model(hf_config))),
    }
    return Policy.load(
        load_config(["config=quickstart.yaml", *(f"{key}={json.dumps(value)}" for key, value in changes.items())])
    )


def stays_bf16(model: Any) -> tuple[str, ...]:
    """Name of the output embedding, `lm_head` but in a few families, and the routers of a mixture of experts."""
    head = (name for name, module in model.named_modules() if module is model.get_output_embeddings())
    return (*head, "re:.*mlp[.]gate$")


class Measurement:
    """How configs are measured; see `measure`."""

    def __init__(self, levels: Sequence[str], responses: int, tokens: int, *, checked: bool = True) -> None:
        self.levels, self.responses, self.tokens, self.checked = tuple(levels), responses, tokens, checked

    @torch.no_grad()
    def measure(self, config: Any, scheme: str, other: Any = None) -> dict[str, Any]:
        """By level: mean and largest |δ| and the level that applied, or why the config is refused.

        `other`: a config; "other" is then the same of a trainer that reads the weights with it, or why it cannot.
        """
        config.architectures = None
        try:
            if self.checked:
                check_served(config)
            if (size := sum(parameter.numel() for parameter in meta_model(config).parameters())) > LARGEST:
                raise UserError(f"not measured: {size / 1e6:.0f} million parameters with the sizes of config_values.py")
            with tempfile.TemporaryDirectory() as parent:
                folder = Path(parent) / "model"
                save_model(config, folder)
                batch = self.rollout(folder, scheme)
                found = self.against(batch, folder, scheme)
                if other is not None:
                    found["other"] = self.against_other(batch, folder, scheme, other)
                return found
        except UserError as error:
            return {"refused": " ".join(str(error).split())}

    def rollout(self, folder: Path, scheme: str) -> Any:
        count, tokens = self.responses, self.tokens
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(3, 256, (40 - i % 7,), generator=generator).tolist() for i in range(count)]
        quantized = get_scheme(scheme, group_size=32)
        trainer = policy(folder, scheme, "linears")
        settings = EngineConfig(str(folder), quantized, trainer.ignore, 40 + tokens, kv_cache_gib=0.1)
        with RolloutEngine(settings) as engine:
            engine.publish(trainer.quantize(), version=1)
            rollout = engine.generate(prompts, SamplingConfig(tokens, ignore_eos=True), seeds=list(range(count)))
        return make_batch(rollout, torch.zeros(count), torch.zeros(count), pad_token_id=0)

    def against(self, batch: Any, folder: Path, scheme: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for level in self.levels:
            trainer = policy(folder, scheme, level)
            parts = [trainer.response_log_probs(batch, rows, temperature=1.0) for rows in batch.micro_batches(8)]
            delta = (torch.cat(parts) - batch.rollout_log_probs)[batch.response_mask].abs()
            found[level] = {"mean": float(delta.mean()), "max": float(delta.max()), "applied": trainer.align}
        return found

    def against_other(self, batch: Any, folder: Path, scheme: str, other: Any) -> dict[str, Any] | str:
        changed = folder.with_name("other")
        shutil.copytree(folder, changed)
        other.save_pretrained(changed)
        try:
            return self.against(batch, changed, scheme)
        except RuntimeError as error:
            if "size" not in str(error) and "shape" not in str(error):
                raise
            return "the shapes differ"


def rotary_cases() -> Iterator[Case]:
    for name, rope in ROTARY.items():
        yield name, small_config("llama", rope_parameters={"rope_theta": 10000.0} | rope), None


def key_cases() -> Iterator[Case]:
    """A row without a changed key first, then each key, then those that are refused."""
    for family in FAMILIES:
        yield f"{family} defaults", small_config(family), None
        for key, (families, changes) in KEYS.items():
            if family in families:
                yield f"{family} {key}", small_config(family, **changes), small_config(family)
        for key, (families, value) in REFUSED_VALUES.items():
            if family in families:
                config = small_config(family)
                setattr(config, key, value)
                yield refused_row(family, key), config, None


def family_cases() -> Iterator[Case]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            yield name, small_config(name), None
        except Exception as error:  # a config with parts or rules that `SIZES` does not know
            yield name, error, None


def compared_cases() -> Iterator[Case]:
    for family, rows in FAMILY_KEYS.items():
        for name, keys in rows.items():
            yield f"{family} {name}", small_config(family, **keys), None


CASES: dict[str, tuple[Callable[[], Iterator[Case]], tuple[str, ...]]] = {
    "rotary": (rotary_cases, LEVELS),
    "keys": (key_cases, ("model", "exact")),
    "families": (family_cases, ("off", "linears")),
    "compared": (compared_cases, ("off", "linears")),
}


def table(results: dict[str, dict[str, Any]], levels: Sequence[str]) -> str:
    others = any("other" in found for found in results.values())
    heads = ["config", "scheme", *(f"`{level}`" for level in levels), *(["key at its default"] if others else [])]
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for key, found in results.items():
        name, _, scheme = key.rpartition(" ")
        if levels[0] not in found:
            cells = [": ".join(*found.items())[:100]] + [""] * (len(levels) - 1 + others)
        else:
            cells = [cell(found[level], level) for level in levels]
            other = found.get("other", "")
            cells += [other if isinstance(other, str) else cell(other[levels[0]], levels[0])] if others else []
        rows.append("| " + " | ".join([name, scheme, *cells]) + " |")
    return "\n".join(rows)


def cell(found: dict[str, Any], level: str) -> str:
    figures = f"{found['mean']:.1e} ({found['max']:.1g})" if found["max"] else "0"
    return figures if found["applied"] == level else f"is `{found['applied']}`"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=CASES)
    parser.add_argument("--schemes", nargs="+", default=["w4a16", "bf16"])
    parser.add_argument("--only", nargs="+", default=[], help="names of rows")
    parser.add_argument("--family", help="only the rows whose names begin with it")
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--unchecked", action="store_true", help="run what would be refused")
    parser.add_argument("--vector-kernels", action="store_true", help="tell vLLM that this CPU has no AMX tiles")
    parser.add_argument("--keep", action="store_true", help="keep the file's rows, and do not measure them again")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    make_cases, levels = CASES[args.what]
    measurement = Measurement(levels, args.responses, args.tokens, checked=not args.unchecked)
    amx = torch.cpu._is_amx_tile_supported() and not args.vector_kernels
    setting = f"random models of 2 layers, {args.responses} responses of {args.tokens} tokens after prompts of 34 to 40"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {"date": str(datetime.date.today()), "commit": commit, "cpu": cpu()}
    results: dict[str, dict[str, Any]] = {}
    if args.keep and args.output and args.output.is_file():
        results = json.loads(args.output.read_text())["results"]
    with contextlib.ExitStack() as stack:
        if args.vector_kernels:
            stack.enter_context(mock.patch("torch.cpu._is_amx_tile_supported", lambda: False))
        for name, config, other in make_cases():
            if args.family not in (None, name.partition(" ")[0]):
                continue
            for scheme in args.schemes if not args.only or name in args.only else ():
                if (key := f"{name} {scheme}") in results:
                    continue
                # A kernel may end the process: then this is the finding, and --keep starts after it.
                for found in ({"failed": "the process ended"}, None):
                    results[key] = found or attempt(measurement, config, scheme, other)
                    if args.output:
                        write_json(args.output, about | {"amx_tiles": amx, "setting": setting, "results": results})
                print(key, json.dumps(results[key]), flush=True)
    print(table(results, levels))


def attempt(measurement: Measurement, config: Any, scheme: str, other: Any) -> dict[str, Any]:
    """`measure`, where a family may fail anywhere: that is the finding."""
    try:
        if isinstance(config, Exception):
            raise config
        return measurement.measure(config, scheme, other)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}


if __name__ == "__main__":
    main()
