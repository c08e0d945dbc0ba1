"""Write and read model folders in Hugging Face's format, quantized (compressed-tensors) or not.

vLLM can load these folders. transformers can load all but those with quantized experts: its quantizer for
compressed-tensors (5.10) has no module for them, so w4a16 experts are initialized at random, with a report, and w8a8
and fp8 experts lack their scales and fail in the forward. Only one shard at a time is in memory. A model that fits into
one shard is written to `model.safetensors`, otherwise to `model-00001-of-0000N.safetensors` etc. with an index. The
low-bit tensors come from the live model (`qarl.quant.state_dict.packed_state_dict`) or from stored BF16 weights
(`packed`). Both use the quantizer of a publish, so the bytes are those that were published.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from qarl.checkpoint.export_folder import write_mark
from qarl.checkpoint.storage import whole_folder
from qarl.config.lora import FOLDER
from qarl.errors import UserError
from qarl.lora.adapter import WEIGHTS_FILE, Adapter, write_adapter
from qarl.quant.convert import select_linears
from qarl.quant.meta_model import meta_model
from qarl.quant.quantize import quantize
from qarl.schemes import Scheme

MAX_SHARD_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_EXPERTS = (
    "transformers cannot load this folder, because it does not read low-bit experts: it initializes them at random, or "
    "fails in the forward. vLLM loads it"
)
_ADAPTER_BESIDE_EXPERTS = (
    "On a CPU, vLLM serves these experts beside an adapter only where QaRL is installed"
)

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class ModelFiles:
    """The contents of a model folder without the weights, as objects of Hugging Face's libraries."""

    config: Any
    tokenizer: Any
    generation_config: Any = None

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any) -> ModelFiles:
        return cls(model.config, tokenizer, getattr(model, "generation_config", None))

    @classmethod
    def from_folder(cls, folder: Path, *, trust_remote_code: bool = False) -> ModelFiles:
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        has_generation = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if has_generation else None
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return cls(
            config,
            AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code),
            generation,
        )


def save_model(
    folder: Path,
    files: ModelFiles,
    tensors: NamedTensors,
    *,
    scheme: Scheme,
    ignore: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    adapter: Adapter | None = None,
) -> Path:
    """Write `tensors` (checkpoint names) with config and tokenizer to `folder`, replacing an existing folder, and mark
    it as an export. Write `adapter` to a folder in it, with `folder` as its base: peft loads the base that is named
    there. `dtype`: as in `write_model`.

    The folder appears only when it is complete. Errors are those of `qarl.checkpoint.storage.whole_folder`.
    """
    with whole_folder(folder) as partial:
        write_model(partial, files, tensors, scheme=scheme, ignore=ignore, dtype=dtype)
        if adapter is not None:
            (partial / FOLDER).mkdir()
            write_adapter(partial / FOLDER, replace(adapter, base=str(folder.resolve())))
        write_mark(partial)
    return folder


def write_model(
    folder: Path,
    files: ModelFiles,
    tensors: NamedTensors,
    *,
    scheme: Scheme,
    ignore: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Write `tensors` with config and tokenizer into an existing folder.

    `dtype`: the dtype to write to config.json, if it is not the model's dtype.
    """
    config = copy.deepcopy(files.config)
    if dtype is not None:
        config.dtype = dtype
    if scheme.quantized:
        config.quantization_config = scheme.quantization_config(list(ignore))
    config.save_pretrained(folder)
    if files.generation_config is not None:
        # `save_pretrained` refuses settings that many public models have, such as do_sample=false with a temperature.
        files.generation_config.to_json_file(folder / "generation_config.json")
    files.tokenizer.save_pretrained(folder)
    _write_shards(folder, tensors)


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a model folder, one at a time. Raise UserError if the folder has no safetensors."""
    for path in weight_files(folder):
        yield from read_file(path)


def read_file(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a safetensors file, one at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  safe_open is no mapping
            yield name, file.get_tensor(name)


def header_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors in safetensors files, from their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # safe_open is no mapping
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of a model, or of an adapter. A whole file comes before an index, as for
    transformers. Raise UserError if there are none."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        shards = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(shards))]
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    raise UserError(
        "the folder contains no weights",
        where=str(folder),
        why=f"it has neither {_SINGLE} nor {_INDEX}",
    )


def packed(
    tensors: NamedTensors, scheme: Scheme, linears: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `tensors` under their checkpoint names. The weights of `linears` are quantized as in a publish."""
    for name, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        if leaf == "weight" and owner in linears:
            yield from quantize(tensor, scheme, name=name).named(owner)
        else:
            yield name, tensor


def linears_of(
    folder: Path, scheme: Scheme, ignore: Sequence[str], *, trust_remote_code: bool = False
) -> set[str]:
    """Return the names of the linears, including those of experts, that `scheme` quantizes in the model in `folder`."""
    if not scheme.quantized:
        return set()
    return set(
        select_linears(model_of(folder, trust_remote_code=trust_remote_code), scheme, ignore)[0]
    )


def limits(scheme: Scheme, linears: Iterable[str]) -> list[str]:
    """Return what other programs cannot do with a folder whose `linears` are quantized, a sentence each."""
    low_bit_experts = any(".experts." in name for name in linears)
    of_experts = _EXPERTS if low_bit_experts else None
    return [sentence for sentence in (scheme.export_limit, of_experts) if sentence]


def limits_of_adapter(scheme: Scheme, *, experts: bool) -> list[str]:
    """Return what plain vLLM cannot do with an adapter on a base. `experts`: whether the base has any."""
    beside_experts = _ADAPTER_BESIDE_EXPERTS if experts else None
    return [sentence for sentence in (beside_experts, scheme.cpu_adapter_limit) if sentence]


def model_of(folder: Path, *, trust_remote_code: bool = False) -> nn.Module:
    """Build the model of `folder`'s config.json on the meta device, to get names and shapes without memory."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return meta_model(config, trust_remote_code=trust_remote_code)


def _write_shards(folder: Path, tensors: NamedTensors) -> None:
    """Write `tensors` in shards of at most `MAX_SHARD_BYTES`. Only a shard of a single tensor may be larger."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append(_write_shard(folder, len(shards), pending))
            pending = {}
            size = 0
        pending[name] = _own_storage(tensor.detach().cpu())
        size += tensor.nbytes
        total += tensor.nbytes
    shards.append(_write_shard(folder, len(shards), pending))
    if len(shards) == 1:
        (folder / _shard_name(0)).rename(folder / _SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = _shard_name(number).replace(".safetensors", f"-of-{len(shards):05d}.safetensors")
        (folder / _shard_name(number)).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_shard(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    save_file(tensors, folder / _shard_name(number), metadata={"format": "pt"})
    # safetensors makes files that only their owner may read. Use the permissions of the model's other files.
    shutil.copymode(folder / "config.json", folder / _shard_name(number))
    return list(tensors)


def _shard_name(number: int) -> str:
    return f"model-{number + 1:05d}.safetensors"


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with its own storage. safetensors refuses tensors that share their storage."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
