"""A mixture of experts in vLLM's own class, on the meta device, beside the manifest of a publish. Run as a program:
vLLM's process groups are for a whole process.

    python tests/support/moe_on_meta.py FOLDER SCHEME GROUP_SIZE IGNORE...

Prints the GiB of a publish as the last line, and fails where the two differ in a name, a shape or a dtype.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qarl.process import configure_vllm_process
from qarl.quant.scheme import get_scheme
from qarl.rollout.publish.wire import Manifest, check_same_layers, expected_manifest
from qarl.rollout.publish.writers import WritePlan

Found = dict[tuple[str, str], tuple[torch.dtype, tuple[int, ...]]]


@contextmanager
def engine_model(folder: str, arguments: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """vLLM's config and module tree; what it loads and starts is left out."""
    configure_vllm_process()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    args = EngineArgs(model=folder, dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True, **arguments)
    config = args.create_engine_config()
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as file:
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            model = initialize_model(config)
        yield config, model


def registered(model: torch.nn.Module) -> Found:
    """Every parameter of the engine that has elements, but for the scales of a quantized KV cache."""
    return {
        (owner, name): (parameter.dtype, tuple(parameter.shape))
        for owner, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.numel() and name != "weight_shape" and not owner.endswith(".attn")
    }


def stacked(manifest: Manifest, plan: WritePlan) -> Found:
    """The manifest's tensors as the engine's modules hold them: parts one below the other, experts stacked."""
    found: Found = {}
    stacks = {"gate_up_proj": "w13", "down_proj": "w2"}
    for name, spec in manifest.items():
        owner, _, leaf = name.rpartition(".")
        place, stack = plan.by_owner[owner].name, owner.rpartition(".")[2]
        if leaf == "weight_shape":
            continue
        if stack in stacks:
            found[place, f"{stacks[stack]}_{leaf}"] = (spec.dtype, spec.shape)
        else:
            before = found.get((place, leaf), (spec.dtype, (0,)))[1][0]
            found[place, leaf] = (spec.dtype, (before + spec.shape[0], *spec.shape[1:]))
    return found


def main(folder: str, scheme_name: str, group_size: str, *ignore: str) -> None:
    scheme = get_scheme(scheme_name, int(group_size))
    overrides = {"quantization_config": scheme.quantization_config(ignore)} if scheme.quantized else {}
    with engine_model(folder, {"hf_overrides": overrides}) as (config, model):
        manifest = expected_manifest(config.model_config.hf_config, scheme, ignore)
        check_same_layers(model, manifest)
        ours, theirs = stacked(manifest, WritePlan(model, config, manifest)), registered(model)
        assert ours == theirs, {key: (ours.get(key), theirs.get(key)) for key in ours.keys() ^ theirs.keys()} or {
            key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]
        }
    print(sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in manifest.values()) / 2**30)


if __name__ == "__main__":
    main(*sys.argv[1:])
