"""Refusals of a verl run while it is set up, before Ray is started."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("verl")

from verl_runs import quickstart

from qarl.errors import UserError
from qarl.verl.plugin import engine as plugin_engine
from qarl.verl.plugin.engine import FSDPEngineWithLMHead, QaRLFSDPEngine
from qarl.verl.process import set_environment
from qarl.verl.run import verl_config

LIMIT = "ray_kwargs.ray_init.runtime_env.env_vars.QARL_PUBLISH_TIMEOUT"


@pytest.fixture(autouse=True)
def _environment_as_before():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("place", ["environment", "section verl"])
@pytest.mark.parametrize(
    ("value", "good"), [("soon", False), ("0", False), ("-3", False), ("inf", False), ("7.5", True)]
)
def test_a_bad_time_limit_is_refused_before_anything_starts(monkeypatch, place, value, good, on_cpu):
    """The first publish would be minutes later."""
    monkeypatch.setenv("QARL_PUBLISH_TIMEOUT", value if place == "environment" else "")
    config = quickstart(verl={} if place == "environment" else {f"+{LIMIT}": value})
    set_environment(config, on_cpu)
    if good:
        env_vars = verl_config(config, on_cpu=on_cpu).ray_kwargs.ray_init.runtime_env.env_vars
        assert value == env_vars.QARL_PUBLISH_TIMEOUT
        return
    with pytest.raises(UserError, match=f"QARL_PUBLISH_TIMEOUT='{value}' is not a time limit"):
        verl_config(config, on_cpu=on_cpu)


def test_from_verls_command_line_the_engine_refuses_before_it_loads(monkeypatch):
    monkeypatch.setattr(plugin_engine, "get_device_name", lambda: "cpu")
    monkeypatch.setattr(FSDPEngineWithLMHead, "__init__", lambda *args: pytest.fail("loads the model"))
    monkeypatch.setenv("QARL_PUBLISH_TIMEOUT", "soon")
    with pytest.raises(UserError, match="QARL_PUBLISH_TIMEOUT='soon'"):
        QaRLFSDPEngine(None, None, None, None)


def test_an_engine_that_publishes_as_verl_does_takes_no_notice(monkeypatch):
    monkeypatch.setattr(plugin_engine, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(FSDPEngineWithLMHead, "__init__", lambda *args: None)
    monkeypatch.setenv("QARL_PUBLISH_TIMEOUT", "soon")
    assert QaRLFSDPEngine(None, None, None, None).quant is None
