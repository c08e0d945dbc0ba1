"""How a refusal is asked for: through `qarl.train.main`, as on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_runs import Refusal

from qarl.train import main


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run with these overrides, insist on a proper refusal that contains `words`, and give its message."""

    def refuse(*overrides: str, words: list[str], config: str = "run.yaml") -> str:
        capsys.readouterr()
        code = main([f"config={config}", *overrides])
        printed = capsys.readouterr()
        assert code == 2
        assert "Traceback" not in printed.out + printed.err
        assert printed.err.count("error: ") == 1, printed.err
        message = printed.err[printed.err.index("error: ") :]
        assert [word for word in [*words, "fix: "] if word not in message] == [], message
        assert not list(Path().rglob("metrics.jsonl"))
        return message

    return refuse
