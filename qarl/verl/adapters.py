"""Adapters in verl's actor: a frozen base on every rank, A and B sharded by FSDP2 (docs/do/lora.md).

    before FSDP2      layer by layer every rank gets the first rank's weights, quantizes them and frees the BF16 ones
    FSDP2             shards what is left: A and B in FP32, and frozen in BF16 embeddings, norms and unquantized linears
    first publish     the base and the adapter; later ones the adapter alone, as long as all servers have the base
    checkpoints       A and B instead of the model, and the digests of the base (`BASE_FILE`)

verl has adapters of its own (`actor_rollout_ref.model.lora_rank`). They are peft's modules on linears, which would not
compute as the engine does, and `get_per_tensor_param` has no base in low bits for them. So verl does not know of these.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from verl.utils.device import get_device_name

from qarl.checkpoint.read_weights import BASE_FILE
from qarl.checkpoint.resumable import tensor_digest
from qarl.checkpoint.storage import write_json
from qarl.config.lora import engine_rank
from qarl.errors import UserError
from qarl.lora.adapter import with_rank
from qarl.lora.layers import Adapters
from qarl.quant.fsdp import gathered
from qarl.quant.linear import QuantLayer
from qarl.quant.state_dict import packed_state_dict
from qarl.rollout.publish.manifest import NamedTensor
from qarl.rollout.remote.delta import Tally
from qarl.rollout.remote.wire import encode_publish, numbered
from qarl.schemes import Scheme
from qarl.verl.publication import run_identity

Named = Iterator[tuple[str, Tensor]]


class ActorAdapters(Adapters):
    """The adapters of verl's actor, and what verl's checkpoint manager sees of the model: their tensors alone.

    frozen   the parameters that FSDP2 must leave alone: those of quantized weights, which are on the meta device
    tally    counts the bytes of the last publish"""

    def __init__(
        self,
        module: Any,
        config: Any,
        *,
        scheme: Scheme,
        ignore: tuple[str, ...],
        seed: int,
        device: torch.device,
    ) -> None:
        """Freeze `module`, which is quantized and aligned, and give its linears adapters, in place, on `device`."""
        base = module.config.name_or_path
        super().__init__(module, config, seed=seed, base=base, dtype=torch.float32, device=device)
        self.frozen = {parameter for parameter in module.parameters() if parameter.is_meta}
        self.tally = Tally()
        self._scheme = scheme
        self._ignore = ignore
        self._digests: Mapping[str, str] = {}
        if torch.distributed.get_rank() == 0:
            self._digests = {
                name: tensor_digest(tensor) for name, tensor in self._base(stacks=False)
            }

    def _move(self, module: nn.Module, device: torch.device) -> None:
        """Give every rank the first rank's tensors. verl loads weights only there, and leaves those of others on the
        meta device, unless weights are tied."""
        for owner in module.modules():
            tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
            for table in () if isinstance(owner, QuantLayer) and owner.frozen else tables:
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if tensor.is_meta:
                        whole = torch.empty_like(tensor, device=device)
                        table[name] = (
                            nn.Parameter(whole, False)
                            if isinstance(tensor, nn.Parameter)
                            else whole
                        )
                    else:
                        tensor.data = tensor.data.to(device)  # tied weights stay tied
                    torch.distributed.broadcast(table[name].detach(), src=0)

    def _base(self, *, stacks: bool) -> Named:
        return packed_state_dict(
            self.model, scheme=self._scheme, ignore=self._ignore, stacks=stacks
        )

    def stream(self, version: int, *, with_base: bool) -> Generator[NamedTensor]:
        """Return the publish of the adapter, after its base if `with_base`. All ranks must read it together."""
        rank = engine_rank(self.rank)
        alpha = rank * self.alpha / self.rank
        settings = {"r": rank, "alpha": alpha, "targets": self.targets, "base": self.base}
        device = torch.device(get_device_name())
        common: dict[str, Any] = {"version": version, "run": run_identity()}
        streams = []
        if with_base:
            base = ((name, gathered(tensor, device)) for name, tensor in self._base(stacks=True))
            streams.append(encode_publish(base, **common))
        rounded = (
            (name, with_rank(name, gathered(tensor, device, torch.bfloat16), rank))
            for name, tensor in self.tensors().items()
        )
        streams.append(encode_publish(rounded, adapter=settings, **common))
        self.tally = Tally()
        return numbered(self.tally.count(chain(*streams)))

    def metrics(self) -> dict[str, float]:
        return {"publish/mbytes": self.tally.bytes / 1e6} if self.tally.bytes else {}

    def save_base(self, folder: str) -> None:
        """Write the digests of the base to the checkpoint in `folder`. Only the first rank does."""
        if torch.distributed.get_rank() == 0:
            write_json(Path(folder) / BASE_FILE, {"published": self._digests})

    def check_base(self, folder: str) -> None:
        """Raise UserError on the first rank if the base is not that of the checkpoint in `folder`, or if that lacks its
        digests."""
        path = Path(folder) / BASE_FILE
        if torch.distributed.get_rank() != 0:
            return
        if not path.is_file():
            why = "it has the digests of the adapter's base"
            fix = "copy the checkpoint again, or use another one"
            raise UserError(
                "a file of the checkpoint is missing", where=str(path), why=why, fix=fix
            )
        saved = json.loads(path.read_text(encoding="utf-8"))["published"]
        if differ := sorted({name for name, _ in saved.items() ^ self._digests.items()}):
            raise UserError(
                f"{len(differ)} tensors of the base differ from those that the adapter was trained on",
                where=f"{self.base}: {differ[0]}",
                why="the model's files, or the quantizer, have changed since the checkpoint was written",
                fix="restore the old model and version of QaRL, or start fresh with a new name=...",
            )

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute, for verl's checkpoint manager, which also saves the config."""
        return getattr(self.__dict__["model"], name)

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load the tensors of `state_dict`. Raise UserError if `state` has others."""
        ours = self.tensors()
        if differing := sorted(ours.keys() ^ state.keys()):
            raise UserError(
                "the checkpoint has adapters of other linears",
                where=differing[0],
                why="this tensor is only in the checkpoint, or only in the model",
                fix="restore the model and lora.target_modules of the run",
            )
        for name, tensor in state.items():
            ours[name].copy_(tensor)
