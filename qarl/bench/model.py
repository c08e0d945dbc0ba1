"""The model of a benchmark: a public config by name, with random weights, or a local folder with its weights.

Random weights are enough, because speed depends on shapes, not on values. `qarl/bench/models/NAME/config.json` has the
numbers of a public config, written by hand. `layers=N` keeps the first N decoder layers, embedding and lm_head. The
copy of the model has no end-of-sequence token, so all responses have the requested length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.bench.arguments import one_of
from qarl.checks.model_size import ModelSize
from qarl.config import Config, build_config
from qarl.errors import UserError

MODELS = Path(__file__).resolve().parent / "models"
SPECIAL = {0: "<unknown>", 1: "<end>", 2: "<padding>"}
LINEARS = {
    "q": "q_proj",
    "kv": "k_proj",
    "o": "o_proj",
    "gate_up": "gate_proj",
    "down": "down_proj",
}
"""Name in the benchmark -> module of a decoder layer."""


@dataclass(frozen=True)
class Source:
    """A model. `config`: content of config.json. `folder`: weights and tokenizer, or None for random weights."""

    name: str
    config: Mapping[str, Any]
    folder: Path | None = None

    @property
    def size(self) -> ModelSize:
        return ModelSize.from_config(self.config)


def find_model(name: str) -> Source:
    """Find the model `name`: a folder, or a known name (case is ignored). Raise UserError if there is no such model."""
    folder = Path(name)
    if folder.is_dir() or "/" in name:
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{name!r} has no config.json",
                where="model",
                fix="give a model folder, or a known name",
            )
        return Source(folder.name, json.loads((folder / "config.json").read_text()), folder)
    known = [path.parent.name for path in sorted(MODELS.glob("*/config.json"))]
    names = {name.lower(): name for name in known}
    name = names[one_of(name.lower(), names, "model")]
    return Source(name, json.loads((MODELS / name / "config.json").read_text()))


def linear_shapes(source: Source) -> dict[str, tuple[int, int]]:
    """Return name -> [N, K] of a decoder layer's dense weights, not fused, as in the trainer.
    Each shape is listed once. In a mixture of experts only the weights of attention are dense."""
    block = source.size.block_linears(0)
    dense = {name: shape for name, shape in block.items() if ".experts." not in name}
    by_leaf = {name.rpartition(".")[2]: shape for name, shape in dense.items()}
    shapes = {name: by_leaf[leaf] for name, leaf in LINEARS.items() if leaf in by_leaf}
    first = {shape: name for name, shape in reversed(shapes.items())}
    return {name: shape for name, shape in shapes.items() if first[shape] == name}


def default_group_size(size: ModelSize) -> int:
    """Return the largest of 128, 64 and 32 that divides the input size of every linear, or 128 if there is none."""
    inputs = {k for _, k in size.block_linears(0).values()}
    divisor = math.gcd(*inputs)
    return next((group for group in (128, 64, 32) if divisor % group == 0), 128)


def run_config(
    path: str, work: Any, scheme: str, level: str, *, backend: str = "local", **more: Any
) -> Config:
    """Return the config of a run with the numbers of `work`, a benchmark's arguments. Its data files are never read.

    `path`: the model's folder or name. `more`: other keys by section."""
    group_size = default_group_size(find_model(work.model).size)
    values: dict[str, Any] = {
        "model": {"path": path},
        "data": {
            "train_files": ["x"],
            "train_batch_size": work.prompts,
            "max_prompt_length": work.prompt_length,
        },
        "rollout": {"n": work.n, "gpu_memory_utilization": work.gpu_memory_utilization},
        "quant": {"scheme": scheme, "align": level, "group_size": group_size},
        "actor": {"ppo_mini_batch_size": work.prompts // work.mini_batches},
        "trainer": {"total_training_steps": 10**6, "val_before_train": False, "test_freq": -1},
    }
    sections = {name: values.get(name, {}) | more.get(name, {}) for name in values | more}
    return build_config({"name": "bench", "backend": backend} | sections)


def write_model(source: Source, layers: int, folder: Path, *, eos: int | None = None) -> int:
    """Write a Hugging Face folder of `source` with `layers` layers. Return the number of parameters.

    `eos`: id of the end-of-sequence token; without one, a response ends only at its longest length."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True)
    cut = dict(source.config) | {"num_hidden_layers": layers, "eos_token_id": eos}
    if cut.get("layer_types"):
        cut["layer_types"] = cut["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(cut))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if source.folder is None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
        tokenizer = _numbered_tokens(config.vocab_size, eos)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, config=config, dtype=torch.bfloat16, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
        tokenizer.eos_token = None
    model.generation_config.eos_token_id = eos
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _numbered_tokens(vocab_size: int, eos: int | None) -> Any:
    """Return a tokenizer with chat template that vLLM can load. Its tokens are the words t0, t1, ... and special ones,
    none of which begins another word: a tokenizer cuts special tokens out of the middle of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{i}": i for i in range(vocab_size) if i not in SPECIAL}
    words |= {word: i for i, word in SPECIAL.items()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL[0],
        pad_token=SPECIAL[2],
        eos_token=None if eos is None else SPECIAL[eos],
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )
