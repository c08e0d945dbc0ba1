"""Make a model folder with more positions, by YaRN, of a model whose config.json has too few for a run.

    python scripts/stretch_positions.py MODEL OUTPUT positions=18432
    python scripts/stretch_positions.py MODEL OUTPUT positions=18432 files=copy

MODEL is a folder on this machine. OUTPUT gets a config.json with `rope_parameters` of type yarn and the new
`max_position_embeddings`, and links to all other files of MODEL, or copies. No weight changes. YaRN (arXiv 2309.00071)
divides low frequencies of the rotary embedding by factor = positions / original positions, keeps high ones, and scales
queries and keys by 0.1 ln(factor) + 1. It changes every position, the first ones too, and the model was not trained
with it: measure it before a run (`qarl eval`).

The file has only keys that transformers (`_compute_yarn_parameters`) and vLLM (`YaRNScalingRotaryEmbedding`) both read:
`rope_theta`, `factor` and `original_max_position_embeddings`, the same in the releases of both lock files. Before
OUTPUT is written, QaRL compares both rotations, as each run does, and refuses the families that it does not train.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from qarl.align.model_config import check_config_keys
from qarl.checkpoint.storage import check_place, whole_folder
from qarl.checks.model_folder import check_model_folder
from qarl.config.command_arguments import read_request
from qarl.console import entry
from qarl.errors import UserError
from qarl.families import check_family

EXAMPLE = "python scripts/stretch_positions.py MODEL OUTPUT positions=18432"
WORDS = ("model", "output")
"""Keys of the arguments that have none."""
CONFIG = "config.json"
LEGACY = ("rope_scaling", "rope_theta")
"""Keys of config.json, as transformers 4 wrote it, whose values move into `rope_parameters`."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Stretching:
    """The arguments of the command line. `files`: what OUTPUT gets of MODEL's other files."""

    model: Path
    output: Path
    positions: PositiveInt
    files: Literal["link", "copy"] = "link"


def stretch(request: Stretching) -> str:
    """Write the folder. Return a report for people. Raise UserError before anything is written."""
    check_folders(request)
    described = read_config(request.model)
    config = stretched_config(described, request.positions)
    check_config(config)
    others = [
        file for file in sorted(request.model.iterdir()) if file.is_file() and file.name != CONFIG
    ]
    copied = sum(file.stat().st_size for file in others) if request.files == "copy" else 0
    with whole_folder(request.output, needed_bytes=copied) as new:
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in others:
            if request.files == "copy":
                shutil.copyfile(file, new / file.name)
            else:
                (new / file.name).symlink_to(file.resolve())
    parameters = config["rope_parameters"]
    original = parameters["original_max_position_embeddings"]
    how = "copied" if request.files == "copy" else "linked"
    return (
        f"{request.output}: {original} positions stretched to {request.positions} by YaRN, factor "
        f"{parameters['factor']:g}; {len(others)} files {how}\n"
        f"The model was not trained with these positions: measure it, qarl eval model={request.output} ..."
    )


def check_folders(request: Stretching) -> None:
    """Raise UserError if MODEL is no folder with a model, or OUTPUT cannot be written or has files."""
    check_model_folder(str(request.model))
    if not request.model.is_dir():
        raise UserError(
            f"there is no model folder '{request.model}'",
            where="model",
            why="a model of the Hub must be on this machine, because its config.json changes",
            fix=f"hf download {request.model} --local-dir DIR, and give DIR",
        )
    check_place(request.output)
    if request.output.exists() and any(request.output.iterdir()):
        raise UserError(
            f"{request.output} is not empty",
            where="output",
            why="nothing is replaced",
            fix="choose a different folder, or remove this one yourself",
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a model's config.json."""
    try:
        described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return dict(described)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"cannot read the config of '{folder}'",
            where=f"model: {folder / CONFIG}",
            why=f"{type(error).__name__}: {error}",
            fix="give a folder with a config.json as transformers writes it",
        ) from error


def stretched_config(described: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """Return the config.json `described` with `positions` positions. Raise UserError if YaRN cannot make them of it."""
    old = hugging_face_config(described)
    refuse_stretched(old)
    original = old.max_position_embeddings
    if positions <= original:
        raise UserError(
            f"the model already has {original} positions",
            where=f"positions={positions}",
            fix="give more, or use the model as it is",
        )
    factor = positions / original
    if original * factor < positions:
        # vLLM multiplies them again, and would have a row of cosines too few.
        raise UserError(
            f"{positions} is not {original} times a number that a computer has",
            where=f"positions={positions}",
            why=f"{original} x ({positions} / {original}) is {original * factor!r} in float64",
            fix=f"give positions={positions + 1}, or a multiple of {original}",
        )
    return {key: value for key, value in described.items() if key not in LEGACY} | {
        "max_position_embeddings": positions,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": old.rope_parameters["rope_theta"],
            "factor": factor,
            "original_max_position_embeddings": original,
        },
    }


def refuse_stretched(config: Any) -> None:
    """Raise UserError if the config's rotary embedding is another than the plain one of whole heads."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    plain = parameters.get("rope_type") == "default" and set(parameters) <= {
        "rope_type",
        "rope_theta",
    }
    if plain and isinstance(getattr(config, "max_position_embeddings", None), int):
        return
    raise UserError(
        "the rotary embedding of this model cannot be stretched",
        where=f"model: rope_parameters in {CONFIG}: {parameters}",
        why="YaRN replaces a plain rotary embedding of one frequency table for all layers and whole heads; another "
        "type, such as one that is stretched already, would be lost",
        fix="give the original model, with more positions= if they were too few",
    )


def check_config(described: Mapping[str, Any]) -> None:
    """Raise UserError if trainer and engine would not compute the same from the stretched config."""
    config = hugging_face_config(described)
    check_family(config)
    check_config_keys(config)


def hugging_face_config(described: Mapping[str, Any]) -> Any:
    """Return transformers' object of a config.json. Raise UserError if transformers refuses it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**described)
    except Exception as error:  # the type depends on the family and the key
        raise UserError(
            "transformers refuses the model's config",
            where=f"model: {CONFIG}",
            why=" ".join(str(error).split())[:400],
            fix="give a model of a family that has rotary embeddings of type yarn",
        ) from error


def _main(argv: list[str]) -> int:
    keys = list(WORDS)
    arguments = [f"{keys.pop(0)}={word}" if "=" not in word and keys else word for word in argv]
    print(stretch(read_request(Stretching, arguments, example=EXAMPLE)))
    return 0


main, describe = entry(_main, __doc__)

if __name__ == "__main__":
    sys.exit(main())
