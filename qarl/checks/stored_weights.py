"""The check of the tensors in a model's folder, by their headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from qarl.checks.check import Findings, note, ok
from qarl.checks.machine import Machine
from qarl.checks.model_folder import compared_tensors, refuse_no_weights
from qarl.checks.published_base import base_of, is_quantized
from qarl.config import Config


def stored_weights(
    config: Config, machine: Machine, hf_config: Any, model: nn.Module, weight_files: list[Path]
) -> Findings:
    """Compare the tensors in a model's folder with its config. Raise UserError if weights are missing, which a rank
    would otherwise find after the start of Ray."""
    if not weight_files:
        if machine.here:
            refuse_no_weights(config.model.path)
        return
    if is_quantized(hf_config):
        linears = base_of(config, hf_config, model).linears
        yield ok(f"{len(linears)} stored linears are quantized already, and stay as they are")
        return
    count = compared_tensors(weight_files, model)
    if count is None:
        yield note(
            f"the tensor names in {len(weight_files)} safetensors files differ from the model's, so shapes were not "
            "compared",
            fix="make sure that the files belong to this config.json",
        )
    else:
        yield ok(f"{count} stored tensors have the shapes that config.json says")
