"""The models that are timed: public configs by name, with random weights, or a local folder with its own.

`qarl/bench/models/NAME/config.json` holds the numbers of public configs, written by hand. Speed depends on shapes, not
on values, so random weights will do (as transformers initialises them). With `layers=N` the first N decoder layers are
kept, of a named model and of a folder alike; embedding and lm_head stay whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.bench.arguments import one_of
from qarl.errors import UserError

MODELS = Path(__file__).resolve().parents[1] / "models"
SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


@dataclass(frozen=True)
class Source:
    """`config`: what config.json holds; `folder`: where weights and tokenizer are, None for random ones."""

    name: str
    config: Mapping[str, Any]
    folder: Path | None = None

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def has_experts(self) -> bool:
        return bool(self.config.get("num_experts") or self.config.get("num_local_experts"))

    def shape(self) -> dict[str, Any]:
        """The numbers that decide sizes."""
        shape: dict[str, Any] = {key: self.config[key] for key in SHAPE_KEYS if self.config.get(key) is not None}
        heads = shape["num_attention_heads"]
        return shape | {
            "num_key_value_heads": shape.get("num_key_value_heads", heads),
            "head_dim": shape.get("head_dim", shape["hidden_size"] // heads),
            "tie_word_embeddings": bool(shape.get("tie_word_embeddings", False)),
        }


def known_models() -> list[str]:
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def find_model(name: str) -> Source:
    """A folder, or a known name in any case. Raises UserError where there is neither."""
    folder = Path(name)
    if folder.is_dir() or "/" in name:
        if not (folder / "config.json").is_file():
            raise UserError(f"{name!r} has no config.json", where="model", fix="a Hugging Face folder, or a known name")
        return Source(folder.name, _read(folder / "config.json"), folder)
    names = {known.lower(): known for known in known_models()}
    one_of(name.lower(), names, "model")
    found = names[name.lower()]
    return Source(found, _read(MODELS / found / "config.json"))


def _read(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError("a config.json cannot be read", where=str(path), why=str(error)) from error
    return config


def cut_config(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with its first `layers` decoder layers."""
    cut = dict(config) | {"num_hidden_layers": layers}
    if cut.get("layer_types"):
        cut["layer_types"] = cut["layer_types"][:layers]
    return cut


def default_group_size(config: Mapping[str, Any]) -> int:
    """The largest of 128, 64 and 32 that divides the input size of every linear; 128 where none does."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    inputs = [hidden, config["intermediate_size"], heads * (config.get("head_dim") or hidden // heads)]
    return next((size for size in (128, 64, 32) if all(k % size == 0 for k in inputs)), 128)


def write_model(source: Source, layers: int, folder: Path) -> int:
    """A Hugging Face folder of `source` with so many layers, of experts without weights; the number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(cut_config(source.config, layers)))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if source.has_experts:  # only its rollouts are timed, on weights that vLLM makes up
        tokenizer = _numbered_tokens(config.vocab_size)
        tokenizer.save_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
        return sum(parameter.numel() for parameter in model.parameters())
    if source.folder is None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
        tokenizer = _numbered_tokens(config.vocab_size)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, config=config, dtype=torch.bfloat16, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _numbered_tokens(vocab_size: int) -> Any:
    """A tokenizer for vLLM to load: token i is written "ti"."""
    import transformers
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t2", unk_token="t0")
