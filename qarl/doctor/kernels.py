"""Reports the kernel of each layer in trainer and vLLM, and the alignment level."""

from __future__ import annotations

from collections.abc import Sequence

from qarl.checks import layers, sampling
from qarl.checks.kernels import check_dense, check_int8_experts, check_kernels, check_on_gpus
from qarl.checks.model import check_model
from qarl.checks.tensor_parallel import ROW_PARALLEL
from qarl.doctor.context import Context, NotCheckedError
from qarl.doctor.findings import Topic
from qarl.errors import UserError
from qarl.kernels.experts.autograd import choose_experts_kernel
from qarl.kernels.experts.grouped import ExpertsShape
from qarl.kernels.registry import choose_linear_kernel
from qarl.process import vllm_missing, vllm_unusable
from qarl.rollout import kernel_prediction


def check_choice(context: Context, topic: Topic) -> None:
    """Whether `quant.kernels` can be used with this scheme and model."""
    kernels = context.config.quant.kernels
    if kernels == "engine":
        return
    passed = topic.passes(check_kernels if context.target.here else check_on_gpus, context.config)
    passed &= topic.passes(check_dense, context.config, context.hf_config.get())
    if not passed:
        return
    if not context.target.here:
        raise NotCheckedError("QaRL's own kernels depend on the machine of the run", "run the doctor there too")
    topic.ok(f"quant.kernels={kernels}: trainer and engine run QaRL's own kernel")
    if kernels == "dequantized":
        topic.note(
            "quant.kernels=dequantized is no low-bit rollout: both sides multiply dequantized weights in BF16",
            fix="use it for debugging and on small machines, and report no low-bit figures",
        )


def check_trainer(context: Context, topic: Topic) -> None:
    """The kernel of each layer in the trainer."""
    import torch

    scheme = context.scheme
    if context.config.quant.kernels == "qarl" and context.target.device == "cuda" and not context.target.here:
        raise NotCheckedError("QaRL's own kernels depend on the machine of the run", "run the doctor there too")
    if not scheme.quantized or context.config.quant.align == "off":
        topic.ok("trainer: every layer multiplies in BF16" + " (quant.align=off)" * scheme.quantized)
        return
    device = torch.device(context.target.device)
    served: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    linears = {name: shape for name, shape in context.quantized.get().items() if not _of_expert(name)}
    for name, shape in linears.items():
        if shape not in context.choices:
            try:
                context.choices[shape] = choose_linear_kernel(
                    scheme.name, device, shape, group_size=scheme.group_size, kernels=context.config.quant.kernels
                )
            except UserError as error:
                context.choices[shape] = error
                topic.refusal(error)
        choice = context.choices[shape]
        if not isinstance(choice, UserError):
            served.setdefault((choice.kernel.name, choice.passed_over), []).append(name)
    for (kernel, passed_over), names in served.items():
        _report(context, topic, kernel, passed_over, f"{len(names)} layers", layer_lines(names, linears))


def check_experts(context: Context, topic: Topic) -> None:
    """The trainer's kernel for the experts. On CPU vLLM uses the same kernel. On GPUs it has a different one."""
    import torch

    scheme, size = context.scheme, context.size.get()
    experts = [name for name in context.quantized.get() if _of_expert(name)] if scheme.quantized else []
    if experts and context.target.device == "cuda":
        topic.passes(check_int8_experts, context.config, context.hf_config.get())
    if not experts or context.config.quant.align == "off":
        return
    shape = ExpertsShape(size.experts, size.experts_per_token, size.hidden, size.moe_intermediate)
    device = torch.device(context.target.device)
    choice = choose_experts_kernel(scheme.name, device, shape, group_size=scheme.group_size)
    lines = layer_lines(experts, context.quantized.get())
    _report(context, topic, choice.kernel.name, choice.passed_over, f"{len(experts)} matrices of experts", lines)


def _report(
    context: Context, topic: Topic, kernel: str, passed_over: tuple[str, ...], weights: str, lines: list[str]
) -> None:
    """Report the trainer's kernel for some weights. Warn if it is the exact reference, because that is slow."""
    if kernel == "reference" and not context.target.here:
        topic.note(
            f"not checked: which kernel of the trainer multiplies {weights}",
            why=f"this machine lacks what {context.target.name} runs",
            fix="run the doctor there too",
            lines=lines,
        )
        return
    what, why = f"trainer: {kernel} multiplies {weights}", "; ".join(passed_over) or None
    if kernel == "reference":
        fix = "expect exact numbers but slow steps, because there is no faster kernel for this machine yet"
        topic.warning(what, why=why, fix=fix, lines=lines)
    else:
        topic.ok(what + (f" (not {why})" if why else ""), lines)


