"""The record of what a run reads: its model's config and tokenizer, its prompts, its own code, its reference.

A checkpoint holds the record (local: `inputs` in state.json; verl: inputs.json in the run folder), and a resume
compares it (`qarl.trainer.input_changes`). The weights are not in it, because a checkpoint has its own, except where
the run reads those of `model.path` in each step: as the reference of a KL term. The base of adapters is compared by the
digests of its published tensors.

The record says what the files mean, not what their bytes are. A tokenizer or a config.json that was written again, in
another order or by another version of transformers, has the same record. verl and TRL compare nothing of this.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qarl.align.model_config import DECIDE_NOTHING
from qarl.checkpoint.model_files import read_file
from qarl.checkpoint.resumable import tensor_digest
from qarl.checkpoint.storage import json_safe
from qarl.checks.generation import stop_token_ids
from qarl.checks.weight_memory import has_reference
from qarl.config import Config
from qarl.data.dated_template import undated_digest, written_dates
from qarl.data.digests import column_digests, plugin_sources, reward_source, reward_sources
from qarl.data.prompts import Prompt
from qarl.data.rewards import scorer_version

RECORD_FILE = "inputs.json"
"""The record in the folder of a verl run."""
_BOOKKEEPING = frozenset(
    [
        "_name_or_path",
        "chunk_size_feed_forward",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
    ]
)
"""Keys that transformers adds to every config, and that decide nothing in a causal model."""
_DECIDE = frozenset(["architectures", "model_type", "quantization_config"])
"""Keys that no forward reads, but by which trainer or engine chooses the model's class and its tensors."""

Record = dict[str, Any]


def record_of(
    config: Config,
    *,
    hf_config: Any,
    tokenizer: Any,
    train: Sequence[Prompt],
    val: Sequence[Prompt],
    weight_files: Sequence[Path],
) -> Record:
    """Return the record of a run of `config`, as JSON types.

    `train`, `val`: its prompts. `weight_files`: the safetensors files of `model.path`; empty for a model of the Hub,
    whose commit is recorded instead."""
    reference = reference_digest(weight_files, hf_config) if has_reference(config) else None
    variables = config.data.apply_chat_template_kwargs
    scorers = (scorer_version(name, config.reward.key) for name in config.reward.names)
    record = model_record(hf_config, tokenizer, config.model.path) | {
        "train": prompts_record(train, tokenizer, variables),
        "val": prompts_record(val, tokenizer, variables) if val else None,
        "reward": reward_sources(config.reward.names),
        "scorer": ", ".join(filter(None, scorers)) or None,
        "environment": reward_source(config.rollout.environment or ""),
        "plugins": plugin_sources(config.plugins),
        "reference": reference,
    }
    return full_record(record)


def full_record(record: Record) -> Record:
    """Return `record` as JSON types, with the version of transformers, which decides the keys of a model's config."""
    safe: Record = json_safe(record | {"transformers": importlib.metadata.version("transformers")})
    return safe


def model_record(hf_config: Any, tokenizer: Any, path: str) -> Record:
    """Return the part of the record that is about the model in `path`: its config, its tokenizer, and the token ids
    that end a response."""
    return {
        "model": config_keys(hf_config),
        "ends": stop_token_ids(path, tokenizer, hf_config),
        "tokenizer": tokenizer_digests(tokenizer),
        "chat_template": text_digest(
            json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
        ),
    }


def config_keys(hf_config: Any) -> dict[str, Any]:
    """Return the keys of a model's config that decide what it computes, as transformers understands them.

    Keys of an inner mapping are dotted: `rope_parameters.rope_theta`."""
    left_out = _BOOKKEEPING | (DECIDE_NOTHING - _DECIDE)
    keys = {key: value for key, value in hf_config.to_dict().items() if key not in left_out}
    flat: dict[str, Any] = json.loads(json.dumps(_flat(keys), default=repr))
    return flat


def tokenizer_digests(tokenizer: Any) -> dict[str, str]:
    """Return digests of the token of each id, and of the text of all ids, with and without special tokens.

    How text is cut into tokens is compared by the prompts' own tokens."""
    ids = sorted(tokenizer.get_vocab().values())
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[::-1])
    texts = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
    return {"vocabulary": text_digest(repr(vocabulary)), "decoding": text_digest(repr(texts))}


def prompts_record(
    prompts: Sequence[Prompt], tokenizer: Any, variables: Mapping[str, Any]
) -> Record:
    """Return the number of prompts and the digests of their columns. If the chat template, with its `variables`, writes
    today's date, also the date, and a digest that does not depend on it."""
    record: Record = {"prompts": len(prompts), **column_digests(prompts)}
    if dates := written_dates(tokenizer, (prompt.messages for prompt in prompts), variables):
        undated = undated_digest(tokenizer, prompts, variables)
        record |= {"dates": dates, "undated": undated}
    return record


def reference_digest(weight_files: Sequence[Path], hf_config: Any) -> str | None:
    """Return a digest of all tensors of `weight_files`, which does not depend on how they are spread over files.

    For a model of the Hub return its commit, or None if it is unknown. About a second for 1 GB on a core."""
    if not weight_files:
        commit = getattr(hf_config, "_commit_hash", None)
        return f"commit {commit}" if commit else None
    with ThreadPoolExecutor() as pool:
        digests = [entry for entries in pool.map(_digests, weight_files) for entry in entries]
    return text_digest("".join(f"{name}:{digest};" for name, digest in sorted(digests)))


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _digests(file: Path) -> list[tuple[str, str]]:
    return [(name, tensor_digest(tensor)) for name, tensor in read_file(file)]


def _flat(keys: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in keys.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
