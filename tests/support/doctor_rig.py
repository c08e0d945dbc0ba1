"""The doctor run as from the command line, and its findings on one topic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qarl.checks.check import Finding
from qarl.checks.machine import Machine, this_machine
from qarl.config import load_config
from qarl.doctor.__main__ import main
from qarl.doctor.examination import run_checks


def examine(*arguments: str, config: str = "run.yaml") -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings."""
    code = main([f"config={config}", "doctor.json=findings.json", *arguments])
    report = json.loads(Path("findings.json").read_text())
    assert report["exit_code"] == code
    return code, report["findings"]


def said(findings: list[dict[str, Any]], status: str, topic: str | None = None) -> list[str]:
    return [f["what"] for f in findings if f["status"] == status and topic in (None, f["topic"])]


def topic_of(name: str, *arguments: str, target: Machine | None = None) -> list[Finding]:
    config = load_config(["config=run.yaml", *arguments])
    report = run_checks(config, target or this_machine())
    return [finding for finding in report.findings if finding.topic == name]


def cut_the_weights() -> None:
    path = Path("model/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1000])
