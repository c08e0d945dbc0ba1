"""Which scheme a checkpoint has that somebody else has quantized and published.

`from_quantization_config` reads what QaRL writes. Published configs say more: how the codes were found (`observer`,
`actorder`), several groups with one format, class names as targets. What decides the arithmetic must be that of a
scheme of QaRL's. Everything else is refused by name, with what to do. Which linears are quantized is read from the
files (`qarl.quant.published`), not from targets and ignore list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from qarl.errors import UserError
from qarl.schemes.base import QUANT_METHOD, QuantArgs, Scheme
from qarl.schemes.registry import get_scheme, scheme_names

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig

WHERE = "model.path: quantization_config in its config.json"
_CONVERT = (
    "from compressed_tensors.entrypoints.convert import convert_checkpoint, {converter}; convert_checkpoint(FOLDER, "
    "NEW_FOLDER, {call})"
)
_LLM_COMPRESSOR = (
    "quantize the BF16 model with llm-compressor ({preset}), or give the BF16 model itself"
)
_PRESETS = "W4A16, W8A8 or FP8_DYNAMIC"
OTHER_METHODS = {
    "awq": (
        "AutoAWQ's layout is not read",
        "convert it with compressed-tensors: "
        + _CONVERT.format(
            converter="AutoAWQConverter", call="AutoAWQConverter.from_pretrained(FOLDER)"
        )
        + "; the result loads if it was quantized without zero points (zero_point: false)",
    ),
    "gptq": (
        "AutoGPTQ's layout is not read, and compressed-tensors has no converter for it",
        _LLM_COMPRESSOR.format(preset="GPTQModifier with the preset W4A16"),
    ),
    "fp8": (
        "its FP8 scales are of blocks or of tensors, in a layout of its own",
        "convert it to BF16 with compressed-tensors: "
        + _CONVERT.format(
            converter="FP8BlockDequantizer", call="FP8BlockDequantizer(targets=['re:.*proj$'])"
        )
        + "; then give that folder",
    ),
}
"""quant_method -> why it is refused, and what to do."""


def published_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of the published `quantization_config`. Raise UserError, which says why, if it has none."""
    from compressed_tensors.quantization import QuantizationConfig

    method = config.get("quant_method")
    if method != QUANT_METHOD:
        usual = ("it is not in the format of compressed-tensors", "give the BF16 model")
        why, fix = OTHER_METHODS.get(str(method), usual)
        raise _refused(f"quant_method={method} cannot be the base of adapters", why, fix)
    for key, why in (
        ("sparsity_config", "sparse weights have another layout"),
        ("transform_config", "its forward also rotates activations"),
    ):
        if config.get(key) and not _is_dense(config[key]):
            raise _refused(f"{key} is not supported", why, _LLM_COMPRESSOR.format(preset=_PRESETS))
    try:
        parsed = QuantizationConfig.model_validate(dict(config))
    except ValueError as error:  # pydantic's ValidationError is a ValueError
        raise _refused(
            "the quantization config cannot be read", str(error), "see compressed-tensors' log"
        ) from error
    if problem := next(_problems(parsed), None):
        raise _refused(
            f"{problem[0]} is not supported", problem[1], _LLM_COMPRESSOR.format(preset=_PRESETS)
        )
    return _scheme(parsed)


def _is_dense(keys: Any) -> bool:
    """Return whether a `sparsity_config` says that nothing is sparse, as older versions of llm-compressor write it."""
    return isinstance(keys, Mapping) and keys.get("format") == "dense"


def _refused(what: str, why: str, fix: str) -> UserError:
    return UserError(f"the model is already quantized, and {what}", where=WHERE, why=why, fix=fix)


def _problems(config: QuantizationConfig) -> Iterator[tuple[str, str]]:
    """Yield what no scheme of QaRL's has, by its name, and why that decides something."""
    if config.kv_cache_scheme is not None:
        yield "kv_cache_scheme", "the trainer's attention has no quantized keys and values"
    for group in config.config_groups.values():
        weights, activations = group.weights, group.input_activations
        if weights is None or group.output_activations is not None:
            yield "output_activations, or a group without weights", "the engine's kernels have none"
            continue
        if not weights.symmetric:
            yield "symmetric=false", "zero points (weight_zero_point) are not in QaRL's formats"
        if weights.actorder == "group":
            yield (
                "actorder=group",
                "weight_g_idx gives each column a group of its own, and the trainer's kernels have none; "
                "actorder=weight (static) loads",
            )
        if activations is not None and not activations.dynamic:
            yield "static input_activations", "scales of activations are computed for each token"
        if weights.strategy == "tensor" and activations is not None:
            yield (
                "strategy=tensor of weights",
                "vLLM rounds the codes of q, k and v, and of gate and up, again to one scale as it loads them",
            )


def _scheme(config: QuantizationConfig) -> Scheme:
    found = {_formats(group, config.format) for group in config.config_groups.values()}
    if len(found) != 1:
        raise _refused(
            f"it has {len(found)} number formats",
            "all quantized linears have one scheme",
            _LLM_COMPRESSOR.format(preset=_PRESETS),
        )
    ((weights, activations, layout),) = found
    for name in scheme_names():
        scheme = get_scheme(name, group_size=_group(weights))
        if (scheme.weights, scheme.input_activations, scheme.format) == (
            weights,
            activations,
            layout,
        ):
            return scheme
    raise _refused(
        "no scheme of QaRL's has its number formats",
        f"weights {_words(weights)}, activations {_words(activations)}, format {layout}",
        _LLM_COMPRESSOR.format(preset=_PRESETS),
    )


def _group(weights: QuantArgs | None) -> int:
    size = weights.group_size if weights else None
    return size if size and size > 0 and size % 8 == 0 else 128


def _formats(group: Any, whole: str) -> tuple[QuantArgs | None, QuantArgs | None, str]:
    layout = getattr(group.format, "value", group.format) or whole
    return _args(group.weights), _args(group.input_activations), str(layout)


def _args(args: QuantizationArgs | None) -> QuantArgs | None:
    """Return what decides the arithmetic of `args`. The order in which weights were rounded does not."""
    if args is None:
        return None
    return QuantArgs(
        args.num_bits,
        str(getattr(args.type, "value", args.type)),
        str(getattr(args.strategy, "value", args.strategy)),
        args.group_size if args.strategy == "group" else None,
        args.symmetric,
        bool(args.dynamic),
    )


def _words(args: QuantArgs | None) -> str:
    if args is None:
        return "none"
    size = f" of {args.group_size}" if args.group_size else ""
    return f"{args.type}{args.num_bits} by {args.strategy}{size}"
