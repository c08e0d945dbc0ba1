"""Compares each link of a recorded step with the twin: what a part returned, from what it was given.

No link is missing between two parts, so a wrong number anywhere is in some link.

No tolerance was chosen after a look at the differences. Where the trainer rounds to BF16 or FP16 (log-probs, gradients,
Muon's Newton-Schulz steps), a third party does so too: transformers' model in that type on the same weights and rows,
and Muon's package. What it differs from float64 is rounding of this size, and the trainer may differ by three times as
much (`ROUNDINGS`): both are sums of roundings, independent of each other, and a gradient that comes from a few tokens
is a sum of few. Elsewhere the trainer computes in FP32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors_rule import compressed_tensors_compress
from papers_losses import all_weights, mis_weight, paper_loss, resolved_keys
from torch import Tensor
from twin_maths import (
    TwinOptimizer,
    TwinScale,
    difference,
    rate_factor,
    total_norm,
    twin_advantages,
)
from twin_metrics import MEASURED, formulas
from twin_model import STACKS, TwinModel
from twin_reward import score
from twin_run import EOS, Recorder, Step, load, quantized_layers

ROUNDINGS = 3.0
"""Largest error, in those of a third party that rounds as often."""
FP32_RULE = 64 * 2.0**-24
"""Largest error of an AdamW change in FP32, as a share of it: its dozen operations, each rounded once."""


def close(given: list[float], expected: list[float], tolerance: float) -> None:
    assert given == pytest.approx(expected, abs=tolerance), (given, expected)


def rms(values: Iterable[float]) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).square().mean().sqrt())


class Twin:
    """Follows a run step by step. Its optimizer's state is its own, so a trainer that loses its state differs."""

    def __init__(self, recorder: Recorder) -> None:
        self.config = recorder.trainer.config
        self.prompts = recorder.trainer.parts.train_prompts
        self.keys = resolved_keys(self.config)
        if self.config.algorithm.adv_estimator == "dr_grpo":
            self.keys["loss_agg_mode"] = "seq-mean-token-sum-norm"
        self.optimizer = TwinOptimizer(self.config.optim)
        self.scale = TwinScale(active=self.config.model.dtype == "fp16")
        folder = Path(self.config.model.path)
        half = torch.float16 if self.config.model.dtype == "fp16" else torch.bfloat16
        self.model = TwinModel(folder)
        self.rounded = TwinModel(folder, half)
        self.reference = recorder.first_sent
        self.seeds: set[int] = set()
        self.drawn: list[list[int]] = []

    def check(self, step: Step) -> None:
        """All links of a step, in the order of the algorithm."""
        step.shapes = {name: p.shape for name, p in self.model.model.named_parameters()}
        self.check_requests(step)
        self.check_batch(step)
        self.check_old_log_probs(step)
        self.check_updates(step)
        self.check_publish(step)
        self.check_metrics(step)

    def check_requests(self, step: Step) -> None:
        """Each prompt n times in a row, each prompt once an epoch, a new seed for every request."""
        config = self.config
        n = config.rollout.n
        tokens = [prompt.prompt_token_ids for prompt in self.prompts]
        asked = [tokens.index(prompt) for prompt in step.prompts]
        chosen = asked[::n]
        assert asked == [index for index in chosen for _ in range(n)]
        assert len(chosen) == config.data.train_batch_size
        batches = len(self.prompts) // config.data.train_batch_size
        self.drawn.append(chosen)
        epoch = self.drawn[len(self.drawn) - 1 - (len(self.drawn) - 1) % batches :]
        of_epoch = [index for batch in epoch for index in batch]
        assert len(set(of_epoch)) == len(of_epoch)
        assert len({*self.seeds, *step.seeds}) == len(self.seeds) + len(asked)
        self.seeds |= set(step.seeds)
        sampling = step.sampling
        assert sampling.temperature == config.rollout.temperature
        assert sampling.max_tokens == config.data.max_response_length
        assert sampling.top_p == config.rollout.top_p
        step.chosen = [self.prompts[index] for index in asked]

    def check_batch(self, step: Step) -> None:
        """Tokens, masks, rewards and advantages of the batch that is trained on."""
        batch = step.batch
        step.responses, step.logged = (
            step.rollout.response_token_ids,
            step.rollout.rollout_log_probs,
        )
        step.reasons = step.rollout.finish_reasons
        step.rewards = []
        for row, (prompt, response) in enumerate(zip(step.chosen, step.responses, strict=True)):
            words = [f"t{token}" for token in response if token not in (EOS, EOS + 1)]
            step.rewards.append(
                score(prompt.data_source, " ".join(words), prompt.ground_truth, prompt.extra_info)
            )
            whole = prompt.prompt_token_ids + response
            assert batch.input_ids[row, : len(whole)].tolist() == whole
            assert int(batch.prompt_lengths[row]) == len(prompt.prompt_token_ids)
            mask = batch.response_mask[row]
            assert mask.tolist() == [t < len(response) for t in range(len(mask))]
            assert batch.responses[row][mask].tolist() == response
            assert batch.rollout_log_probs[row][mask].tolist() == pytest.approx(step.logged[row])
        assert batch.rewards.tolist() == pytest.approx(step.rewards, abs=1e-6)
        lengths = [len(response) for response in step.responses]
        advantages = twin_advantages(self.config, step.rewards, lengths)
        filled = batch.response_mask.any(1)
        of_filled = [a for a, length in zip(advantages, lengths, strict=True) if length]
        close(batch.advantages[filled].tolist(), of_filled, 2e-5)

    def check_old_log_probs(self, step: Step) -> None:
        """Those of the engine without its noise: both multiply by what was published."""
        batch = step.batch
        errors = []
        for row, clean in enumerate(step.clean):
            if not step.measured.known[row]:
                continue
            own = step.measured.log_probs[row][batch.response_mask[row]].tolist()
            errors += [a - b for a, b in zip(own, clean, strict=True)]
        if not self.trains_unquantized:
            self.load_forward(step, step.weights_before)
            allowed = ROUNDINGS * self.rounding_of_log_probs(step, range(len(step.prompts)))
            assert rms(errors) < allowed, (rms(errors), allowed)
        source = self.config.actor.old_log_probs
        expected = batch.rollout_log_probs if source == "rollout" else step.measured.log_probs
        assert torch.equal(step.old[batch.response_mask], expected[batch.response_mask])

    @property
    def trains_unquantized(self) -> bool:
        """Whether the trainer's forward has no quantized weights, although the engine's has."""
        quant = self.config.quant
        return bool(quant.align.value == "off" and quant.scheme != "bf16")

    def check_updates(self, step: Step) -> None:
        """Each optimizer step, from the rows to the weights."""
        actor = self.config.actor
        size = actor.ppo_mini_batch_size * self.config.rollout.n
        per_epoch = len(step.batch) // size
        assert len(step.updates) == per_epoch * actor.ppo_epochs
        before = step.weights_before
        step.losses, step.kl = [], []
        step.weights = self.correction_weights(step)
        for index, update in enumerate(step.updates):
            start = index % per_epoch * size
            rows = [row for forward in update.forwards for row in forward.rows]
            assert sorted(rows) == list(range(start, start + size))
            assert before.keys() == update.before.keys()
            assert all(torch.equal(before[name], update.before[name]) for name in before)
            self.check_loss(step, update, range(start, start + size))
            self.check_forward(step, update)
            self.check_optimizer(step, update)
            before = update.after

    def correction_weights(self, step: Step) -> list[Tensor]:
        """Of each response: the weight of its tokens for the mismatch."""
        rows = {
            "response_mask": step.batch.response_mask,
            "old_log_prob": step.old,
            "rollout_log_prob": step.batch.rollout_log_probs,
        }
        if self.config.actor.loss == "mis_gspo":
            weights = []
            for row, mask in enumerate(step.batch.response_mask):
                difference = (step.old[row] - step.batch.rollout_log_probs[row]).double()[mask]
                weight = mis_weight(difference, self.keys["mis_imp_ratio_cap"])
                weights.append(torch.full_like(difference, weight))
            return weights
        return all_weights(rows, self.correction)

    @property
    def correction(self) -> dict[str, Any]:
        values = self.config.rollout_correction.model_dump()
        return {name: value for name, value in values.items() if value is not None}

    def check_loss(self, step: Step, update: Any, rows: range) -> None:
        """The loss and its gradient by the paper's formula over the whole mini-batch."""
        batch = step.batch
        new = torch.zeros_like(batch.rollout_log_probs)
        gradient = torch.zeros_like(new)
        for forward in update.forwards:
            new[forward.rows] = forward.log_probs
            gradient[forward.rows] = forward.gradient
        mini = slice(rows.start, rows.stop)
        given = {
            "log_prob": new[mini],
            "old_log_prob": step.old[mini],
            "rollout_log_prob": batch.rollout_log_probs[mini],
            "advantages": batch.advantages[mini],
            "response_mask": batch.response_mask[mini],
        }
        loss, expected = paper_loss(
            self.config.actor.loss, given, self.keys, self.correction, step.weights[mini]
        )
        step.losses.append(loss)
        if self.config.actor.use_kl_loss:
            kl, of_kl = self.kl_term(step, new, mini)
            loss += self.config.actor.kl_loss_coef * kl
            expected = expected + self.config.actor.kl_loss_coef * of_kl
            step.kl.append(kl)
        assert sum(forward.loss for forward in update.forwards) == pytest.approx(
            loss, rel=1e-4, abs=1e-6
        )
        mask = given["response_mask"]
        actual = gradient[mini].double() / update.scale
        largest = float(expected[mask].abs().max())
        torch.testing.assert_close(
            actual[mask], expected[mask], rtol=2e-4, atol=1e-5 * largest + 1e-9
        )

    def kl_term(self, step: Step, new: Tensor, mini: slice) -> tuple[float, Tensor]:
        """K3 of the policy to its start, averaged like the loss, and the gradient of K2."""
        mask = step.batch.response_mask[mini]
        difference = (new - step.batch.reference_log_probs)[mini].double()
        lengths = mask.sum(1)
        responses, tokens = int((lengths > 0).sum()), int(lengths.sum())
        share = {
            "seq-mean-token-mean": 1 / lengths.clamp(min=1)[:, None] / responses,
            "seq-mean-token-sum": torch.full_like(difference, 1 / responses),
            "seq-mean-token-sum-norm": torch.full_like(
                difference, 1 / responses / self.config.data.max_response_length
            ),
            "token-mean": torch.full_like(difference, 1 / tokens),
        }[self.keys["loss_agg_mode"]]
        k3 = (-difference).exp() - 1 + difference
        return float((k3 * share * mask).sum()), difference * share * mask

    def check_forward(self, step: Step, update: Any) -> None:
        """Log-probs and gradients by the float64 model on the weights of this update, unless a gradient overflows."""
        self.load_forward(step, update.before)
        temperature = self.config.rollout.temperature
        errors: list[float] = []
        rows = []
        numbers = []
        for forward in update.forwards:
            for place, row in enumerate(forward.rows):
                prompt, response = step.prompts[row], step.responses[row]
                with torch.no_grad():
                    exact = self.model.log_probs(prompt, response, temperature)
                own = forward.log_probs[place][: len(response)].double()
                errors += (own - exact).tolist()
                rows.append((prompt, response, forward.gradient[place].double()))
                numbers.append(row)
        allowed = ROUNDINGS * self.rounding_of_log_probs(step, numbers)
        assert rms(errors) < allowed, (rms(errors), allowed)
        if not math.isfinite(update.norm):
            return
        expected = self.of_trained(self.model.gradients(rows, temperature), update)
        rounded = self.of_trained(self.rounded.gradients(rows, temperature), update)
        assert update.gradients.keys() == expected.keys()
        shares = {name: distance(rounded[name], exact) for name, exact in expected.items()}
        largest = ROUNDINGS * max(shares.values())
        for name, exact in expected.items():
            error = distance(update.gradients[name].double(), exact)
            assert error <= largest, (name, error, largest)

    def rounding_of_log_probs(self, step: Step, rows: Iterable[int]) -> float:
        """What rounding does to the log-probs of `rows`, as a root mean square. `load_forward` comes before."""
        temperature = self.config.rollout.temperature
        errors: list[float] = []
        for row in rows:
            given = step.prompts[row], step.rollout.response_token_ids[row], temperature
            with torch.no_grad():
                errors += (self.rounded.log_probs(*given) - self.model.log_probs(*given)).tolist()
        return rms(errors)

    def load_forward(self, step: Step, weights: dict[str, Tensor]) -> None:
        """Give the twin's model what the trainer's forward multiplies by: the quantized BF16 cast of `weights`."""
        sent = dict(step.sent)
        if step.adapter is None:
            sent = self.quantized(weights, step)
            if self.trains_unquantized:
                half = {
                    name: weight.to(torch.bfloat16).double() for name, weight in weights.items()
                }
                for model in (self.model, self.rounded):
                    model.load(half, "bf16", [])
                return
        for model in (self.model, self.rounded):
            load(model, self.config, sent, self.adapter_of(weights, step))

    def adapter_of(self, weights: dict[str, Tensor], step: Step) -> Any:
        """The adapter of the trained A and B, cast to BF16."""
        if step.adapter is None:
            return None
        tensors = {}
        for name, weight in weights.items():
            peft_name = f"base_model.model.{name.removesuffix('.weight')}.weight"
            tensors[peft_name] = weight.to(torch.bfloat16)
        lora = self.config.lora
        return {"r": lora.r, "alpha": lora.alpha or lora.r, "tensors": tensors}

    def of_trained(self, gradients: dict[str, Tensor], update: Any) -> dict[str, Tensor]:
        """The gradients of the trained parameters. Those of A and B are of W + B A alpha / r."""
        if not self.config.lora.r:
            return gradients
        factor = (self.config.lora.alpha or self.config.lora.r) / self.config.lora.r
        found = {}
        for name in update.before:
            linear, _, matrix = name.partition(".lora_")
            a = update.before[f"{linear}.lora_A"].to(torch.bfloat16).double()
            b = update.before[f"{linear}.lora_B"].to(torch.bfloat16).double()
            gradient = gradients[f"{linear}.weight"] * factor
            found[name] = b.T @ gradient if matrix.startswith("A") else gradient @ a.T
        return found

    def check_optimizer(self, step: Step, update: Any) -> None:
        """Norm, clipping, schedule and update rule, from the recorded gradients."""
        config = self.config
        factor = rate_factor(config.optim, step.number, config.trainer.total_training_steps)
        norm = total_norm(update.gradients) / update.scale
        self.scale.check(update, norm)
        if not math.isfinite(norm):
            same(update.after, update.before)
            return
        assert update.norm == pytest.approx(norm, rel=1e-5)
        clip = min(1.0, config.actor.grad_clip / (norm + 1e-6))
        for name, before in update.before.items():
            gradient = update.gradients[name].double() / update.scale * clip
            change = self.optimizer.change(name, before, gradient, factor)
            after = update.after[name]
            if not factor:
                assert torch.equal(after, before), name
            elif config.optim.master_dtype == "bf16":
                slack = ROUNDINGS * self.optimizer.rounding.abs().max()
                check_rounding(before.double() + change, after, slack)
            else:
                error = difference(change, before, after)
                rounding = float(self.optimizer.rounding.norm() / change.norm().clamp(min=1e-30))
                allowed = ROUNDINGS * rounding + FP32_RULE
                assert error < allowed, (name, error, allowed)

    def check_publish(self, step: Step) -> None:
        """What the engine holds, byte by byte: the last weights, quantized by compressed-tensors."""
        assert step.version == step.number + 1
        last = step.updates[-1].after
        if step.adapter is not None:
            same(step.sent, step.sent_before)
            expected = self.adapter_of(last, step)
            assert (step.adapter["r"], step.adapter["alpha"]) == (expected["r"], expected["alpha"])
            same(step.adapter["tensors"], expected["tensors"])
            return
        same(step.sent, self.quantized(last, step))

    def quantized(self, weights: dict[str, Tensor], step: Step) -> dict[str, Tensor]:
        """The tensors of a publish of these weights."""
        quant = self.config.quant
        layers = {
            name.removesuffix(".weight")
            for name, weight in weights.items()
            if quant.scheme != "bf16" and name.endswith("proj.weight")
        }
        assert layers == set(quantized_layers(step.sent))
        found = {}
        dtype = torch.float16 if self.config.model.dtype == "fp16" else torch.bfloat16
        for name, weight in weights.items():
            layer = name.removesuffix(".weight")
            half = weight.to(dtype)
            if layer not in layers:
                found[f"{name}.weight" if name.endswith(STACKS) else name] = half
                continue
            state, _ = compressed_tensors_compress(half, quant.scheme, quant.group_size)
            if quant.scheme in ("w8a8", "fp8"):
                state["weight_scale"] = state["weight_scale"].float()
            found |= {f"{layer}.{leaf}": tensor for leaf, tensor in state.items()}
        return found

    def check_metrics(self, step: Step) -> None:
        """Every metric has a formula with this value, and every formula its metric."""
        expected = formulas(self.config, step, self.keys, step.weights)
        expected |= self.scale.metrics()
        given = {
            name: value for name, value in step.metrics.items() if not name.startswith(MEASURED)
        }
        there = {name: value for name, value in expected.items() if value is not None}
        assert given.keys() == there.keys(), given.keys() ^ there.keys()
        wrong = {
            name: (given[name], value)
            for name, value in there.items()
            if given[name] != pytest.approx(value, rel=2e-4, abs=2e-6)
        }
        assert wrong == {}, wrong
        self.check_seconds(step)

    def check_seconds(self, step: Step) -> None:
        """Parts take no longer than the whole."""
        seconds = {name.removeprefix("timing_s/"): value for name, value in step.seconds.items()}
        phases = [seconds[name] for name in ("rollout", "reward", "update", "publish")]
        assert min(seconds.values()) >= 0
        assert sum(phases) <= seconds["step"] * 1.001
        parts = [seconds[name] for name in ("forward", "backward", "optimizer")]
        assert 0 < sum(parts) <= seconds["update"] * 1.001


