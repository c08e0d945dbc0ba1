"""What a quantization scheme is: the number formats of its operands, and its tensors on the wire and on disk.

`Scheme` is the base of all schemes. As it stands, it quantizes nothing. A subclass overrides what differs. Nobody
outside this package asks which scheme it has: a scheme answers the question itself.

Nothing here imports torch, so that reading a config stays cheap. Dtypes have the names that torch gives them, and
`qarl.quant.wire_specs` converts them. compressed-tensors is imported only inside functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from qarl.errors import UserError
from qarl.schemes.kernel_choice import KernelChoice
from qarl.schemes.plan_terms import PlanTerms

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

QUANT_METHOD = "compressed-tensors"
TARGETS = ("Linear",)
LAST = 100
"""The `order` of a scheme that does not set one."""
BYTES = {"int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}
"""Bytes of one element, by torch's name of the dtype."""


@dataclass(frozen=True)
class QuantArgs:
    """The number format of one operand, with the field names of compressed-tensors' `QuantizationArgs`.

    `type` is "int" or "float". `strategy` says which elements share a scale: "group" (`group_size` elements along K),
    "channel" (an output row) or "token" (a row of the activations). `dynamic` is true if the scale is computed in the
    forward, as for tokens.
    """

    num_bits: int
    type: str
    strategy: str
    group_size: int | None = None
    symmetric: bool = True
    dynamic: bool = False

    def to_compressed_tensors(self) -> QuantizationArgs:
        from compressed_tensors.quantization import QuantizationArgs

        return QuantizationArgs(**asdict(self))

    @classmethod
    def from_compressed_tensors(cls, args: QuantizationArgs) -> QuantArgs:
        """Return `args` as a QuantArgs. Raise ValueError if they set act order, a block structure or a scale dtype."""
        for field in ("actorder", "block_structure", "scale_dtype"):
            value = getattr(args, field)
            if value is not None:
                raise ValueError(f"{field}={value} is not supported")
        values = args.model_dump(mode="json")
        return cls(**{field.name: values[field.name] for field in fields(cls)})


class WireSpec(NamedTuple):
    """One tensor on the wire: torch's name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return BYTES[self.dtype] * prod(self.shape)


class Operands(NamedTuple):
    """What a kernel multiplies: the number formats of weights and activations, whatever the sizes of groups.

    Schemes whose weights differ only in how they are rounded have the same operands, and so the same kernels."""

    weights: str
    activations: str

    @property
    def rounds_activations(self) -> bool:
        return self.activations != "bf16"


BF16_BF16 = Operands("bf16", "bf16")
INT4_BF16 = Operands("int4", "bf16")
INT4_INT8 = Operands("int4", "int8")
INT8_INT8 = Operands("int8", "int8")
FP8_FP8 = Operands("float8", "float8")


@dataclass(frozen=True)
class Grid:
    """How weights that share a scale become codes (`qarl.quant.quantize`).

    The scale is absmax / `half_range`, unless `Scheme.scales` has another rule. A code is weight / scale, clamped to
    `lowest`..`highest` and rounded.
    """

    half_range: float
    lowest: int
    highest: int


@dataclass(frozen=True)
class Cpu:
    """What a scheme asks about a CPU: its instruction sets, as Linux names them, and whether it has AMX's tiles."""

    flags: frozenset[str]
    tiles: bool


