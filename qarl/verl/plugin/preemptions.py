"""Counts vLLM's preemptions. Each one means that the KV cache was too small during a generation.

verl's own `num_preempted` is always empty, because no release of vLLM reports it. So this module reads a counter from
the Prometheus metrics of each vLLM server (`/metrics`). The servers publish it only if
`actor_rollout_ref.rollout.disable_log_stats` is False.
"""

from __future__ import annotations

import logging
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from qarl.verl.plugin.alive import engine_servers

ANSWER_SECONDS = 10.0
_COUNTER = re.compile(r"^vllm:num_preemptions_total(?:\{.*\})? (\S+)", re.MULTILINE)

_log = logging.getLogger("qarl.verl.plugin")


class Preemptions:
    """Counts preemptions between calls of `since_last`. A run starts its own servers, so their counters start at 0."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._before = 0
        self._complained = False

    def since_last(self) -> int | None:
        """Return the preemptions of all servers since the last successful call. If a server reports no counter, return
        None, and log a warning the first time."""
        try:
            total = self._total()
        except Exception as error:  # a missing metric must not end the run, whether Ray, urllib or the server failed
            if not self._complained:
                self._complained = True
                _log.warning(
                    "rollout/preemptions is not known (%s: %s); it needs "
                    "actor_rollout_ref.rollout.disable_log_stats=False",
                    type(error).__name__,
                    error,
                )
            return None
        new, self._before = total - self._before, total
        return new

    def _total(self) -> int:
        import ray

        for name, actor in engine_servers().items():
            if name not in self._urls:
                address, port = ray.get(actor.get_server_address.remote(), timeout=ANSWER_SECONDS)
                self._urls[name] = f"http://{f'[{address}]' if ':' in address else address}:{port}/metrics"
        if not self._urls:
            raise LookupError("there is no server")
        with ThreadPoolExecutor(min(len(self._urls), 16)) as pool:
            return sum(pool.map(lambda url: count_in(read(url)), self._urls.values()))


def read(url: str) -> str:
    """Return the text at `url`, requested without a proxy because the servers are in the run's own network."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=ANSWER_SECONDS) as answer:
        content: bytes = answer.read()
    return content.decode()


def count_in(metrics: str) -> int:
    """Return the sum of the counter over a server's engines. Raise LookupError if the text has no counter."""
    counts = _COUNTER.findall(metrics)
    if not counts:
        raise LookupError("a server publishes no vllm:num_preemptions_total")
    return round(sum(map(float, counts)))
