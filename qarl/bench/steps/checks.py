"""What must hold before a figure of a scheme is printed. A fast kernel that computes something else is no result.

Linears (`qarl.bench.steps.compare`): each one's output in the trainer's own forward beside the engine's layer on the
same input, in a round that warms up and in the last one, neither of which is timed. This is what alignment of the
linears means, and it needs no statistics. Allowed is 0 for int4 and int8 by the engine's own CPU operators. Elsewhere
(other tiles on a GPU, sums of FP32 products, BF16, the FP32 product that stands for the engine where there is none) it
is u = 2^-8 in the root of the mean square: two roundings to BF16 of at most u / 2 each, those of both outputs, or of
the output and of the dequantized input; and 4 u in any single output channel, of which there are many. Weights that are
not quantized are off by more: an int8 grid alone by amax / 127 / sqrt(12), 0.6% where amax is 2.7 standard deviations.
(FP8 on Hopper adds in 14 bits; whether its long sums stay within u has not been measured.) At `off` the trainer's
linears are plain, and others at the same weights are compared in their place: the engine must be right there too.

Log-probs. delta = trainer's log-prob of a sampled token - the engine's. Its size is bounded by counting roundings that
the two sides do not share. A BF16 operation errs by at most u of its result, so a layer in which r operations round in
another way disturbs the hidden state by at most sqrt(r) u in the root of the mean square, and all layers by
sqrt(layers) times that (roundings are independent; the residual stream in truth dilutes early ones). 8-bit activations
add four quantizers a layer: a disturbed input falls into another code, and where it does the two sides differ by the
quantizer's own error e, root of the mean square relative to the input, at most sqrt(2) of it. A log-prob is a logit
less a log-sum over all of them, which hardly moves; the logits' standard deviation s is that of the log-probs of the
sampled tokens. Hence

    rms delta <= b = s sqrt(layers (r u^2 + 4 * 2 e^2)) + u max |log-prob|      (at the end: the logit's own rounding)

|delta| of a normal delta has a mean of 0.8 and a standard deviation of 0.6 of the RMS. So the mean of n tokens is below
(0.8 + 4 * 0.6 / sqrt(n)) b, four standard deviations up; b itself is the bound from 144 tokens on.

    linears   r = 8: two residual sums, two norms, rotary on queries and keys, attention's weights and its output. The
              same for bf16 at `off`, whose linears are the engine's already. For 8 bits this is wider than the mismatch
              at `off`: it finds weights that are stale or garbage, not linears that are unaligned (see above)
    model     what is left is the order of attention's FP32 sums, which puts a few outputs in a million (beyond 192 keys
              one in 10,000, README) a BF16 step off. A token that none of them reaches agrees bit for bit, one that is
              reached may differ, after many layers, as much as at `linears`: the same bound. But among the first
              `FIRST_TOKENS` tokens of responses to very short prompts most must agree: the median of |delta| is at most
              a tenth of that at `linears` (bf16: `off`) on the same tokens at the same weights
    exact     as `model`
    off       no bound: that level is the mismatch, except for bf16

Without an engine `model` and `exact` are compared with `linears` (bf16: `off`) on random tokens, with the bound of that
level; of plain BF16 linears nothing is known but that their log-probs and the gradient are finite.

Publishes. The engine's checksums show that it was handed the very bytes that the trainer sent
(`qarl.rollout.publish.send`).
That it multiplies by them the linears show, and for all other tensors a comparison byte for byte; every publish that is
measured alone sends other weights than the one before.
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
FIRST_TOKENS = 2


def log_prob_bound(scheme: str, level: str, *, layers: int, spread: float, largest: float, tokens: int) -> float | None:
    """Bound on mean |delta| of so many tokens; None where there is none. `spread`, `largest`: of their log-probs."""
    if level == "off" and scheme != "bf16":
        return None
    operations = ROUNDINGS * UNIT**2 + 8 * QUANTIZER_ERROR.get(scheme, 0.0) ** 2
    bound = spread * math.sqrt(layers * operations) + UNIT * largest
    return bound * max(1.0, 0.8 + 4 * 0.6 / math.sqrt(tokens))


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
    aligned, below = checks.get("first_abs_median"), checks.get("first_abs_median_below")
    if aligned is not None and below is not None and not aligned <= MODEL_SHARE * below:
        yield (
            f"the median |log-prob difference| of first tokens is {aligned:.2e} where unaligned norms, rotary embedding"
            f" and attention have {below:.2e}, {MODEL_SHARE:.0%} of that is allowed"
        )


def worst(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The checks of several steps as one: the step whose delta is nearest to its bound, or beyond; without deltas, or
    without a bound, the first."""

    def severity(checks: Mapping[str, Any]) -> float:
        delta, bound = checks.get("mismatch_abs_mean"), checks.get("mismatch_bound")
        if delta is None or bound is None:
            return -1.0
        return delta / bound if math.isfinite(delta) else math.inf

    return max(steps, key=severity)
