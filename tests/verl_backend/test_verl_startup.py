"""What a verl run says before its first step and at Ctrl-C, without Ray."""

from __future__ import annotations

import re
import signal

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


def test_the_first_interrupt_is_answered_and_ends_the_run(capfd):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), answered_interrupt(lambda: "it resumes after step 12"):
        signal.raise_signal(signal.SIGINT)
    assert "stopping verl now" in (err := capfd.readouterr().err) and "it resumes after step 12\n" in err
    assert signal.getsignal(signal.SIGINT) is before
