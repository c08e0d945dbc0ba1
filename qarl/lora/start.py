"""The tensors of an adapter of peft's that a run begins from (`lora.path`).

They are rounded to BF16, as the forward and the engine have them, so that the first publish is the adapter itself.
Every linear that the config chooses must have its A and B, and no other tensor may be there: peft itself skips names
that it does not know, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qarl.config.adapter_start import CONFIG_FILE, start_of
from qarl.console import note
from qarl.errors import UserError
from qarl.lora.adapter import PREFIX, WEIGHTS_FILE, A, B

Shapes = Mapping[str, tuple[int, int]]
Pair = tuple[Tensor, Tensor]


def weights_of(path: str) -> Path:
    """Return the file with the tensors of the adapter in the folder `path`. Raise UserError if there is none."""
    file = Path(path) / WEIGHTS_FILE
    if not file.is_file():
        pickled = file.with_suffix(".bin").is_file()
        why = (
            f"it has {file.with_suffix('.bin').name}, a pickle, which could run code"
            if pickled
            else None
        )
        raise UserError(
            f"the adapter has no {WEIGHTS_FILE}",
            where=f"lora.path={path}",
            why=why,
            fix="save it again with peft's save_pretrained, which writes safetensors"
            if pickled
            else "copy the whole folder that peft's save_pretrained has written",
        )
    return file


def check_start(path: str, linears: Shapes) -> None:
    """Compare the header of the adapter's file with `linears`, [N, K] of those that get an adapter.

    Raise UserError, which names them, if tensors are missing, have another shape, or belong to nothing."""
    rank = start_of(path).r
    expected: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in linears.items():
        expected |= {f"{PREFIX}{name}{A}": (rank, columns), f"{PREFIX}{name}{B}": (rows, rank)}
    try:
        with safe_open(weights_of(path), framework="pt") as file:
            names = file.keys()  # safe_open is no mapping
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{WEIGHTS_FILE} cannot be read", where=f"lora.path={path}", why=str(error)
        ) from error
    if problems := list(_problems(stored, expected)):
        shown = "; ".join(problems[:6]) + (
            f"; and {len(problems) - 6} more" if problems[6:] else ""
        )
        raise UserError(
            f"the adapter does not fit the model: {len(problems)} of its tensors",
            where=f"lora.path={path}: {shown}",
            why=f"the model, {CONFIG_FILE} and {WEIGHTS_FILE} must agree on linears, ranks and shapes",
            fix="give the model that the adapter was trained on, or an adapter of this model",
        )


def _problems(
    stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in stored:
            yield f"{name} is missing"
        elif stored[name] != shape:
            yield f"{name} is {list(stored[name])}, and should be {list(shape)}"
    yield from (
        f"{name} belongs to no linear with an adapter" for name in stored if name not in expected
    )


def start_tensors(path: str, linears: Shapes) -> dict[str, Pair]:
    """Return A [r, K] and B [N, r] of each of `linears` ([N, K] by name), in BF16, from the adapter in `path`.

    Raise UserError for the reasons of `check_start`, and if a number is NaN or Inf."""
    check_start(path, linears)
    folded = start_of(path).folded
    pairs: dict[str, Pair] = {}
    rounded = 0
    with safe_open(weights_of(path), framework="pt") as file:
        for name in linears:
            stored = [file.get_tensor(f"{PREFIX}{name}{part}") for part in (A, B)]
            if folded != 1:
                stored[1] = stored[1] * folded
            a, b = (tensor.to(torch.bfloat16) for tensor in stored)
            for tensor, read in zip((a, b), stored, strict=True):
                if not bool(tensor.isfinite().all()):
                    raise UserError(
                        f"the adapter of {name} holds NaN or Inf",
                        where=f"lora.path={path}",
                        fix="begin from another adapter",
                    )
                rounded += not torch.equal(tensor.to(read.dtype), read)
            pairs[name] = (a, b)
    if folded != 1:
        note(
            f"the adapter's factor {folded:g} is no power of two, so B is multiplied by it, and lora.alpha is lora.r"
        )
    if rounded:
        note(f"{rounded} of {2 * len(pairs)} tensors of the adapter in {path} were rounded to BF16")
    return pairs


def other_base(path: str, model: str) -> str | None:
    """Return a sentence if the adapter in `path` names another base than `model`, or None."""
    named = start_of(path).base
    if not named or named == model or Path(named).resolve() == Path(model).resolve():
        return None
    return f"the adapter in {path} was trained on {named}, and the run has model.path={model}"
