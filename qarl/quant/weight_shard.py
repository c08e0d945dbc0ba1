"""`WeightShard`: one rank's rows of a quantized weight, which FSDP2 gathers in low bits.

FSDP2 shards a linear's weight [N, K] by rows and a stack of experts [E, N, K] by experts. After each optimizer step,
each rank casts its rows of the master to BF16 and quantizes them. The bytes are the same as if the whole weight were
quantized at once, because a scale never covers more than one row.

FSDP2 calls two methods of the sharded tensor: `fsdp_pre_all_gather` returns what to send, and `fsdp_post_all_gather`
wraps what was received. Here they are attributes of an ordinary tensor, so the masters stay ordinary FP32 DTensors for
optimizers, clipping and checkpoints. A new tensor, as after moving a model, needs them again (`attach`).

    uneven shards   FSDP2 pads every shard to the rows of the first. The padding is quantized too, and cut off after the
                    gather
    one rank        FSDP2 copies only the first tensor that `fsdp_pre_all_gather` returns. Therefore codes and scales
                    share one buffer of bytes
    layout          some kernels read int4 weights in a layout of their own. If each shard can be converted alone, this
                    layout is made once per optimizer step and gathered, so no forward has to convert a whole weight

This is the same in torch 2.11 and 2.13 (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from qarl.errors import UserError
from qarl.kernels.base import Layout, from_layout
from qarl.quant.quantize import nonfinite_error, quantize_unchecked
from qarl.schemes import Scheme

_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class GatheredWeight(torch.Tensor):
    """The parameter that FSDP2 registers while a layer's low-bit tensors are gathered.

    FSDP2 needs one tensor with the shape of the original parameter, for which autograd computes a gradient. The forward
    needs several low-bit tensors. So this tensor has the parameter's shape and dtype, and the low-bit tensors by name
    as the attribute `tensors`. It has no BF16 data, and operations that would read BF16 data raise. FSDP2 reuses the
    memory of `tensors` after the next resharding. Like torchao's FP8 weights, it uses PyTorch's extension point
    `__torch_dispatch__`.
    """

    tensors: dict[str, torch.Tensor]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, tensors: dict[str, torch.Tensor]
    ) -> GatheredWeight:
        device = next(iter(tensors.values())).device
        self: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        self.tensors = tensors
        return self

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Wrap `tensors`. FSDP2's parameter and all its aliases share this one dictionary."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # PyTorch's own way to disable it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch declares it without a signature
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return an alias for the operations with which FSDP2 and `nn.Parameter` wrap a tensor. Refuse all others."""
        weight = args[0]
        whole = func is torch.ops.aten.as_strided.default and tuple(args[1]) == tuple(weight.shape)
        if func in _ALIASES or whole:
            return cls(weight.shape, weight.dtype, weight.tensors)
        raise RuntimeError(
            f"{func} needs a BF16 weight, but only its low-bit tensors were gathered"
        )


Tensors = dict[str, torch.Tensor]


