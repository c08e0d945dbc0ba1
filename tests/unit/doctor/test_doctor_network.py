"""The doctor and training on a machine without a network: no waiting, and the configs that come with QaRL."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from doctor_rig import examine, said

from qarl.checks import model_folder as hub
from qarl.config import load_config
from qarl.config.read_config import available_configs
from qarl.train import main

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("startable_run")]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the address of the Hub; the answer is not kept from one test to the next."""
    from huggingface_hub import constants

    hub.why_unreachable.cache_clear()
    yield lambda url: monkeypatch.setattr(constants, "ENDPOINT", url)
    hub.why_unreachable.cache_clear()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of every `time.sleep` of a second and more, which is how huggingface_hub waits between its requests."""
    real, slept = time.sleep, []

    def sleep(seconds: float) -> None:
        slept.extend([seconds] if seconds >= 1 else [])
        real(min(seconds, 0.1))

    monkeypatch.setattr(time, "sleep", sleep)
    return slept


def test_whether_the_hub_can_be_reached(
    monkeypatch: pytest.MonkeyPatch, endpoint: Callable[[str], None]
) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub, "SECONDS", 0.3)
        start = time.perf_counter()
        assert hub.why_unreachable() and hub.loading_options("Qwen/Qwen3-8B") == {
            "local_files_only": True
        }
        assert time.perf_counter() - start < 9  # huggingface_hub's own limit is 10 s
    hub.why_unreachable.cache_clear()
    with HTTPServer(
        ("127.0.0.1", 0), BaseHTTPRequestHandler
    ) as server:  # answers 501, and that is an answer
        threading.Thread(target=server.handle_request, daemon=True).start()
        endpoint(f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(hub, "SECONDS", 60.0)
        assert hub.why_unreachable() is None and hub.loading_options("Qwen/Qwen3-8B") == {}
    hub.why_unreachable.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.why_unreachable() == "HF_HUB_OFFLINE is set"
    assert hub.loading_options("model") == {}  # a folder


PAPERS = ("qwen2_5_math_1_5b_w4a16", "qwen2_5_math_7b_w4a16", "qwen3_8b_w4a16", "qwen3_30b_w4a16")


@pytest.mark.parametrize(
    ("device", "config"), [("", PAPERS[0]), *(("h100", paper) for paper in PAPERS)]
)
def test_shipped_configs_are_examined_without_a_network(
    pauses: list[float], endpoint: Callable[[str], None], config: str, device: str
) -> None:
    endpoint("http://127.0.0.1:1")
    elsewhere = [f"doctor.device={device}"] if device else []
    _, findings = examine(*elsewhere, config=f"{config}.yaml")
    assert pauses == []
    (why,) = [
        f
        for f in findings
        if "is not on this machine and cannot be" in f["what"] and f["topic"] == "model"
    ][:1]
    assert why["status"] == ("note" if device else "error") and "ConnectError" in why["why"]
    assert any("own copy of the config of" in what for what in said(findings, "warning", "model"))
    for topic in ("layer sizes", "kernels", "published tensors", "ignore list"):
        assert said(findings, "ok", topic) or said(findings, "warning", topic), topic
    assert not [
        f
        for f in findings
        if f["what"].startswith("not checked") and f["topic"] in ("memory", "layer sizes")
    ]
    memory = [f["what"] for f in findings if f["topic"] == "memory"]
    assert any("needed at the peak" in what for what in memory)
    assert any("of full length" in what or "too small for one sequence" in what for what in memory)


def test_every_model_of_a_shipped_config_is_carried() -> None:
    shipped = [load_config([f"config={name}"]) for name in available_configs()]
    paths = {config.model.path for config in shipped if not config.model.path.startswith("models/")}
    assert len(paths) == 6 and all(hub.carried_config(path) for path in paths)
    assert hub.carried_config("Qwen/../Qwen3-8B") is hub.carried_config("you/Qwen3-8B") is None
    base, instruct = (hub.carried_config(f"Qwen/Qwen3-8B{suffix}") for suffix in ("-Base", ""))
    assert (
        base
        and instruct
        and base[1] != instruct[1]
        and base[1]["hidden_size"] == instruct[1]["hidden_size"]
    )


def test_a_model_of_nobody_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], pauses: list[float], endpoint: Callable[[str], None]
) -> None:
    endpoint("http://127.0.0.1:1")
    code, findings = examine("model.path=nobody/nothing")
    assert code == 1 and main(["config=run.yaml", "model.path=nobody/nothing"]) == 2
    refusal = (
        "the model 'nobody/nothing' is not on this machine and cannot be downloaded from the Hub"
    )
    assert said(findings, "error") == [refusal] and refusal in capsys.readouterr().err
    assert pauses == []
