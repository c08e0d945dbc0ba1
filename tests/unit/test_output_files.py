"""A JSON file that a command writes where its user says: it replaces only what the same command wrote earlier."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qarl.bench import kernel_arguments, step_arguments
from qarl.bench.plan.work import Work
from qarl.checks.machine import DoctorOptions
from qarl.config.command_arguments import read_request
from qarl.errors import UserError
from qarl.eval.arguments import EvalRequest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def _eval(path: Path) -> Any:
    return read_request(EvalRequest, ["a", f"output={path}"], example="eval", positional="model")


def _doctor(path: Path) -> Any:
    return read_request(DoctorOptions, [f"json={path}"], example="doctor")


def _kernels(path: Path) -> Any:
    return kernel_arguments.Arguments.parse("kernels", ["device=cpu", f"json={path}"])


def _steps(path: Path) -> Any:
    return step_arguments.Arguments.parse("steps", ["device=cpu", f"json={path}"])


def _plan(path: Path) -> Any:
    return Work.parse("plan", [f"json={path}"])


COMMANDS: dict[Callable[[Path], Any], dict[str, Any]] = {
    _eval: {"samples": {}, "scores": {}},
    _doctor: {"name": "run", "exit_code": 0, "counts": {}, "findings": []},
    _kernels: json.loads((RESULTS / "kernels_cpu.json").read_text()),
    _steps: json.loads((RESULTS / "steps_cpu.json").read_text()),
    _plan: {"rates": [], "results": []},
}
FOREIGN = {
    "summary.json": '{"steps": 4, "finished": true}',
    "metrics.jsonl": '{"step": 1}\n{"step": 2}\n',
    "test.parquet": "PAR1\x00\x80",
    "list.json": "[1, 2]",
}


@pytest.mark.parametrize("request_of", COMMANDS)
def test_a_file_of_another_kind_stays(request_of: Callable[[Path], Any], tmp_path: Path) -> None:
    for name, text in FOREIGN.items():
        path = tmp_path / name
        path.write_text(text, encoding="latin-1")
        with pytest.raises(UserError, match="this command did not write it; move it away"):
            request_of(path)
        assert path.read_text(encoding="latin-1") == text
    for other, content in COMMANDS.items():
        path = tmp_path / "result.json"
        path.write_text(json.dumps(content))
        if other is request_of:
            request_of(path)
        else:
            with pytest.raises(UserError, match="this command did not write it"):
                request_of(path)


@pytest.mark.parametrize("request_of", COMMANDS)
def test_new_and_empty_files_are_written(request_of: Callable[[Path], Any], tmp_path: Path) -> None:
    request_of(tmp_path / "new" / "result.json")
    (tmp_path / "empty.json").touch()
    request_of(tmp_path / "empty.json")
    with pytest.raises(UserError, match="it is no ordinary file"):
        request_of(Path("/dev/null"))