class _Slot(NamedTuple):
    """A tensor's place in the buffer of bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.stop].view(self.dtype).view(self.shape)


class WeightShard:
    """This rank's part of the weight `name` [N, K], or of a stack [E, N, K], quantized with `scheme`.

    `generation`: how many times it was quantized. `layout`: how the layer's kernel stores int4 weights, if it has
    its own layout (for example `TILES` of `qarl.kernels.cpu.vllm_linears`). `gather` converts back to wire tensors.
    """

    def __init__(
        self, name: str, scheme: Scheme, shape: tuple[int, ...], *, layout: Layout | None = None
    ) -> None:
        self.name, self.scheme, self.shape = name, scheme, torch.Size(shape)
        self.generation = 0
        self._layout = layout if scheme.packs_codes else None
        self.parameter: DTensor  # `attach` sets it
        self._buffer: torch.Tensor | None = None
        self._lent: torch.Tensor | None = None
        self._slots: tuple[_Slot, ...] = ()
        self._versions = (-1, -1)

    def attach(self, parameter: DTensor) -> None:
        """Make FSDP2 gather `parameter` through this object. Drop rows that were quantized from a different tensor."""
        self.parameter = parameter
        local = _local(parameter)
        if not self.is_attached(parameter):
            # FSDP2 looks for these attributes on the local tensor, which does not declare them.
            local.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]
            local.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]
            self.drop()

    def is_attached(self, parameter: DTensor) -> bool:
        """Return whether FSDP2 gathers `parameter` through this object."""
        return getattr(_local(parameter), "fsdp_pre_all_gather", None) == self.fsdp_pre_all_gather

    def drop(self) -> None:
        """Free the quantized rows. The next gather makes them again."""
        self._buffer = None

    def packed(self) -> torch.Tensor:
        """Return a copy of this rank's quantized rows on the host, as bytes. Raise RuntimeError if they are stale."""
        if self._buffer is None or self.stale:
            raise self._changed()
        return self._buffer.to("cpu", copy=True)

    def lend(self, packed: torch.Tensor | None) -> None:
        """Make FSDP2 gather `packed`, the rows of another version (`packed`), or with None the master's again."""
        self._lent = packed

    def _changed(self) -> RuntimeError:
        return RuntimeError(
            f"{self.name} has changed since its rows were quantized; call quantize_shards before"
        )

    @property
    def stale(self) -> bool:
        """Whether the master was changed since its rows were quantized."""
        return self._buffer is None or self._versions != self._now()

    def _now(self) -> tuple[int, int]:
        """Return autograd's counts of in-place updates of the DTensor and of its local tensor."""
        parameter = self.parameter
        return parameter._version, _local(parameter)._version

    @torch.no_grad()
    def quantize(self, device: torch.device | None = None) -> torch.Tensor | None:
        """Quantize this rank's rows if they have changed. `device`: where to compute. Default: the device of the rows.

        Return None if they have not, else a flag, int32 [1]. If it is not 0, a weight of these rows is NaN or Inf, and
        the caller must raise `refuse`. The host does not wait for the device.

        Raises:
            UserError: the shape does not fit the scheme.
        """
        if not self.stale:
            return None
        parameter = self.parameter
        versions = self._now()
        local = _local(parameter)
        ranks = parameter.device_mesh.size(-1)
        padded = -(-self.shape[0] // ranks)
        # Cast on `device`: verl's offload may still be copying the masters, and a cast on the host would not wait.
        rows = local.detach().to(device or local.device, non_blocking=True).to(torch.bfloat16)
        if len(rows) < padded:
            rows = torch.cat((rows, rows.new_zeros(padded - len(rows), *rows.shape[1:])))
        quantized, nonfinite = quantize_unchecked(rows.flatten(0, -2), self.scheme, name=self.name)
        tensors = quantized.tensors
        tensors.pop("weight_shape", None)
        if len(self.shape) == 3:
            tensors = {name: tensor.unflatten(0, (padded, -1)) for name, tensor in tensors.items()}
        layout = self._layout
        if (
            layout is not None
            and layout.fits(self.shape)
            and layout.fits((padded, *self.shape[1:]))
        ):
            tensors = layout.convert(tensors)
        self._store(tensors)
        self._versions = versions
        self.generation += 1
        return nonfinite

    def refuse(self) -> UserError:
        """Free the quantized rows, and return the error for a NaN or an Inf in this rank's rows."""
        self.drop()
        return nonfinite_error(_local(self.parameter).detach().to(torch.bfloat16), self.name)

    def _store(self, tensors: Tensors) -> None:
        """Copy the tensors into one buffer. Those with the widest numbers come first, so that all are aligned."""
        slots: list[_Slot] = []
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            slots.append(_Slot(name, tensor.dtype, tuple(tensor.shape), end, end + tensor.nbytes))
            end += tensor.nbytes
        buffer = torch.empty(end, dtype=torch.uint8, device=next(iter(tensors.values())).device)
        for slot in slots:
            slot.of(buffer).copy_(tensors[slot.name])
        self._buffer, self._slots = buffer, tuple(slots)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], None]:
        """Return the tensors that this rank sends. FSDP2 calls this before every gather.

        It must have one parameter. With five, FSDP2 would require tensors of the master's shape.
        """
        if self._buffer is None or self.stale:
            raise self._changed()
        rows = self._buffer
        if self._lent is not None:
            rows = self._lent.to(rows.device)
        if mesh.size() == 1:
            return (rows,), None
        return tuple(slot.of(rows) for slot in self._slots), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[GatheredWeight, tuple[torch.Tensor, ...]] | None:
        """Wrap the gathered tensors without a copy. They are views of buffers that FSDP2 frees and fills again."""
        if len(gathered) == 1:
            gathered = tuple(slot.of(gathered[0]) for slot in self._slots)
        tensors = {
            slot.name: self._cut(tensor) for slot, tensor in zip(self._slots, gathered, strict=True)
        }
        if out is None:
            return GatheredWeight(self.shape, param_dtype, tensors), ()
        assert isinstance(out, GatheredWeight)
        out.tensors.update(tensors)
        return None

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the gathered `tensor` without the padding of the last shards."""
        ranks = self.parameter.device_mesh.size(-1)
        padded = -(-self.shape[0] // ranks) * ranks
        return tensor[: self.shape[0] * len(tensor) // padded]

    def gather(self) -> Tensors:
        """Return the whole weight's wire tensors. All ranks must call this together, after `quantize`."""
        assert self._buffer is not None
        mesh = self.parameter.device_mesh
        placements = self.parameter.placements
        tensors = {}
        for slot in self._slots:
            part = DTensor.from_local(
                slot.of(self._buffer).view(torch.uint8), mesh, placements, run_check=False
            )
            tensors[slot.name] = self._cut(part.full_tensor().view(slot.dtype))
        return dict(from_layout(tensors, self._layout))


def _local(parameter: DTensor) -> torch.Tensor:
    """Return the tensor on which FSDP2 looks up the methods. In torch 2.13, `to_local` returns only a view of it."""
    return parameter._local_tensor