@dataclass(frozen=True)
class Scheme:
    """The number formats of the weights and the activations of every quantized Linear.

    `qarl.schemes.get_scheme` makes an instance. `group_size`: the number of elements along K that share a scale, or
    None if the scheme has no groups.
    """

    group_size: int | None = None

    name: ClassVar[str]
    """The value of quant.scheme."""
    order: ClassVar[int] = LAST
    """The scheme's rank in lists of schemes, as in help and errors."""
    format: ClassVar[str | None] = None
    """compressed-tensors' name for the layout on disk and on the wire."""
    plan: ClassVar[PlanTerms] = PlanTerms()
    """What `qarl bench plan` needs to know."""
    grid: ClassVar[Grid | None] = None
    """The codes of the weights. None: nothing is quantized."""
    codes: ClassVar[str] = "bfloat16"
    """The dtype of the tensor with the codes on the wire."""
    packs_codes: ClassVar[bool] = False
    """Whether a word on the wire has several codes."""
    cpu_flags: ClassVar[tuple[str, ...]] = ()
    """The instruction sets that a CPU needs."""
    cpu_flags_reason: ClassVar[str] = ""
    cpu_multiple: ClassVar[int] = 1
    """Output and input sizes of a layer must be multiples of it in vLLM's kernel for CPUs."""
    capability: ClassVar[int] = 80
    """The compute capability that a GPU needs, times ten."""
    capability_reason: ClassVar[str] = "for BF16 arithmetic and vLLM's Marlin kernel"
    capability_fix: ClassVar[str] = "use a newer GPU"
    repacked_on_cpus: ClassVar[bool] = False
    """Whether vLLM on a CPU keeps linears in a layout of its own, which a trainer in its process cannot read."""
    experts_repacked_on_cpus: ClassVar[bool] = False
    """The same for experts."""
    no_gpu_kernel: ClassVar[str | None] = None
    """Why QaRL's own kernel for this scheme is not for GPUs, if it is not."""
    cpu_adapter_limit: ClassVar[str | None] = None
    """Why plain vLLM does not serve adapters beside such a base on a CPU, if it does not: a sentence for an export.
    `qarl.rollout.vllm_plugin` then has a class of its own for the base."""
    export_limit: ClassVar[str | None] = None
    """What plain vLLM makes of an export, if it is not this scheme: a sentence."""

    @classmethod
    def of(cls, group_size: int) -> Scheme:
        """Return the scheme with groups of `group_size`, which is ignored by a scheme without groups."""
        return cls()

    @property
    def weights(self) -> QuantArgs | None:
        """The format of the weights. None: nothing is quantized."""
        return None

    @property
    def input_activations(self) -> QuantArgs | None:
        """The format of the activations. None: they stay BF16."""
        return None

    @property
    def quantized(self) -> bool:
        return self.weights is not None

    @property
    def rounds_activations(self) -> bool:
        return self.operands.rounds_activations

    @property
    def is_coarse(self) -> bool:
        """Whether the weights have so few bits that log-probs are far from those of the BF16 model on some tokens."""
        return self.weights is not None and self.weights.num_bits <= 4

    @property
    def operands(self) -> Operands:
        """What a kernel of this scheme multiplies. Override it if QuantArgs does not tell the formats apart."""
        return Operands(_number_format(self.weights), _number_format(self.input_activations))

    def check_shape(self, name: str, out_features: int, in_features: int) -> str | None:
        """Return why this scheme cannot quantize the weight `name` [out_features, in_features], or None if it can."""
        group = self.group_size
        if not group or in_features % group == 0:
            return None
        shape = f"{name} has shape [{out_features}, {in_features}]"
        return f"{shape}: {in_features} input features are not a multiple of group_size {group}"

    def scales(self, groups: Any) -> Any:
        """Return the scale of each group by a rule of the scheme's own, or None: absmax / the grid's `half_range`.

        `groups`: a tensor of weights [N, K/g, g]. The scales have its dtype and the shape [N, K/g], and a scale of 0
        becomes the dtype's eps. The rule must look at one group at a time, because a rank may have only some rows, and
        it may not change `groups`. On GPUs the PyTorch quantizer runs."""
        return None

    def wire_specs(self, out_features: int, in_features: int) -> dict[str, WireSpec]:
        """Return each wire tensor that represents a BF16 [out_features, in_features] weight."""
        return {"weight": WireSpec("bfloat16", (out_features, in_features))}

    def wire_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of the wire tensors of an [out_features, in_features] weight."""
        return sum(spec.nbytes for spec in self.wire_specs(out_features, in_features).values())

    def engine_refusal(self, kernels: KernelChoice) -> UserError | None:
        """Return an error if the engine would compute another scheme. `kernels`: a value of quant.kernels."""
        return None

    def cpu_refusal(self, cpu: Cpu, environment: Mapping[str, str]) -> UserError | None:
        """Return an error if vLLM or the trainer cannot multiply on this CPU, or not equally."""
        missing = [flag for flag in self.cpu_flags if flag not in cpu.flags]
        if not missing:
            return None
        return UserError(
            f"this CPU cannot run quant.scheme={self.name}: it lacks {' and '.join(missing)}",
            where="quant.scheme",
            why=self.cpu_flags_reason,
            fix="set quant.scheme=bf16, or use a GPU or a newer CPU (Intel since Ice Lake, AMD since Zen 4)",
        )

    def gpu_refusal(
        self, capability: int, kernels: KernelChoice, disabled_kernels: Collection[str]
    ) -> UserError | None:
        """Return an error if vLLM would compute another scheme on a GPU, or choose a kernel that does not run there.

        `capability`: times ten. `kernels`: a value of quant.kernels. `disabled_kernels`: classes that vLLM may not use.
        """
        if capability >= self.capability:
            return None
        return UserError(
            f"compute capability {capability / 10} is too low for quant.scheme={self.name}",
            where=f"quant.scheme={self.name}",
            why=f"{self.capability / 10} is needed {self.capability_reason}",
            fix=self.capability_fix,
        )

    def gpu_experts_refusal(self, where: str, kernels: KernelChoice) -> UserError | None:
        """Return an error if vLLM cannot run experts of this scheme on a GPU. `where`: the keys, for the error.
        `kernels`: a value of quant.kernels."""
        return None

    def gpu_adapted_experts_refusal(self, where: str) -> UserError | None:
        """The same for experts that have adapters beside them, which trainer and engine must multiply equally."""
        return None

    def quantization_config(self, ignore: Sequence[str] = ()) -> dict[str, Any]:
        """Return the `quantization_config` for `config.json` and vLLM's `hf_overrides`, in plain JSON types.

        Fields without a value are omitted, not written as null, because older releases of compressed-tensors reject
        fields that they do not know.
        """
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationScheme,
            QuantizationStatus,
        )

        assert self.weights is not None
        activations = self.input_activations
        group = QuantizationScheme(
            targets=list(TARGETS),
            weights=self.weights.to_compressed_tensors(),
            input_activations=activations.to_compressed_tensors() if activations else None,
            format=self.format,
        )
        config = QuantizationConfig(
            config_groups={"group_0": group},
            quant_method=QUANT_METHOD,
            format=self.format,
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=list(ignore),
        )
        return _without_none(config.model_dump(mode="json"))  # exclude_none leaves zp_dtype


def _number_format(args: QuantArgs | None) -> str:
    return "bf16" if args is None else f"{args.type}{args.num_bits}"


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if value is not None
    }
