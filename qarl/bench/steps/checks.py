"""What must hold before a figure of a scheme is printed. A fast kernel that computes something else is no result.

Log-probs. delta = trainer's log-prob of a sampled token - the engine's. Its size is bounded by counting roundings that
the two sides do not share. A BF16 operation errs by at most u = 2^-8 of its result, so a layer in which r operations
round in another way disturbs the hidden state by at most sqrt(r) u in the root of the mean square, and all layers by
sqrt(layers) times that (roundings are independent; the residual stream in truth dilutes early ones). 8-bit activations
add four quantizers a layer: a disturbed input falls into another code, and where it does the two sides differ by the
quantizer's own error e, root of the mean square relative to the input, at most sqrt(2) of it. A log-prob is a logit
less a log-sum over all of them, which hardly moves; the logits' standard deviation s is that of the log-probs of the
sampled tokens. Hence mean |delta| <= rms delta <=

    s sqrt(layers (r u^2 + 4 * 2 e^2)) + u max |log-prob|       (the second term: the rounding of the logit itself)

    linears   r = 8: two residual sums, two norms, rotary on queries and keys, attention's weights and its output. The
              same for bf16 at `off`, whose linears are the engine's already
    model     what is left is the order of attention's FP32 sums: beyond some 192 keys one output in 10,000 (README).
              Through a quantizer a disturbance shrinks by its square root at worst: a tenth of the bound of `linears`
    exact     nothing is left but BF16 products whose bits may depend on the number of rows: as `model`
    off       no bound: that level is the mismatch, except for bf16

The engine's checksums have already shown that it holds the very bytes that the trainer sent (`qarl.rollout.publish`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

UNIT = 2.0**-8
ROUNDINGS = 8
QUANTIZER_ERROR = {"w8a8": 4 / 127 / 12**0.5, "fp8": 2.0**-4 / 3**0.5}
"""e: int8, a step of amax / 127 with amax about 4 standard deviations, uniform; e4m3, half a step of 2^-3 at worst."""
MODEL_SHARE = 0.1
MODEL_TO_OFF = 0.05


def log_prob_bound(scheme: str, level: str, *, layers: int, spread: float, largest: float) -> float | None:
    """Bound on mean |delta|; None where there is none. `spread`, `largest`: of the sampled tokens' log-probs."""
    if level == "off" and scheme != "bf16":
        return None
    operations = ROUNDINGS * UNIT**2 + 8 * QUANTIZER_ERROR.get(scheme, 0.0) ** 2
    bound = spread * math.sqrt(layers * operations) + UNIT * largest
    return bound if level in ("off", "linears") else MODEL_SHARE * bound


def problems(checks: Mapping[str, Any]) -> list[str]:
    """Why a result may not be shown; none where all is well. `checks` is what a worker found in one step."""
    found = [*_layer_problems(checks), *_log_prob_problems(checks)]
    if not math.isfinite(checks.get("grad_norm", 0.0)):
        found.append("the gradient is not finite")
    lengths, asked = checks.get("response_lengths"), checks.get("response_length")
    if lengths is not None and (min(lengths) != asked or max(lengths) != asked):
        found.append(f"responses of {min(lengths)} to {max(lengths)} tokens, {asked} were asked for")
    if "reference" in checks.get("kernels", ()):
        found.append("linears run the reference kernel, which is for tests: no kernel serves here")
    if checks.get("quantized_layers") != checks.get("expected_layers"):
        found.append(f"{checks.get('quantized_layers')} linears are quantized, not {checks.get('expected_layers')}")
    return found


def _layer_problems(checks: Mapping[str, Any]) -> Iterator[str]:
    error, bound = checks.get("layer_error", 0.0), checks.get("layer_bound", 0.0)
    if not error <= bound:  # NaN is not
        yield (
            f"{checks['layer_worst']}: on the same input the trainer's output is off {checks['layer_against']} by "
            f"{error:.1e} of its size, {bound:.1e} is allowed: other numbers are multiplied, or by another kernel"
        )
    compared, expected = checks.get("layers_compared"), checks.get("layers_expected")
    if compared != expected:
        yield f"{compared} linears could be compared, not {expected}"
    if unlike := checks.get("unlike_tensors"):
        more = f" and {len(unlike) - 1} others" if len(unlike) > 1 else ""
        yield f"the engine's {unlike[0]}{more} is not the trainer's: the publish did not write it, or it was changed"


def _log_prob_problems(checks: Mapping[str, Any]) -> Iterator[str]:
    for name in ("mismatch", "sample"):
        delta, bound = checks.get(f"{name}_abs_mean"), checks.get(f"{name}_bound")
        if delta is not None and not math.isfinite(delta):
            yield "log-probs of the trainer are not finite"
        elif delta is not None and bound is not None and delta > bound:
            against = checks.get("sample_against", "the rollout") if name == "sample" else "the rollout"
            yield f"mean |log-prob difference| to {against} is {delta:.2e}, {bound:.2e} is allowed"
    if not math.isfinite(checks.get("sample_spread", 0.0)):
        yield "log-probs are not finite"
    aligned, off = checks.get("sample_abs_mean"), checks.get("sample_abs_mean_off")
    if aligned is not None and off is not None and not aligned <= MODEL_TO_OFF * off:
        yield (
            f"mean |log-prob difference| to the rollout is {aligned:.2e} where `off` has {off:.2e} on the same tokens, "
            f"{MODEL_TO_OFF:.0%} of that is allowed: norms, rotary embedding or attention are not aligned"
        )


def worst(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The checks of several steps as one: the step whose delta is nearest to its bound, or beyond."""

    def severity(checks: Mapping[str, Any]) -> float:
        delta, bound = checks.get("mismatch_abs_mean"), checks.get("mismatch_bound")
        if delta is None or bound is None:
            return -1.0
        return delta / bound if math.isfinite(delta) else math.inf

    return max(steps, key=severity)
