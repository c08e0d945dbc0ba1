"""What a kernel for linears or experts offers, and what kernels ask of a GPU.

Kernels are classes that are never instantiated. `qarl.kernels.registry` chooses among them.

`assume` answers for a GPU that this machine lacks. Tensors on the meta device then stand for tensors on that GPU, so a
layer runs at its real sizes without memory, and each launch is reported and not made. The proof `costs` counts in this
way. PyTorch's FakeTensor with device `cuda` would not do: a build of PyTorch without CUDA cannot index such tensors,
and its autograd has no queue for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch

from qarl.kernels.speed import Speed
from qarl.schemes.base import Operands, Scheme
from qarl.schemes.kernel_choice import KernelChoice

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """A layout of `weight_packed` and `weight_scale`, of a weight [N, K] or a stack [E, N, K].

    If a weight is split along its first dimension into parts that fit, the layouts of the parts, one after another, are
    that of the weight.

    `codes`: name of the tensor with the codes. `fits`: whether a part of this shape has the layout. `convert`: makes
    the layout from wire tensors that fit, with the same first dimension. `restore`: its inverse.
    """

    codes: str
    fits: Callable[[tuple[int, ...]], bool]
    convert: Callable[[Tensors], dict[str, torch.Tensor]]
    restore: Callable[[Tensors], dict[str, torch.Tensor]]


def to_layout(tensors: Tensors, layout: Layout | None, shape: tuple[int, ...]) -> Tensors:
    """Return the wire tensors of a weight of `shape` in `layout`, if they are int4 and fit it, or unchanged."""
    if layout is None or "weight_packed" not in tensors or not layout.fits(shape):
        return tensors
    return layout.convert(tensors)


def from_layout(tensors: Tensors, layout: Layout | None) -> Tensors:
    """Return `tensors`, which may be in `layout`, as wire tensors without `weight_shape`."""
    return layout.restore(tensors) if layout is not None and layout.codes in tensors else tensors


def bf16_bytes(shape: tuple[int, int]) -> int:
    """Return the bytes of a BF16 weight [N, K]."""
    rows, columns = shape
    return 2 * rows * columns


def int4_bytes(scheme: Scheme, shape: tuple[int, int]) -> int:
    """Return the bytes of int4 codes, two in a byte, and of a BF16 scale for each group."""
    rows, columns = shape
    return rows * columns // 2 + 2 * rows * (columns // (scheme.group_size or columns))


def eight_bit_bytes(shape: tuple[int, int]) -> int:
    """Return the bytes of 8-bit codes, and of an FP32 scale for each row."""
    rows, columns = shape
    return rows * columns + 4 * rows


def dequantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return values * scale, rounded to BF16 [M, K]. The backward uses this as the activations."""
    return values.float().mul_(scale).to(torch.bfloat16)


class PreparedWeight(NamedTuple):
    """A weight and its scales in the layout of a kernel. For wire tensors, `weight` may be `weight_packed`."""

    weight: torch.Tensor
    scale: torch.Tensor


class Kernel:
    """What kernels of linears and of experts say of themselves.

    name                     as in reports, logs and `force`
    options                  the values of quant.kernels that may choose it
    layout                   a layout of int4 weights that `prepare` also accepts, so that FSDP2 can gather it, or None
    row_invariant            whether the bits of a row, of experts those of a token, do not depend on the other rows of
                             a call, whatever their number
    reference                whether it is plain PyTorch for any machine, which is slow and sums in another order than
                             the rollout engine
    computes_input_gradient  whether a linear's `backward_input` exists. If not, dX is the product with the dequantized
                             weight, which is kept until the backward
    holds_dequantized        whether `prepare` returns the BF16 weight, so that the backward needs no other copy
    """

    name: ClassVar[str]
    options: ClassVar[tuple[KernelChoice, ...]] = (KernelChoice.ENGINE,)
    layout: ClassVar[Layout | None] = None
    row_invariant: ClassVar[bool] = False
    reference: ClassVar[bool] = False
    computes_input_gradient: ClassVar[bool] = False
    holds_dequantized: ClassVar[bool] = False

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        """Return the bytes of a weight [N, K] as `prepare` returns it, or 0 if that is the wire tensors themselves.

        The memory plan asks. `shape` is a linear's, also for experts."""
        return 0


