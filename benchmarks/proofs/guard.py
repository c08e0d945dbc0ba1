"""The check before the first update: it stops models that trainer and engine compute differently, and no healthy one.

Each wrong model is a config, a buffer or a way to sample that QaRL refuses by name. Here the refusal is switched off,
so only the measured mismatch can stop the run (`qarl.trainer.probe`).
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.proofs.align import tiny_copy
from benchmarks.proofs.families import (
    ALL,
    THETA,
    VALUES,
    run_arguments,
    write_config,
    write_prompts,
    write_weights,
)
from benchmarks.proofs.harness import LEVELS, SCHEMES, Record, Row, arguments
from qarl.config import load_config
from qarl.families import ALIGNED
from qarl.metrics.mismatch_limit import MismatchError, resolve_limit
from qarl.process import configure_vllm_process
from qarl.rollout.publish.writers import WritePlan
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import prepare_run
from qarl.trainer.probe import check, compare

LONG = 1000
YARN = VALUES["types"]["yarn"]
FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
PARTIAL = {"rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}}
MULTIPLIERS = {
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}


@dataclass(frozen=True)
class Model:
    """A config of `family` with `changes`; the family "quickstart" is its model as it is.

    sharp     factor of the weights of queries and keys
    cast      round the rotary frequencies to BF16
    sampling  what the engine samples with, unlike the trainer
    length    the most tokens of a response; None: the probe's
    """

    name: str
    family: str
    changes: Row = field(default_factory=dict)
    sharp: float = 1.0
    cast: bool = False
    levels: tuple[str, ...] = ("linears",)
    wrong: bool = True
    scheme: str = "w4a16"
    sampling: Row = field(default_factory=dict)
    length: int | None = None


def small(std: float, **changes: Any) -> Row:
    return {"initializer_range": std} | changes


def _healthy(family: str) -> tuple[str, ...]:
    return ("off", "linears", "model") if family in ALIGNED else ("off", "linears")


WRONG = (
    Model("granite, partial rotary, multipliers", "granite", PARTIAL | MULTIPLIERS),
    Model("granite, YaRN attention_factor 2", "granite", {"rope_parameters": THETA | YARN | {"attention_factor": 2.0}}),
    Model("mistral, partial rotary, init 0.03", "mistral", small(0.03, **PARTIAL)),
    Model("mistral, partial rotary, init 0.08", "mistral", PARTIAL),
    Model("mistral, YaRN mscale", "mistral",
          {"rope_parameters": THETA | YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}}),
    Model("ernie4_5, partial rotary", "ernie4_5", PARTIAL),
    Model("gemma3_text, bidirectional", "gemma3_text", {"use_bidirectional_attention": True}),
    Model("gemma2, soft-cap 5 dropped", "gemma2", {"attn_logit_softcapping": 5.0}, sharp=4.0),
    Model("gemma2, soft-cap 50 dropped", "gemma2", {"attn_logit_softcapping": 50.0}, sharp=8.0),
    Model("falcon, new decoder, init 0.03", "falcon", small(0.03, **FALCON)),
    Model("falcon, new decoder, init 0.08", "falcon", FALCON),
    Model("quickstart, BF16 inv_freq", "quickstart", cast=True, levels=("model", "linears")),
)  # fmt: skip
HEALTHY = (
    Model("falcon, ALiBi", "falcon", {"alibi": True}, wrong=False),
    *(
        Model(f"{family}, init {std}", family, small(std), wrong=False, levels=_healthy(family))
        for family in ALL
        for std in (0.03, 0.08)
    ),
    *(
        Model(f"quickstart{label}", "quickstart", wrong=False, levels=("off", "linears", "model"), scheme=scheme)
        for scheme, label in (("w4a16", ""), ("w8a8", ", w8a8"), ("fp8", ", fp8"), ("bf16", ", bf16"))
    ),
    *(
        Model(f"{family}, {LONG} tokens, {scheme}", family, small(0.03, max_position_embeddings=2 * LONG), wrong=False,
              levels=("model",) if family in ALIGNED else ("linears",), scheme=scheme, length=LONG)
        for i, family in enumerate(ALL)
        for scheme in ("w4a16", ("w8a8", "bf16")[i % 2])
    ),
)  # fmt: skip
LIMITS = (
    *(
        Model("quickstart", "quickstart", levels=LEVELS, wrong=False, scheme=scheme)
        for scheme in SCHEMES
    ),
    *(
        Model(
            f"{LONG} tokens",
            "quickstart",
            levels=("model",),
            wrong=False,
            scheme=scheme,
            length=LONG,
        )
        for scheme in SCHEMES
    ),
    *(
        Model(name, family, changes, levels=("model",), scheme=scheme, sampling=sampling)
        for scheme in ("bf16", "w4a16")
        for name, family, changes, sampling in (
            ("partial_rotary_factor", "llama", small(0.2, **PARTIAL), {}),
            ("logit_scale", "llama", small(0.2, logit_scale=0.25), {}),
            ("bias", "llama", small(0.2, bias=True), {}),
            ("temperature 0.005", "llama", small(0.02), {"temperature": 0.005}),
            ("top_p 0.5", "quickstart", {}, {"top_p": 0.5}),
        )
    ),
)
"""Healthy runs of every scheme and level, and five mistakes that were silent once; all in one result."""


@contextlib.contextmanager
def refusals_off(model: Model) -> Iterator[None]:
    """Nothing refuses the model, and a trainer drops the soft-cap of a wrong Gemma 2."""
    off: dict[str, Callable[..., Any]] = {
        "qarl.checks.model.check_config_keys": lambda config: None,
        "qarl.align.levels.check_config_keys": lambda config: None,
    }
    if "attn_logit_softcapping" in model.changes:
        off["qarl.align.packed_attention._needs_scores"] = lambda arguments: False
    if (
        model.family == "llama"
    ):  # the trainer has its own rotary embedding, and a publish may leave parameters out
        off["qarl.align.levels.align_rotary"] = lambda model: None
        off["qarl.align.applied_level.model_unavailable"] = lambda *args, **kwargs: None
    configure_vllm_process()
    with contextlib.ExitStack() as stack:
        for name, function in off.items() if model.wrong or "alibi" in model.changes else ():
            stack.enter_context(mock.patch(name, function))
        if model.wrong:
            stack.enter_context(
                mock.patch.object(WritePlan, "_check_all_written", lambda self, expected: None)
            )
        for module in ("rollout.engine", "checks.generation") if model.sampling else ():
            stack.enter_context(
                mock.patch(f"qarl.{module}.sampling_params", _sampling(model.sampling))
            )
        if model.length:
            stack.enter_context(mock.patch("qarl.trainer.probe.PROBE_TOKENS", model.length))
        if model.cast:
            stack.enter_context(mock.patch.object(Policy, "load", _cast_after(Policy.load)))
        yield


def _sampling(changes: Row) -> Callable[..., Any]:
    """Return a `sampling_params` that asks vLLM for `changes` whatever the trainer believes."""

    def unchecked(sampling: Any, seed: int | None = None) -> Any:
        from vllm import SamplingParams

        asked = {"temperature": sampling.temperature, "top_p": sampling.top_p} | changes
        asked |= {"max_tokens": sampling.max_tokens, "ignore_eos": sampling.ignore_eos}
        return SamplingParams(seed=seed, logprobs=0, detokenize=False, **asked)

    return unchecked


def _cast_after(load: Callable[..., Policy]) -> Callable[..., Policy]:
    def loaded(config: Any, **options: Any) -> Policy:
        policy = load(config, **options)
        rotary = policy.model.base_model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.bfloat16().float()
        return policy

    return loaded


def measure(model: Model, level: str) -> Row:
    """Return mean |δ| with its limit, and how many `times` the noise it is, with that limit."""
    gc.collect()
    with tempfile.TemporaryDirectory() as parent, refusals_off(model):
        folder = Path(parent) / "model"
        changes: Row = {}
        if model.family == "quickstart":
            tiny_copy(folder, max_position_embeddings=2 * LONG if model.length else 512)
            base_arguments = ["config=quickstart.yaml"]
            changes |= {"quant.align": level, "quant.scheme": model.scheme}
            changes |= {"output_dir": parent, "model.path": folder}
            changes |= {"data.max_response_length": model.length} if model.length else {}
        else:
            write_prompts(Path(parent))
            write_config(folder, model.family, model.changes)
            write_weights(folder)
            _sharpen(folder, model.sharp)
            base_arguments = run_arguments(folder, model.scheme, level, length=model.length or 40)
        config = load_config([*base_arguments, *arguments(changes)])
        if (
            "temperature" in model.sampling
        ):  # which the trainer divides by; vLLM raises one below 0.01
            rollout = config.rollout.model_copy(
                update={"temperature": model.sampling["temperature"]}
            )
            config = config.model_copy(update={"rollout": rollout})
        trainer = LocalTrainer(config, prepare_run(config))
        with trainer.engine:
            trainer.publish()
            comparison = compare(trainer)
        try:
            check(trainer, comparison)
            fired = False
        except MismatchError:
            fired = True
    noise = comparison.noise
    assert noise is not None
    length = comparison.tokens / len(comparison.batch.response_mask)
    temperature = config.rollout.temperature
    return {
        "level": noise.level,
        "tokens": comparison.tokens,
        "abs_mean": comparison.metrics["mismatch/abs_mean"],
        "limit": resolve_limit(
            None, trainer.policy.limit_level, response_length=length, temperature=temperature
        ),
        "times": noise.times,
        "times_limit": noise.level.tolerance.noise_limit(comparison.tokens),
        "fired": fired,
        "should_fire": model.wrong,
    }


def _sharpen(folder: Path, factor: float) -> None:
    """Multiply the weights of queries and keys in the model's file."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    scaled = {
        n: t * factor if n.endswith(("q_proj.weight", "k_proj.weight")) else t
        for n, t in tensors.items()
    }
    save_file(scaled, path, metadata={"format": "pt"})


def _measure_all(record: Record, models: Sequence[Model], *, by_scheme: bool) -> None:
    for model in models:
        for level in model.levels:
            name = (
                f"{model.name} | {model.scheme} | {level}"
                if by_scheme
                else f"{model.name} | {level}"
            )
            if record.wants(name):
                row = measure(model, level)
                record.add(name, row, ok=row["fired"] == model.wrong)


def guard_models(record: Record) -> None:
    """Wrong models, and healthy ones of all families, at two sizes of weights and with 1,000 tokens."""
    _measure_all(record, (*WRONG, *HEALTHY), by_scheme=False)


def mismatch_guard(record: Record) -> None:
    """The quickstart in every scheme at every level, with 1,000 tokens, and mistakes that were silent once."""
    _measure_all(record, LIMITS, by_scheme=True)
