"""Export the adapter of a checkpoint together with the base that it was trained on.

    OUTPUT/           the base, quantized as in the run: a model folder for vLLM and transformers
    OUTPUT/adapter/   the adapter in peft's format

The base is not in a checkpoint. It is quantized again from the model's own folder, and every tensor must have the
digest that the checkpoint recorded. The adapter is not merged into the base: the sum would have to be quantized again,
so its log-probs would not be those of the run.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qarl.checkpoint.model_files import (
    ModelFiles,
    limits,
    limits_of_adapter,
    linears_of,
    packed,
    read_tensors,
    save_model,
    weight_files,
)
from qarl.checkpoint.read_weights import BASE_FILE, open_source
from qarl.checkpoint.resumable import open_checkpoint, tensor_digest
from qarl.config.lora import ALL_LINEAR, FOLDER
from qarl.errors import UserError
from qarl.lora.adapter import PREFIX, WEIGHTS_FILE, A, Adapter, peft_targets, read_adapter
from qarl.quant.meta_model import meta_model, unquantized_config
from qarl.quant.published import PublishedBase
from qarl.rollout.vllm_plugin import experts_of
from qarl.schemes import Scheme, get_scheme


class Trained(NamedTuple):
    """The contents of a checkpoint with an adapter. `published`: the digests of the base's tensors, by name."""

    step: int
    config: Mapping[str, Any]
    published: Mapping[str, str]
    adapter: Adapter


def open_trained(folder: Path, *, trust_remote_code: bool = False) -> Trained | None:
    """Open the checkpoint in `folder`. Return None if it has no adapter. Raise UserError if it is damaged."""
    if (folder / WEIGHTS_FILE).is_file():
        checkpoint = open_checkpoint(folder)
        return Trained(
            checkpoint.step, checkpoint.config, checkpoint.state["published"], read_adapter(folder)
        )
    if not (base := folder / "actor" / BASE_FILE).is_file():
        return None
    source = open_source(folder, trust_remote_code=trust_remote_code)
    tensors = dict(source.tensors(torch.bfloat16))
    lora = source.config["lora"]
    linears = [name.removeprefix(PREFIX).removesuffix(A) for name in tensors if name.endswith(A)]
    targets = peft_targets(linears, lora.get("target_modules") or [ALL_LINEAR])
    adapter = Adapter(
        lora["r"], lora["alpha"] or lora["r"], targets, source.config["model"]["path"], tensors
    )
    return Trained(
        source.step,
        source.config,
        json.loads(base.read_text(encoding="utf-8"))["published"],
        adapter,
    )


def export_adapter(trained: Trained, output: Path, format: str, trust_remote_code: bool) -> str:
    """Write base and adapter to `output`. Return a few words about them. The arguments are those of `qarl export`.

    Raise UserError if `format` is not "quantized", or if the model's folder no longer has the base of the run."""
    if format != "quantized":
        raise UserError(
            f"format={format} is not possible for a run with adapters",
            why="the adapter would have to be merged into an unquantized base, but it was trained on the quantized one",
            fix="use format=quantized, which writes base and adapter",
        )
    quant = trained.config["quant"]
    path = trained.config["model"]["path"]
    scheme = get_scheme(quant["scheme"], group_size=quant["group_size"])
    base = _local(path)
    files = ModelFiles.from_folder(base, trust_remote_code=trust_remote_code)
    linears = linears_of(base, scheme, quant["ignore"], trust_remote_code=trust_remote_code)
    tensors = _as_recorded(
        _base_tensors(base, scheme, linears, files, trust_remote_code), trained.published, path
    )
    adapter = trained.adapter
    save_model(output, files, tensors, scheme=scheme, ignore=quant["ignore"], adapter=adapter)
    what = f"the base, {scheme.name}, and in {FOLDER}/ the adapter, r={adapter.r}, {adapter.nbytes / 1e6:.4g} MB"
    of_adapter = limits_of_adapter(scheme, experts=bool(experts_of(files.config)))
    return ". ".join([what, *limits(scheme, linears), *of_adapter])


def _base_tensors(
    base: Path,
    scheme: Scheme,
    linears: Collection[str],
    files: ModelFiles,
    trust_remote_code: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the base in a folder as the run has published them. One that is quantized stays as it is."""
    if getattr(files.config, "quantization_config", None):
        model = meta_model(unquantized_config(files.config), trust_remote_code=trust_remote_code)
        yield from PublishedBase(weight_files(base), model, scheme).tensors()
        return
    rounded = ((name, tensor.bfloat16()) for name, tensor in read_tensors(base))
    yield from packed(rounded, scheme, linears)


def _local(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # the Hub's client raises different types
        raise UserError(
            f"the base {path} is not on this machine",
            where="model.path of the run",
            why=f"there is no folder {Path(path).absolute()}, and the Hub's cache has no model of this name",
            fix="repeat the command in the folder in which the run was started, or put the model back",
        ) from error


def _as_recorded(
    tensors: Iterator[tuple[str, Tensor]], recorded: Mapping[str, str], path: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `recorded` (name -> digest) lists, each once. Raise UserError if one is missing or
    has other bytes."""
    missing = set(recorded)
    for name, tensor in tensors:
        if name not in missing:  # a tied lm_head
            continue
        if tensor_digest(tensor) != recorded[name]:
            raise _other_base(path, f"{name} has other bytes")
        missing.remove(name)
        yield name, tensor
    if missing:
        raise _other_base(path, f"{min(missing)} is missing")


def _other_base(path: str, why: str) -> UserError:
    return UserError(
        f"{path} is not the base that the adapter was trained on",
        why=f"{why}, compared with the checkpoint's digests",
        fix="restore the model's files of the run",
    )
