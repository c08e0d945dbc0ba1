"""Preemptions in a verl run: counted by vLLM's servers, asked by the sampler, logged with the step."""

from __future__ import annotations

import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import ray
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl_runs import KWARGS

from qarl.verl.plugin.preemptions import count_in
from qarl.verl.plugin.replay import PromptReplayBuffer

OTHERS = """# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""


def counters(*values: float) -> str:
    lines = [
        f'vllm:num_preemptions_total{{engine="{i}",model_name="m {{x}}"}} {value}' for i, value in enumerate(values)
    ]
    return OTHERS + "\n".join(lines) + "\n"


@pytest.fixture
def servers(monkeypatch):
    """Answers of two servers of a run at /metrics, by name; Ray knows them and others."""
    answers = {"vllm_server_0_0": counters(0.0), "vllm_server_1_0": counters(0.0, 0.0)}
    running, addresses = [], {}
    for name in answers:

        class Handler(BaseHTTPRequestHandler):
            server_name = name

            def do_GET(self) -> None:
                text = answers[self.server_name] if self.path == "/metrics" else ""
                self.send_response(200 if text else 500)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        addresses[name] = server.server_address

    def actor(name: str) -> SimpleNamespace:
        return SimpleNamespace(get_server_address=SimpleNamespace(remote=lambda: addresses[name]))

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: [*answers, "vllm_server_0_1", "agent_loop_worker_0"])
    monkeypatch.setattr(ray, "get_actor", actor)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    yield answers
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def sampler(monkeypatch, servers):
    monkeypatch.setattr(ReplayBuffer, "sample", lambda self, *args: ("batch", {"verls": 1.0}))
    return PromptReplayBuffer(**KWARGS)


def test_a_step_logs_the_preemptions_of_its_generation(sampler, servers, caplog):
    assert sampler.sample(1, "train", 4) == ("batch", {"verls": 1.0, "rollout/preemptions": 0.0})
    assert "KV cache" not in caplog.text
    servers |= {"vllm_server_0_0": counters(2.0), "vllm_server_1_0": counters(1.0, 4.0)}
    with caplog.at_level(logging.WARNING):
        assert sampler.sample(2, "train", 4)[1]["rollout/preemptions"] == 7.0
    assert "7 times vLLM interrupted a response and computed it again, because the KV cache is too small" in caplog.text


def test_those_of_an_evaluation_are_no_steps(sampler, servers):
    servers["vllm_server_0_0"] = counters(3.0)
    assert sampler.sample(1, "val", 4) == ("batch", {"verls": 1.0})
    assert sampler.sample(1, "train", 4)[1]["rollout/preemptions"] == 0.0


@pytest.mark.parametrize("answer", [OTHERS, ""])
def test_a_server_that_does_not_say_is_a_warning_once(sampler, servers, caplog, answer):
    """Without statistics a server publishes other metrics. A metric ends no run, and comes back with the answers."""
    good, servers["vllm_server_1_0"] = servers["vllm_server_1_0"], answer
    for _ in range(2):
        assert sampler.sample(1, "train", 4)[1] == {"verls": 1.0}
    (record,) = caplog.records
    assert "disable_log_stats=False" in record.getMessage()
    servers["vllm_server_1_0"] = good
    assert sampler.sample(1, "train", 4)[1]["rollout/preemptions"] == 0.0


def test_without_ray_none_is_started(sampler, monkeypatch, caplog):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: pytest.fail("starts a Ray"))
    assert sampler.sample(1, "train", 4)[1] == {"verls": 1.0}
    assert "there is no server" in caplog.text


def test_the_counter_is_that_of_vllm():
    """Its name, as Prometheus writes it."""
    pytest.importorskip("vllm")
    import prometheus_client
    from vllm.v1.metrics import loggers

    registry = prometheus_client.CollectorRegistry()
    with open(loggers.__file__, encoding="utf-8") as file:
        assert 'name="vllm:num_preemptions",' in file.read()
    counter = prometheus_client.Counter("vllm:num_preemptions", "", ["engine"], registry=registry)
    for engine in ("0", "1"):
        counter.labels(engine).inc(3)
    assert count_in(prometheus_client.generate_latest(registry).decode()) == 6
