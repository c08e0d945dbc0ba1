"""The terms of `qarl bench plan`: the phase of a step to which each belongs, and what it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WAIT_SECONDS, MICRO_BATCH_WAITS = 50e-6, 10
"""In order: time that the device stands still for a copy between host and device or a synchronisation, and how many of
them each micro-batch has: its batch, its loss and its metrics (estimates)."""
LOGIT_BYTES = (24, 40)
"""Bytes that log-probs and entropy move per logit beyond the product, in a forward and in a backward (estimate)."""


class Cost(NamedTuple):
    """Of one layer in one pass: kernels, bytes, and waits: copies between host and device, and synchronisations."""

    kernels: int = 0
    moved: int = 0
    waits: int = 0


TERMS: dict[str, tuple[str, str]] = {
    "prefill": ("rollout", "products and attention of the prompts"),
    "decode": ("rollout", "products of the decode steps, and reading weights and caches"),
    "small_kernels": ("rollout", "a decode step's other kernels (estimate)"),
    "all_reduce": ("rollout", "an engine's all-reduces (estimate)"),
    "sampler": ("rollout", "sampler and log-probs of a decode step (estimate)"),
    "engine": ("rollout", "the engine's host, as far as a decode step takes longer than the device (estimate)"),
    "tail": ("rollout", "the longest response alone, from the mean length to its end"),
    "old_log_prob": ("old_log_prob", "products and attention"),
    "old_log_prob_launches": ("old_log_prob", "launches, as far as they take longer than the device (counted)"),
    "old_log_prob_elementwise": ("old_log_prob", "bytes beyond those of products (counted; of logits, estimate)"),
    "old_log_prob_gather": ("old_log_prob", "gathered blocks, copied out of the collective's buffer (by shapes)"),
    "old_log_prob_layout": ("old_log_prob", "gathered int4 weights of dense layers into a kernel's layout (by shapes)"),
    "forward": ("update", "products and attention"),
    "backward": ("update", "products and attention; on GPUs also the layers' forward again"),
    "update_launches": ("update", "as above"),
    "update_elementwise": ("update", "as above"),
    "update_gather": ("update", "as above"),
    "update_layout": ("update", "as above; in the backward int4 experts from the kernel's layout back"),
    "communication": ("update", "gathers and reduce-scatter, as far as they take longer than the passes"),
    "optimizer": ("optimizer", "Muon or AdamW on this rank's share (Muon counted)"),
    "quantize": ("optimizer", "this rank's share into low bits, its experts into the kernel's layout (counted)"),
    "sender": ("publish", "checksums and records (counted), and the gather"),
    "receiver": ("publish", "checksums, experts into the kernel's layout, writes (counted)"),
    "engine_layout": ("publish", "the engine's int4 dense layers into their kernel's layout (by shapes)"),
    "publish": ("publish", "passes over the published bytes"),
    "waits": ("other", "copies between host and device, and synchronisations (counted; of micro-batches, estimate)"),
    "constant": ("other", "Ray, tokenizer, rewards, verl's metrics, sleep and wake (assumed)"),
}
"""Term -> phase, and what it is."""
PHASES = ("rollout", "old_log_prob", "update", "optimizer", "publish", "other")


def by_phase(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase."""
    return {phase: sum(s for term, s in seconds.items() if TERMS[term][0] == phase) for phase in PHASES}
