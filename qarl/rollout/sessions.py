"""Conversations whose keys and values stay in vLLM's cache from turn to turn, by vLLM's resumable requests.

A turn as a request of its own makes the engine prefill all that it has decoded before, and in long prompts a prefill
has other bits than decoding (docs/understand/alignment.md). The trainer would need a forward for each turn to follow
that. In a session the engine computes each token once: it prefills what is new behind the keys and values that it has,
and decodes. So one forward of the trainer follows it, with the same parts (`qarl.kernels.cpu.layer_ops.Row`), and the
cost of a conversation grows with its tokens, not with its tokens times its turns.

vLLM has resumable requests for streamed inputs (`AsyncLLM.generate` with a stream of inputs). Its scheduler then drops
the last sampled token, which it has not computed, so a session gives it back as the first of the new ones. `LLM` has no
method for them, so this makes the requests as `AsyncLLM` does, and steps the engine. The seed of the first turn is that
of the whole session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

Run = Callable[..., list[Any]]
"""vLLM, requests, sampling parameters, adapter -> a completion for each."""


def whole_requests(
    llm: Any, requests: Sequence[Any], params: Sequence[Any], adapter: Any
) -> list[Any]:
    """Sample each request by itself. Return vLLM's completions."""
    outputs = llm.generate(requests, params, use_tqdm=False, lora_request=adapter)
    return [output.outputs[0] for output in outputs]


@dataclass
class _Session:
    """A conversation in the engine. `name`: vLLM's for the request. `prompt`: tokens of the prompt of its last turn.
    `computed`: tokens that the engine has computed, all but the last one. `sampled`: tokens of its turns."""

    name: str
    prompt: int = 0
    computed: int = 0
    sampled: int = 0


@dataclass
class _Turn:
    """A turn of a session, with the names of vLLM's CompletionOutput."""

    token_ids: list[int]
    logprobs: Any
    finish_reason: str
    routed_experts: Any = None

    def up_to(self, limit: int) -> _Turn:
        """Return the turn, cut at `limit` tokens. vLLM keeps the limit of the first turn, and a conversation ends with
        a turn that is longer than what is left of it (`qarl.turns.loop`)."""
        beyond = len(self.token_ids) - limit
        if beyond <= 0:
            return self
        routed = None if self.routed_experts is None else self.routed_experts[:-beyond]
        return _Turn(self.token_ids[:limit], self.logprobs[:limit], "length", routed)


class Sessions:
    """Open conversations of one engine, by their numbers. At most as many as fit its cache and `max_num_seqs`, because
    each holds its place between its turns."""

    def __init__(self) -> None:
        self._open: dict[int, _Session] = {}

    def turn_of(self, rows: Sequence[int]) -> Run:
        """Return what samples the next turns of the conversations `rows`, for `RolloutEngine.generate`."""
        return partial(self._sample, rows)

    def close(self, llm: Any) -> None:
        """End all conversations, and free their places in the cache."""
        names = [session.name for session in self._open.values()]
        self._open.clear()
        llm.llm_engine.abort_request(names, internal=True)

    def _sample(
        self,
        rows: Sequence[int],
        llm: Any,
        requests: Sequence[Any],
        params: Sequence[Any],
        adapter: Any,
    ) -> list[_Turn]:
        from vllm.sampling_params import RequestOutputKind

        engine = llm.llm_engine
        waiting = {}
        for row, request, sampling in zip(rows, requests, params, strict=True):
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
            waiting[str(row)] = row
            self._add(engine, row, request["prompt_token_ids"], sampling, adapter)
        turns: dict[int, _Turn] = {}
        while waiting:
            for output in engine.step():
                (completion,) = output.outputs
                if completion.finish_reason is not None:
                    row = waiting.pop(output.request_id)
                    turns[row] = self._turn(self._open[row], completion)
        limits = [sampling.max_tokens for sampling in params]
        return [turns[row].up_to(limit) for row, limit in zip(rows, limits, strict=True)]

    def _add(
        self, engine: Any, row: int, tokens: Sequence[int], sampling: Any, adapter: Any
    ) -> None:
        from vllm.inputs import tokens_input

        session = self._open.get(row)
        new = list(tokens if session is None else tokens[session.computed :])
        request = engine.input_processor.process_inputs(
            str(row),
            tokens_input(new),
            sampling,
            supported_tasks=engine.get_supported_tasks(),
            lora_request=adapter,
            resumable=True,
        )
        if session is None:
            engine.input_processor.assign_request_id(request)
            session = self._open[row] = _Session(request.request_id)
        else:
            request.external_req_id = request.request_id
            request.request_id = session.name
        session.prompt = len(tokens)
        engine.output_processor.add_request(request, None, None, 0)
        # Both sides append to the prompt, which in one process would be the same list.
        of_core = copy(request)
        of_core.prompt_token_ids = [*new]
        engine.engine_core.add_request(of_core)

    def _turn(self, session: _Session, completion: Any) -> _Turn:
        """Return the last turn of a completion, which has the tokens of all turns."""
        start = session.sampled
        session.sampled = len(completion.token_ids)
        tokens = list(completion.token_ids[start:])
        session.computed = session.prompt + len(tokens) - 1
        routed = completion.routed_experts
        if routed is not None:  # those of all turns, each with those of its prompt
            routed = routed[-session.computed :]
        return _Turn(tokens, completion.logprobs[start:], completion.finish_reason, routed)