class LinearKernel(Kernel):
    """A kernel that computes y = x Q(W)^T + b. By default it multiplies unquantized activations.

    operands            what it multiplies
    group_sizes         the supported group sizes, or None if all are supported
    quantize_input      x BF16 [M, K] -> 8 bits [M, K] and FP32 scales [M, 1], or None if x is not quantized
    rounds_like_cuda    whether activations are rounded as by vLLM on CUDA (`qarl.kernels.reference.quantize_int8_cuda`)
    input_gradient_by   the kernel whose `backward_input` this one takes, or None
    speed               how fast it is on a GPU, for `qarl bench plan`, or None if nobody has measured it or its like
    least_rows          the rows of x from which on a row has the same bits in any number of rows. With fewer, `linear`
                        pads x; so does the engine at level `model` (`qarl.rollout.vllm_plugin.cuda_linears`)
    multiplies_experts  whether experts with these operands are multiplied by it, one after another: by a reference in
                        `ReferenceExperts`, by others in `CpuExperts`. Subclasses inherit it. Experts do not have packed
                        weights with rounded activations

    Of a kernel with an option of its own (not only the engine's) `prepare` returns a `PreparedWeight`, whose two
    tensors the engine keeps as the parameters of a layer (`qarl.rollout.vllm_plugin.own_linears`).
    """

    operands: ClassVar[Operands]
    group_sizes: ClassVar[tuple[int, ...] | None] = None
    quantize_input: ClassVar[Any] = None
    rounds_like_cuda: ClassVar[bool] = False
    input_gradient_by: ClassVar[type[LinearKernel] | None] = None
    speed: ClassVar[Speed | None] = None
    least_rows: ClassVar[int] = 1
    multiplies_experts: ClassVar[bool] = False

    @classmethod
    def unavailable(cls, device: torch.device, shape: tuple[int, int]) -> str | None:
        """Return why this kernel does not run on weights of `shape` [N, K] here, or None if it does."""
        raise NotImplementedError

    @classmethod
    def refusal(cls, scheme: Scheme, device: torch.device, shape: tuple[int, int]) -> str | None:
        """Return why this kernel does not multiply weights of `scheme` here, or None if it does."""
        why_not = cls.unavailable(device, shape)
        if why_not is not None:
            return why_not
        sizes = cls.group_sizes
        if sizes is None or scheme.group_size is None or scheme.group_size in sizes:
            return None
        return f"supports group sizes {', '.join(map(str, sizes))}, not {scheme.group_size}"

    @staticmethod
    def prepare(tensors: Tensors) -> Any:
        """Convert the wire tensors of one weight to what `linear` reads. Trained weights are converted once per
        optimizer step. With `quant.kernels` the engine converts int4 and int8 weights, and calls `linear` with FP8
        weights as they are on the wire, so for those return them unchanged."""
        raise NotImplementedError

    @staticmethod
    def in_layout(prepared: Any) -> Tensors:
        """Return the int4 codes and scales of `prepared` as tensors in `layout`, which share its memory, or nothing."""
        return {}

    @classmethod
    def prepare_gathered(cls, tensors: Tensors) -> Any:
        """Do the same for a weight that is converted in every forward, because FSDP2 gathers it or it is frozen. Some
        kernels have a cheaper way."""
        return cls.prepare(tensors)

    @classmethod
    def backward_input(cls, grad: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Return dX BF16 [M, K] from grad BF16 [M, N], any strides, and the wire tensors."""
        if cls.input_gradient_by is None:
            raise NotImplementedError
        return cls.input_gradient_by.backward_input(grad, tensors)

    @classmethod
    def linear(cls, x: torch.Tensor, prepared: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """x BF16 [M, K], rows may be strided -> BF16 [M, N], a new tensor. `prepared`: what `prepare` returned."""
        raise NotImplementedError

    @classmethod
    def dequantized_input(cls, x: torch.Tensor) -> torch.Tensor:
        """Return the activations BF16 [M, K] that `linear` multiplies for this x."""
        return x if cls.quantize_input is None else dequantize(*cls.quantize_input(x))

    @staticmethod
    def dequantized_weight(prepared: Any) -> torch.Tensor | None:
        """Return the BF16 weight [N, K] for the backward, if `prepared` contains it, or None."""
        return None


class ExpertsShape(NamedTuple):
    """Sizes of an expert layer: gate_up [E, 2I, H] with gate first, and down [E, H, I]. H: hidden, I: intermediate."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


class PreparedStacks(NamedTuple):
    """The stacks of a layer's experts in the names, dtypes and shapes of wire tensors, and what multiplies them."""

    gate_up: Tensors
    down: Tensors
    operands: Operands


class ExpertsKernel(Kernel):
    """A kernel for layers of experts.

    operands         what it multiplies
    device_type      "cpu" or "cuda": where an engine runs it, or None if none does
    engine_classes   names of vLLM's classes that run the same operators, if it has its own
    least_pairs      the fewest pairs of a token and an expert in a call, or 0. With fewer the operator rounds in
                     another order, so trainer and engine both add some (`with_least_pairs`)

    Of a kernel for GPUs with an option of its own (not only the engine's) `prepare` returns `PreparedStacks`, with the
    names, dtypes and shapes of wire tensors. The engine keeps them as the parameters of a layer
    (`qarl.rollout.vllm_plugin.cuda_experts`).
    """

    operands: ClassVar[tuple[Operands, ...]]
    device_type: ClassVar[str | None] = None
    engine_classes: ClassVar[tuple[str, ...]] = ()
    least_pairs: ClassVar[int] = 0

    @classmethod
    def all_operands(cls) -> tuple[Operands, ...]:
        """Return what it multiplies. A kernel that calls kernels of linears asks them."""
        return cls.operands

    @classmethod
    def unavailable(cls, scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        """Return why this kernel cannot be used for experts of this scheme and shape here, or None if it can."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, gate_up: Tensors, down: Tensors, operands: Operands) -> Any:
        """Convert the stacked wire tensors to what `forward` reads. `operands`: what the layer's scheme multiplies.
        Trained weights are converted once per optimizer step."""
        raise NotImplementedError

    @staticmethod
    def in_layout(prepared: Any) -> tuple[Tensors, Tensors]:
        """Return both int4 stacks of `prepared` as tensors in `layout`, which share its memory, or nothing."""
        return {}, {}

    @classmethod
    def prepare_gathered(cls, gate_up: Tensors, down: Tensors, operands: Operands) -> Any:
        """Do the same for stacks that are converted in every forward. They may already be in `layout`."""
        return cls.prepare(gate_up, down, operands)

    @classmethod
    def forward(
        cls, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, prepared: Any
    ) -> torch.Tensor:
        """x [T, H] BF16, FP32 weights and int32 ids [T, k] -> [T, H] BF16, a new tensor."""
        raise NotImplementedError

    @classmethod
    def warm(cls, scheme: Scheme, device: torch.device) -> bool:
        """Launch once what the driver compiles at its first launch, and wait for it. Return whether there is such."""
        return False

    @staticmethod
    def quantize(operands: Operands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize x BF16 [M, K] as this kernel does for 8-bit operands.

        Return values [M, K] and FP32 scales [M, 1].
        """
        raise NotImplementedError


def with_least_pairs(
    kernel: type[ExpertsKernel],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [T, H], `topk_weights` and `topk_ids` [T, k] with enough tokens for `kernel.least_pairs`.

    Copies of the last token are added: they read no other expert's weight. Drop their outputs."""
    missing = -(-kernel.least_pairs // topk_ids.shape[1]) - len(x)
    if missing <= 0:
        return x, topk_weights, topk_ids
    more = (torch.cat((t, t[-1:].expand(missing, -1))) for t in (x, topk_weights, topk_ids))
    padded_x, padded_weights, padded_ids = more
    return padded_x, padded_weights, padded_ids


@dataclass(frozen=True)
class AssumedGPU:
    """A GPU that is not there. `launched(name, tensors)` is called for each launch of a Triton kernel."""

    capability: tuple[int, int]
    processors: int
    launched: Callable[[str, Sequence[torch.Tensor]], None]


_ASSUMED: ContextVar[AssumedGPU | None] = ContextVar("assumed_gpu", default=None)


@contextmanager
def assume(gpu: AssumedGPU) -> Iterator[None]:
    """Let meta tensors stand for tensors on `gpu`."""
    token = _ASSUMED.set(gpu)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def is_gpu(device: torch.device) -> bool:
    """Return whether `device` is a GPU, or stands for the assumed one."""
    return device.type == "cuda" or (device.type == "meta" and _ASSUMED.get() is not None)


def has_gpu() -> bool:
    """Return whether this process sees a GPU, or assumes one."""
    return _ASSUMED.get() is not None or torch.cuda.is_available()


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    assumed = _ASSUMED.get()
    return assumed.capability if assumed else torch.cuda.get_device_capability(device)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    assumed = _ASSUMED.get()
    return assumed.processors if assumed else _processors(device)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device`. The host does not wait for the copy."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel, or report the launch to the assumed GPU."""
    assumed = _ASSUMED.get()
    if assumed is None:
        kernel[grid](*arguments, **options)
        return
    values = [getattr(argument, "base", argument) for argument in (*arguments, *options.values())]
    assumed.launched(
        str(kernel.fn.__name__), [value for value in values if isinstance(value, torch.Tensor)]
    )
