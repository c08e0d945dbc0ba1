"""The last versions of a model's weights, as its forward uses them: low-bit tensors, and the rest in BF16.

A trainer with engines of its own compares an answer with the weights that sampled it, which are not its own any more
(`qarl.verl.versions`). Each rank keeps its own shards on the host. In W4A16 a quantized weight takes 0.28 of its bytes
in BF16, about a seventh of its FP32 master, which verl's `save_model_to_cpu` copies. The masters stay as they are, but
for weights that are not quantized (embeddings, norms, lm_head; at level `off` all): these are replaced, and put back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from qarl.quant.fsdp import weight_shards


@dataclass(frozen=True)
class Weights:
    """One rank's weights by the names of their parameters. `packed`: bytes of the quantized ones. `others`: those that
    are not."""

    packed: dict[str, torch.Tensor]
    others: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.packed.values(), *self.others.values()))


class KeptVersions:
    """The weights of the last versions of `model`, which FSDP2 has sharded. `most`: how many are kept."""

    def __init__(self, model: nn.Module, most: int) -> None:
        self.model = model
        self.most = most
        self._weights: dict[int, Weights] = {}
        self._own: dict[str, torch.Tensor] | None = None

    def __contains__(self, version: int) -> bool:
        return version in self._weights

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that this rank's versions take."""
        return sum(weights.nbytes for weights in self._weights.values())

    def keep(self, version: int) -> None:
        """Keep the current weights as `version`, and drop the oldest ones. Raise RuntimeError if a weight was changed
        after it was quantized (`quantize_shards`)."""
        packed = {name: shard.packed() for name, shard in weight_shards(self.model).items()}
        others = {
            name: local.to(torch.bfloat16).to("cpu", copy=True)
            for name, local in self._unquantized().items()
        }
        self._weights[version] = Weights(packed, others)
        for old in sorted(self._weights)[: -self.most]:
            del self._weights[old]

    @torch.no_grad()
    def use(self, version: int | None) -> None:
        """Make the next forwards use the weights of `version`, or with None the model's own again. Nothing may update
        the weights in between. Raise KeyError for a version that is not kept."""
        weights = None if version is None else self._weights[version]
        locals_ = self._unquantized()
        if self._own is None:
            if weights is None:
                return
            self._own = {name: local.clone() for name, local in locals_.items()}
        for name, shard in weight_shards(self.model).items():
            shard.lend(None if weights is None else weights.packed[name])
        for name, local in locals_.items():
            local.copy_(self._own[name] if weights is None else weights.others[name])
        if weights is None:
            self._own = None
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what is gathered still is of the other version

    def _unquantized(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each trained weight that is not quantized."""
        shards = weight_shards(self.model)
        return {
            name: _local_part(parameter.detach())
            for name, parameter in self.model.named_parameters()
            if name not in shards and parameter.requires_grad
        }


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that FSDP2 may have sharded. It shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
