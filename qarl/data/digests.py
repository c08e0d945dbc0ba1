"""Digests of prompts and of a run's own Python files, by which a resume knows that it reads what the run read.

Each column has its own digest, so that a refusal can name it. They do not depend on the order of the keys in a row's
objects, which differs between the formats of data files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl.data.prompts import Prompt
from qarl.data.rewards import BUILTIN

COLUMNS: dict[str, Callable[[Prompt], Any]] = {
    "tokens": lambda prompt: prompt.prompt_token_ids,
    "ground_truth": lambda prompt: prompt.ground_truth,
    "data_source": lambda prompt: prompt.data_source,
    "extra_info": lambda prompt: prompt.extra_info,
    "samples": lambda prompt: prompt.samples,
}
"""Everything of a prompt that training or a reward reads."""


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 of the prompts' tokens and ground truths, in order. Every checkpoint of the local backend has
    it; later ones also have those of `column_digests`."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_token_ids}{prompt.ground_truth!r};".encode())
    return digest.hexdigest()


def column_digests(prompts: Iterable[Prompt]) -> dict[str, str]:
    """Return the SHA-256 of each column of the prompts, in order."""
    digests = {name: hashlib.sha256() for name in COLUMNS}
    for prompt in prompts:
        for name, column in COLUMNS.items():
            digests[name].update(f"{_canonical(column(prompt))};".encode(errors="surrogatepass"))
    return {name: digest.hexdigest() for name, digest in digests.items()}


def reward_source(function: str) -> str | None:
    """Return the SHA-256 of the file that has the reward `function`, a value of `reward.function`.

    Return None for QaRL's own functions, and if the file cannot be read. Other files that it imports do not count."""
    source = read_reward_source(function)
    return None if source is None else hashlib.sha256(source).hexdigest()


def reward_sources(functions: Sequence[str]) -> str | None:
    """Return `reward_source` of a single function, and of several one digest of all. It is None if none has a file."""
    sources = [reward_source(function) for function in functions]
    if len(sources) == 1 or not any(sources):
        return sources[0]
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def read_reward_source(function: str) -> bytes | None:
    """Return the content of the file that `reward_source` is the digest of, or None as it does."""
    source = function.rpartition(":")[0]
    return None if function in BUILTIN or not source else _read_source(source)


def plugin_sources(plugins: Sequence[str]) -> dict[str, str | None]:
    """Return the name of each entry of `plugins`, without its folder, and the SHA-256 of its file.

    The digest is None if the file cannot be read. Other files that it imports do not count."""
    sources = {Path(plugin).name: _read_source(plugin) for plugin in plugins}
    return {
        name: None if source is None else hashlib.sha256(source).hexdigest()
        for name, source in sources.items()
    }


def _read_source(source: str) -> bytes | None:
    """Return the content of a file (NAME.py) or of a module's file (a dotted name), or None if it cannot be read."""
    try:
        path = Path(source).expanduser() if source.endswith(".py") else Path(_origin(source))
        return path.read_bytes()
    except (OSError, ImportError, ValueError, RuntimeError):
        return None


def sources_digest(functions: Sequence[Any]) -> str | None:
    """Return the SHA-256 of the source of all `functions`, or None if Python does not know that of one of them."""
    try:
        texts = [inspect.getsource(inspect.unwrap(function)) for function in functions]
    except (OSError, TypeError, ValueError):
        return None
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _origin(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(module)
    return spec.origin


def _canonical(value: Any) -> str:
    """Return a text that is equal for equal values of a data file."""
    if isinstance(value, Mapping):
        entries = sorted((repr(key), _canonical(entry)) for key, entry in value.items())
        return "{" + ",".join(f"{key}:{entry}" for key, entry in entries) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return (
            repr(value)
            if all(type(entry) is int for entry in value)
            else f"[{','.join(map(_canonical, value))}]"
        )
    return repr(value)
