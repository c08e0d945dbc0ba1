"""Counts the responses and tokens of a call of vLLM while it runs, from another thread, at no cost for vLLM.

`LLM.generate` returns when all responses have ended. Its own bar (`use_tqdm`) counts responses that have ended, which
do so late and all at once. The states of the requests in vLLM's output processor also have the tokens of those that
have not.
"""

from __future__ import annotations

from typing import Any

from qarl.progress.phases import Sampled


class LiveCounts:
    """Counts the requests of one call. `total`: number of its requests.

    It remembers the requests that it has seen, because vLLM forgets one that has ended. `generate` adds all requests
    before it samples, so what it does not see are the tokens of responses that end before its first look at them."""

    def __init__(self, llm: Any, total: int) -> None:
        self._processor = llm.llm_engine.output_processor
        self.total = total
        self._seen: dict[str, Any] = {}

    def __call__(self) -> Sampled:
        """Return the counts. While there are no tokens, `generate` may still be adding requests."""
        open_requests = dict(self._processor.request_states)
        self._seen |= open_requests
        tokens = 0
        tokens_of_done = 0
        for name, state in list(self._seen.items()):
            count = state.detokenizer.num_output_tokens()
            tokens += count
            if name not in open_requests:
                tokens_of_done += count
        # A session that waits for its next turn is still open (`qarl.rollout.sessions`).
        done = max(self.total - len(open_requests), 0) if tokens else 0
        return Sampled(done, tokens, tokens_of_done)
