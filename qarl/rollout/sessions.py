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
    """A conversation in the engine. `name`: vLLM's for the request. `known`: its tokens so far but the last one, which
    the engine has computed. `sampled`: number of tokens in its turns."""

    name: str
    known: int
    sampled: int


@dataclass
class _Turn:
    """A turn of a session, with the names of vLLM's CompletionOutput."""

    token_ids: list[int]
    logprobs: Any
    finish_reason: str
    routed_experts: Any = None


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
        for row, request, sampling in zip(rows, requests, params, strict=True):
            turn = turns[row]
            if len(turn.token_ids) > sampling.max_tokens:
                # vLLM keeps the limit of the first turn. The conversation ends here (`qarl.turns.loop`).
                turn.token_ids = turn.token_ids[: sampling.max_tokens]
                turn.logprobs = turn.logprobs[: sampling.max_tokens]
                turn.finish_reason = "length"
            known = len(request["prompt_token_ids"]) + len(turn.token_ids) - 1
            self._open[row].known = known
        return [turns[row] for row in rows]

    def _add(
        self, engine: Any, row: int, tokens: Sequence[int], sampling: Any, adapter: Any
    ) -> None:
        session = self._open.get(row)
        new = tokens if session is None else tokens[session.known :]
        request = engine.input_processor.process_inputs(
            str(row),
            {"prompt_token_ids": list(new)},
            sampling,
            supported_tasks=engine.get_supported_tasks(),
            lora_request=adapter,
            resumable=True,
        )
        if session is None:
            engine.input_processor.assign_request_id(request)
            self._open[row] = _Session(request.request_id, 0, 0)
        else:
            request.external_req_id = request.request_id
            request.request_id = session.name
        engine.output_processor.add_request(request, None, None, 0)
        # Both sides append to the prompt, which in one process would be the same list.
        of_core = copy(request)
        of_core.prompt_token_ids = list(new)
        engine.engine_core.add_request(of_core)

    def _turn(self, session: _Session, completion: Any) -> _Turn:
        """Return the last turn of a completion, which has the tokens of all turns."""
        start = session.sampled
        session.sampled = len(completion.token_ids)
        return _Turn(
            list(completion.token_ids[start:]),
            completion.logprobs[start:],
            completion.finish_reason,
            completion.routed_experts,
        )
