"""Whether verl's engines hold what a delta publish would change: any doubt is a no."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from qarl.errors import UserError
from qarl.verl.plugin import held
from qarl.verl.plugin.config import quant_settings


class Server:
    """A handle of Ray's: `answer` is what `ray.get` makes of the question."""

    def __init__(self, answer: Any) -> None:
        self.asked: list[Any] = []
        self.collective_rpc = SimpleNamespace(remote=lambda method, args: self.asked.append((method, args)) or answer)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [([], False), ([None], True), ([None, None], True), ([None, RuntimeError("it holds others")], False)],
)
def test_all_servers_must_say_yes(monkeypatch, answers, expected):
    servers = [Server(answer) for answer in answers]

    def get(questions: list[Any], timeout: float) -> list[Any]:
        assert timeout == 7
        for question in questions:
            if isinstance(question, Exception):
                raise question
        return questions

    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr(held, "engine_servers", lambda: {str(i): server for i, server in enumerate(servers)})
    assert held.all_hold("abc", 7) is expected
    assert all(server.asked == [("qarl_check_held", ("abc",))] for server in servers)


def test_a_server_that_is_gone_is_a_no(monkeypatch):
    def engines() -> dict[str, Any]:
        def gone(method: str, args: Any) -> None:
            raise ConnectionError("the actor died")

        return {"a": SimpleNamespace(collective_rpc=SimpleNamespace(remote=gone))}

    monkeypatch.setattr(held, "engine_servers", engines)
    assert held.all_hold("abc", 1) is False


def test_other_values_of_the_key_are_refused():
    assert quant_settings({"publish_delta": "off"}).publish_delta == "off"
    with pytest.raises(UserError, match=r"publish_delta=.always.: must be one of auto, off"):
        quant_settings({"publish_delta": "always"})
    with pytest.raises(UserError, match=r"(?s)does not support w4a8.*backend=local with quant.kernels=qarl"):
        quant_settings({"scheme": "w4a8"})
