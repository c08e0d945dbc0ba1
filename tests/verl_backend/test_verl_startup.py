"""What a verl run says before its first step and at Ctrl-C and SIGTERM, without Ray."""

from __future__ import annotations

import re
import signal
import sys

import pytest

from qarl.verl.startup import STAGES, StartUp, answered_interrupt


def test_each_part_of_the_start_is_said_once_with_its_seconds(capsys):
    seen = [None, [], ["xWorkerDict_0:0"], ["xWorkerDict_0:0", "vllm_server_0_0", "agent_loop_worker_0_a"]]
    current: list = [None]
    start = StartUp(lambda: current[0])
    for names in seen:
        current[0] = names
        start.look()
        start.look()
    start.end()
    start.look()
    start.end()
    lines = capsys.readouterr().err.splitlines()
    doing = ["starting Ray", *(text for _, text in STAGES)]
    assert [line for line in lines if line.endswith(" ...")] == [f"{text} ..." for text in doing]
    assert [re.sub(r": \d+ s$", "", line) for line in lines if not line.endswith(" ...")] == doing


@pytest.mark.parametrize("ray_has_started", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_is_answered_and_ends_the_run(capfd, number, ray_has_started):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), answered_interrupt(lambda: "it resumes after step 12"):
        if ray_has_started:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as ray.init does
        signal.raise_signal(number)
    assert "stopping verl now" in (err := capfd.readouterr().err) and "it resumes after step 12\n" in err
    assert signal.getsignal(number) is before


def test_another_exit_is_not_an_interrupt(capfd):
    with pytest.raises(SystemExit), answered_interrupt(str):
        sys.exit(1)
    assert not capfd.readouterr().err
