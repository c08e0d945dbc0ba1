"""Reports the tensors that one publish sends to the engine: number, bytes and dtypes."""

from __future__ import annotations

import torch

from qarl.checks.memory import readable
from qarl.doctor.context import Context
from qarl.doctor.findings import Topic
from qarl.rollout.publish.wire import expected_manifest, quantized_layers


def check_dtypes(context: Context, topic: Topic) -> None:
    """The dtypes and the size of the published tensors."""
    scheme = context.scheme
    context.model.get()
    if scheme.quantized:
        context.quantized.get()
    manifest = expected_manifest(context.hf_config.get(), scheme, context.ignore)
    layers = quantized_layers(manifest)
    kinds: dict[str, set[str]] = {}
    bytes_sent = 0
    for name, spec in manifest.items():
        owner, _, leaf = name.rpartition(".")
        bytes_sent += spec.dtype.itemsize * torch.Size(spec.shape).numel()
        if owner in layers and leaf != "bias":
            kinds.setdefault(leaf, set()).add(str(spec.dtype).removeprefix("torch."))
    dtypes = ", ".join(f"{leaf} {' or '.join(sorted(found))}" for leaf, found in kinds.items())
    described = f"; {len(layers)} layers as {dtypes}" if layers else ""
    topic.ok(f"{len(manifest)} tensors, {readable(bytes_sent)} per publish{described}")


CHECKS = (check_dtypes,)
