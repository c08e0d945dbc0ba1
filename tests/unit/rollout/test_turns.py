"""The end of conversations that are held in sessions."""

import pytest

from qarl.errors import UserError
from qarl.rollout.engine_config import SamplingConfig
from qarl.rollout.turns import _Rollout


class LostEngine:
    """An engine whose process is gone: it refuses whatever it is asked."""

    def __init__(self) -> None:
        self.llm = self
        self.llm_engine = self
        self.aborted = 0

    def abort_request(self, names, internal):
        self.aborted += 1
        raise RuntimeError("the engine is dead")


def test_the_first_error_of_a_lost_engine_is_the_one_that_is_raised():
    engine = LostEngine()
    rollout = _Rollout(engine, SamplingConfig(max_tokens=4), None, 1)
    with pytest.raises(UserError, match="the environment returned 3"), rollout.in_sessions():
        raise UserError("the environment returned 3", where="x", fix="y")
    assert engine.aborted == 1


def test_an_engine_that_cannot_end_its_sessions_is_an_error():
    rollout = _Rollout(LostEngine(), SamplingConfig(max_tokens=4), None, 1)
    with pytest.raises(RuntimeError, match="dead"), rollout.in_sessions():
        pass