def distance(given: Tensor, exact: Tensor) -> float:
    """The norm of the difference as a share of the norm of `exact`, at least of 1e-9."""
    return float((given - exact).norm() / exact.norm().clamp(min=1e-9))


def check_rounding(exact: Tensor, after: Tensor, slack: Tensor) -> None:
    """Each element is one of the two BF16 numbers around its exact value, and they are right in the mean. `slack`: how
    far the exact value may be off."""
    assert after.dtype == torch.bfloat16
    unit = torch.exp2(exact.abs().clamp(min=1e-30).log2().floor() - 7)
    error = after.double() - exact
    beyond = error.abs() - 1.001 * unit - slack
    assert float(beyond.max()) <= 0, (float(beyond.max()), float(slack.max()))
    spread = float(error.square().mean().sqrt())
    bias = abs(float(error.mean()))
    assert bias <= 5 * spread / error.numel() ** 0.5, (bias, spread, error.shape)


def same(given: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal names, dtypes, shapes and bytes."""
    assert given.keys() == expected.keys(), given.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert given[name].dtype == tensor.dtype, name
        assert given[name].shape == tensor.shape, name
        one, other = (t.contiguous().view(torch.uint8) for t in (given[name], tensor))
        assert torch.equal(one, other), name


def follow(recorder: Recorder, steps: int) -> Twin:
    """Take `steps` steps, each compared with the twin."""
    twin = Twin(recorder)
    for _ in range(steps):
        twin.check(copy.copy(recorder.train_step()))
    return twin