def _of_expert(name: str) -> bool:
    return ".experts." in name


def check_engine(context: Context, topic: Topic) -> None:
    """The kernel that vLLM chooses for each layer."""
    scheme = context.scheme
    if not scheme.quantized:
        return
    if not context.target.here:
        why = "vLLM's choice depends on the machine of the run, which is not this one"
        raise NotCheckedError(why, "run the doctor there too")
    if why_not := vllm_unusable():
        raise NotCheckedError(why_not, "make setup")
    parallel, kernels = context.config.rollout.tensor_model_parallel_size, context.config.quant.kernels
    shapes = {name: shape for name, shape in context.quantized.get().items() if not _of_expert(name)}
    parts: layers.Shapes = {}
    served: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    answers: dict[tuple[int, ...], tuple[bool, str]] = {}
    for fused, members in layers.fused_groups(shapes).items():
        n, k = sum(shapes[name][0] for name in members), shapes[members[0]][1]
        parts[fused] = (n, k // parallel) if fused.endswith(ROW_PARALLEL) else (n // parallel, k)
        key = (n, k, *parts[fused])
        if key not in answers:
            try:
                answers[key] = True, kernel_prediction.chosen_kernel(scheme, parts[fused], (n, k), kernels)
            except ValueError as error:
                answers[key] = False, " ".join(str(error).split())
        taken, answer = answers[key]
        (served if taken else refused).setdefault(answer, []).append(fused)
    for kernel, names in served.items():
        topic.ok(f"vLLM: {kernel} multiplies {len(names)} layers, counted after fusing", layer_lines(names, parts))
    for reason, names in refused.items():
        topic.error(
            f"vLLM has no kernel for {len(names)} layers",
            where=layers.name_layers(names),
            why=reason,
            fix="add these layers to quant.ignore, or choose another quant.scheme or quant.group_size",
        )


def layer_lines(names: Sequence[str], shapes: layers.Shapes) -> list[str]:
    """Return lines with name and [N, K]. Layers whose names differ only in numbers share a line."""
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name in names:
        by_shape.setdefault(shapes[name], []).append(name)
    named = {shape: layers.name_layers(alike).split(", ") for shape, alike in by_shape.items()}
    return [f"{name}  {list(shape)}" for shape, names in named.items() for name in names]


def check_alignment(context: Context, topic: Topic) -> None:
    """Which alignment level applies."""
    asked = context.config.quant.align
    try:
        check_model(context.hf_config.get())
    except UserError as error:  # the topic "model" reports it
        raise NotCheckedError("no level applies to a model that is refused", "train a different model") from error
    level, reasons = context.align_level()
    if level != asked:
        topic.warning(
            f"quant.align={asked} will fall back to {level}",
            why="; ".join(reasons),
            fix=f"set quant.align={level} if you accept that, and watch mismatch/abs_mean",
        )
    elif level == "off":
        topic.warning(
            "quant.align=off: the trainer does not follow the engine",
            why="this is the baseline that shows the mismatch of quantized rollouts",
            fix="set quant.align=model, unless the baseline is what you want",
        )
    else:
        topic.ok(f"quant.align={level} applies")
    if found := context.unconfirmed(level):
        topic.warning(
            f"quant.align={level} is unconfirmed on GPUs",
            why=found.removeprefix("unconfirmed: "),
            fix="watch mismatch/abs_mean; while it is unconfirmed, the limit on the mismatch is that of linears",
        )


def check_sampling(context: Context, topic: Topic) -> None:
    """Whether the trainer's log-probs apply the same temperature, top_p and top_k as the engine."""
    if why_not := vllm_missing():
        raise NotCheckedError(why_not, "make setup")
    level, _ = context.align_level()
    confirmed = context.unconfirmed(level) is None
    vocabulary = context.hf_config.get().vocab_size
    sampling.check_sampling(context.config, level=level, vocabulary=vocabulary, confirmed=confirmed)
    rollout = context.config.rollout
    topic.ok(
        f"the trainer's log-probs apply the engine's temperature {rollout.temperature:g}, top_p {rollout.top_p:g} "
        f"and top_k {rollout.top_k}"
    )


CHECKS = (check_choice, check_trainer, check_experts, check_engine, check_alignment, check_sampling)
