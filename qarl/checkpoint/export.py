"""Write a checkpoint of a run as a model folder. `qarl export` and the end of a verl run use this module.

The backend of the run may be local or verl. For verl, the files of all ranks are merged. The checkpoint's digests or
checksums are checked first, and the checkpoint is never changed. The model folder appears only when it is complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from qarl.checkpoint.best_step import CheckpointStep


@dataclass(frozen=True, config={"extra": "forbid"})
class ExportRequest:
    """The arguments of the command line. `step`: the step of the checkpoint, "best", or None for the latest one."""

    run: Path
    output: Path
    step: CheckpointStep | None = None
    format: Literal["quantized", "bf16", "fp32"] = "quantized"
    overwrite: bool = False
    trust_remote_code: bool = False


def export(request: ExportRequest) -> str:
    """Write the model folder. Return a line of text about it.

    Raise UserError if the checkpoint is missing or damaged, if the output folder cannot be used, or if the disk is
    full.
    """
    import torch

    from qarl.checkpoint.export_adapter import export_adapter, open_trained
    from qarl.checkpoint.export_folder import check_output
    from qarl.checkpoint.model_files import (
        ModelFiles,
        limits,
        linears_of,
        packed,
        save_model,
        weight_files,
    )
    from qarl.checkpoint.read_weights import (
        find_checkpoint,
        model_of_run,
        open_source,
        read_all,
        reading,
    )
    from qarl.checkpoint.storage import recover
    from qarl.schemes import UNQUANTIZED, get_scheme

    folder = find_checkpoint(request.run, request.step)
    model = model_of_run(folder)
    check_output(request.output, request.run, folder, model=model, overwrite=request.overwrite)
    trust = request.trust_remote_code
    with reading(folder):
        if trained := open_trained(folder, trust_remote_code=trust):
            text = export_adapter(trained, request.output, request.format, trust)
            return f"{request.output}: step {trained.step} of {request.run}, {text}"
        source = open_source(folder, trust_remote_code=trust)
        quant = source.config["quant"]
        scheme = get_scheme(quant["scheme"], group_size=quant["group_size"])
        if request.format != "quantized":
            scheme = UNQUANTIZED
        files = ModelFiles.from_folder(source.model_folder, trust_remote_code=trust)
        linears = linears_of(source.model_folder, scheme, quant["ignore"], trust_remote_code=trust)
    dtype = torch.float32 if request.format == "fp32" else torch.bfloat16
    tensors = packed(read_all(folder, source.tensors(dtype)), scheme, linears)
    output = request.output.resolve()
    if output.parent.is_dir():
        recover(output.parent, output.name)
    save_model(output, files, tensors, scheme=scheme, ignore=quant["ignore"], dtype=dtype)
    kind = request.format if request.format != "quantized" else f"quantized, {scheme.name}"
    size = sum(path.stat().st_size for path in weight_files(output))
    line = f"{request.output}: step {source.step} of {request.run}, {kind}, {size / 1e6:.4g} MB of weights"
    sentences = limits(scheme, linears)
    if any(".experts." in name for name in linears):
        sentences.append("Both load format=bf16")
    return ". ".join([line, *sentences])
