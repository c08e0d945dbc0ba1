"""What does not go with engines of their own (`trainer.staleness`), found by `qarl.config.checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qarl.config.errors import Problem, bad

Values = Mapping[str, Any]
Problems = Iterator[Problem]
KEY = "trainer.staleness"


def stale_responses_need_two_processes(v: Values) -> Problems:
    if v[KEY] and v["backend"] == "local":
        reason = "backend=local is one process, which samples and updates in turn"
        yield bad(v, KEY, reason, "set it to 0, or set backend=verl")


def one_engine_is_one_device_of_one_machine(v: Values) -> Problems:
    if not v[KEY] or v["backend"] == "local":
        return
    reason = f"with {KEY}={v[KEY]} QaRL runs on one machine, and each engine on one device"
    for key in ("trainer.nnodes", "rollout.tensor_model_parallel_size"):
        if v[key] != 1:
            yield bad(v, key, reason, f"set it to 1, or set {KEY}=0")


def all_weights_are_trained(v: Values) -> Problems:
    if v[KEY] and v["lora.r"]:
        reason = f"with {KEY}={v[KEY]} adapters cannot be published"
        yield bad(v, "lora.r", reason, f"set it to 0 to train all weights, or set {KEY}=0")


def a_response_is_one_turn(v: Values) -> Problems:
    key = "rollout.environment"
    if v[KEY] and v[key] is not None:
        reason = f"with {KEY}={v[KEY]} a response is a single turn"
        yield bad(v, key, reason, f"remove it, or set {KEY}=0")


def texts_that_end_a_response_are_not_interrupted(v: Values) -> Problems:
    key = "rollout.stop"
    if v[KEY] and v[key]:
        reason = (
            f"with {KEY}={v[KEY]} a publish interrupts responses, each part is a request of its own, and vLLM misses a "
            "text that begins in one part and ends in the next"
        )
        yield bad(v, key, reason, f"use rollout.stop_token_ids, or set {KEY}=0")


def old_log_probs_are_the_trainers(v: Values) -> Problems:
    key = "actor.old_log_probs"
    if v[KEY] and v[key] == "rollout":
        reason = f"with {KEY}={v[KEY]} the rollout's log-probs are those of older weights"
        yield bad(v, key, reason, "set it to auto or recompute, which then are the same")


CHECKS: tuple[Callable[[Values], Problems], ...] = (
    stale_responses_need_two_processes,
    one_engine_is_one_device_of_one_machine,
    all_weights_are_trained,
    a_response_is_one_turn,
    texts_that_end_a_response_are_not_interrupted,
    old_log_probs_are_the_trainers,
)
