"""Loads config and tokenizer from a model folder or a Hub name, and turns every fault into a UserError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qarl.checks import hub
from qarl.config import Config
from qarl.config.demos import how_to_make
from qarl.data.prompts import check_data_files
from qarl.errors import UserError

MOST = {"num_hidden_layers": 10_000, "num_labels": 1_000_000}
"""Largest plausible values of some keys of config.json. For each key, transformers builds a list of that length."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def load_tokenizer(path: str, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Return the tokenizer and the Hugging Face config of a model folder or Hub name.

    Code in the folder runs only if `trust_remote_code` is true.
    """
    from transformers import AutoTokenizer

    check_model_folder(path)
    check_tokenizer_files(path)
    try:
        hf_config = load_hf_config(path, trust_remote_code)
        options = hub.loading_options(path)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **options), hf_config
    except UserError:
        raise
    except Exception as error:  # the type that transformers raises depends on the file and its fault
        raise _unreadable(path, error) from error


def load_hf_config(path: str, trust_remote_code: bool = False) -> Any:
    """Return the Hugging Face config of a model folder or Hub name. This reads neither tokenizer nor weights."""
    from transformers import AutoConfig

    check_model_folder(path)
    try:
        _check_sizes(path)
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **hub.loading_options(path))
    except UserError:
        raise
    except Exception as error:
        raise _unreadable(path, error) from error


def hf_config_or_carried(path: str, trust_remote_code: bool = False) -> tuple[Any, UserError | None]:
    """Return the model's config and None. If the Hub cannot be reached, return QaRL's copy of the config and the error.

    The copy is enough for sizes and checks, but not for training.
    """
    from transformers import AutoConfig

    try:
        return load_hf_config(path, trust_remote_code), None
    except UserError as error:
        carried = None if Path(path).is_dir() or not hub.why_unreachable() else hub.carried_config(path)
        if carried is None:
            raise
        return AutoConfig.for_model(**carried[1]), error


def _check_sizes(path: str) -> None:
    """Raise UserError if a value of config.json is above `MOST`, because transformers would then use up all memory."""
    file = Path(path) / "config.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for key, most in MOST.items():
        value = content.get(key) if isinstance(content, dict) else None
        if isinstance(value, int | float) and value > most:
            raise UserError(
                f"config.json says {key}={value:.3g}",
                where=f"model.path: {file}",
                why=f"no model has more than {most}",
                fix="give the config.json that was published with the model",
            )


def check_files(config: Config) -> None:
    """Raise UserError if the model's folder or a data file of `config` is missing. This is fast: no file is read."""
    check_model_folder(config.model.path)
    check_data_files(config.data)


def check_model_folder(path: str) -> None:
    looks_local = path.startswith((".", "/", "models/")) or (Path(path).parent.is_dir() and path.count("/") != 1)
    if not Path(path).is_dir() and looks_local:
        raise UserError(
            f"there is no model folder {path!r}",
            where="model.path",
            fix=how_to_make(path) or "give a Hugging Face folder; `qarl demo` makes a tiny model and trains it",
        )

    merge, original = "merge the adapter into its base model (merge_and_unload)", "give the original model's folder"
    for file, what, fix in (("adapter_config.json", "an adapter (LoRA)", merge), ("*.gguf", "a GGUF file", original)):
        if not (Path(path) / "config.json").is_file() and any(Path(path).glob(file)):
            raise UserError(
                f"the folder {path!r} has {what}, not a model",
                where="model.path",
                why="training needs config.json and BF16 weights in safetensors",
                fix=fix,
            )


def check_tokenizer_files(path: str) -> None:
    for name in (*TOKENIZER_FILES, "tokenizer_config.json", "generation_config.json"):
        if (Path(path) / name).is_dir():  # transformers would treat the file as missing
            raise UserError(f"{name} is a folder, not a file", where=path, fix="replace it with the file of that name")
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        # Otherwise transformers would make an empty tokenizer of the model's family.
        raise UserError(
            f"the model folder {path!r} has no tokenizer",
            where="model.path",
            why=f"it has none of {', '.join(TOKENIZER_FILES)}",
            fix="copy tokenizer.json and tokenizer_config.json of the original model into the folder",
        )


def _unreadable(path: str, error: Exception) -> UserError:
    if "trust_remote_code" in str(error):
        return UserError(
            f"the model in {path!r} contains Python code, which is not run",
            where="model.trust_remote_code=false",
            why="its config.json or tokenizer_config.json names Python files (auto_map), and transformers has no class "
            "for this model. Such code would run with all your rights",
            fix="give a model that transformers knows; or read the code, and set model.trust_remote_code=true",
        )
    if not Path(path).is_dir() and (unreachable := hub.why_unreachable()):
        return UserError(
            f"the model {path!r} is not on this machine and cannot be downloaded from the Hub",
            where="model.path",
            why=f"{unreachable}; there is no such folder, and the Hub's cache has no copy",
            fix="give a folder with config.json and tokenizer.json, or download the model on a machine with a network",
        )
    return UserError(
        f"config or tokenizer cannot be loaded from {path!r}",
        where="model.path",
        why=" ".join(str(error).split())[:400],
        fix="give a folder with config.json and tokenizer.json, or a hub name that this machine can reach",
    )
