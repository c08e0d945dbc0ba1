"""The doctor run as from the command line, and its diagnosis beside what training says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qarl.config import load_config
from qarl.doctor.__main__ import main
from qarl.doctor.findings import Finding
from qarl.doctor.run import run_checks
from qarl.doctor.target import Target, this_machine
from qarl.train import main as train


def examine(*arguments: str, config: str = "run.yaml") -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings."""
    code = main([f"config={config}", "doctor.json=findings.json", *arguments])
    report = json.loads(Path("findings.json").read_text())
    assert report["exit_code"] == code
    return code, report["findings"]


def said(findings: list[dict[str, Any]], status: str, topic: str | None = None) -> list[str]:
    return [f["what"] for f in findings if f["status"] == status and topic in (None, f["topic"])]


def assert_same_diagnosis(capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
    capsys.readouterr()
    code, findings = examine(*arguments)
    assert code == 1
    assert not [f for f in findings if f["what"].startswith("the check broke")]
    errors = [f for f in findings if f["status"] == "error"]
    assert all(f.get("fix") for f in findings if f["status"] != "ok")
    capsys.readouterr()
    assert train(["config=run.yaml", *arguments]) == 2
    refusal = capsys.readouterr().err.partition("error: ")[2].strip().splitlines()
    what, wanted = refusal[0], {line.strip() for line in refusal[1:] if line.strip().startswith(("where:", "fix:"))}
    same = [f for f in errors if f["what"] == what]
    assert same, f"training says {what!r}, the doctor {[f['what'] for f in errors]}"
    assert wanted <= {f"{key}: {finding.get(key)}" for finding in same for key in ("where", "fix")}


def topic_of(name: str, *arguments: str, target: Target | None = None, threads: str | None = None) -> list[Finding]:
    config = load_config(["config=run.yaml", *arguments])
    found = run_checks(config, target or this_machine(), threads_given=threads)
    return [finding for finding in found.findings if finding.topic == name]


def cut_the_weights() -> None:
    path = Path("model/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1000])
