"""Records of a run, read back with json, TensorBoard's own reader and pandas-free Python."""

from __future__ import annotations

import json
import math
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
import wandb

from qarl.errors import UserError
from qarl.metrics.plots import plot_run
from qarl.metrics.tracker import Tracker, check_wandb_key, read_metrics, write_versions
from qarl.metrics.warning_log import WarningLog


def write_lines(run_dir: Path, *entries: dict[str, float]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def strict_lines(run_dir: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [
        json.loads(x, parse_constant=refuse)
        for x in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


def test_metrics_are_strict_json_and_flushed_each_step(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, [], 2, {})
    tracker.log(
        {"a": math.nan, "b": -math.inf, "c": torch.tensor(2.5), "d": np.int64(3), "e": 1}, step=1
    )
    assert strict_lines(tmp_path) == [
        {"step": 1, "a": "nan", "b": "-inf", "c": 2.5, "d": 3, "e": 1}
    ]
    tracker.log({"a": 1.0}, step=2)
    tracker.close()
    first, second = read_metrics(tmp_path)
    assert math.isnan(first["a"]) and first["b"] == -math.inf and second == {"step": 2, "a": 1.0}


def test_resume_appends_after_a_torn_line_and_replaces_redone_steps(tmp_path: Path) -> None:
    write_lines(tmp_path, {"step": 1, "a": 1}, {"step": 2, "a": 2, "old": 1}, {"step": 3, "a": 3})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 2, 3]
    with Tracker(tmp_path, [], 5, {}, start_step=1) as tracker:
        tracker.log({"a": 20}, step=2)
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1}, {"step": 2, "a": 20}]


def test_the_console_has_a_line_for_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Tracker(tmp_path, ["console"], 3, {}) as tracker:
        tracker.message("hello")
        tracker.log({"val/accuracy": 0.25}, step=0)
        metrics = {
            "critic/score/mean": 0.5,
            "mismatch/k3": 4.2e-4,
            "actor/inside_band_frac_after_first": 0.9,
        }
        metrics["timing_s/step"] = 0.1
        tracker.log(metrics, step=1)
        tracker.log({"mismatch/k3": 1e-3, "mismatch/of_version_abs_mean": 0.0}, step=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["hello", "step 0/3  accuracy 0.250"]
    assert lines[2].startswith("step 1/3  0.10 s/step  left 00:00  ")
    assert lines[2].endswith("reward 0.500  k3 4.2e-04  inside band 90%")
    assert lines[3].endswith("k3 1.0e-03  |δ| of versions 0.0e+00")


def test_wandb_resumes_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, object]] = []
    logged: list[tuple[dict[str, float], int]] = []

    def init(**options: object) -> SimpleNamespace:
        started.append(options)
        return SimpleNamespace(
            id="abc", log=lambda metrics, step: logged.append((metrics, step)), finish=lambda: None
        )

    spec = SimpleNamespace(origin="wandb/__init__.py")
    online = SimpleNamespace(settings=SimpleNamespace(mode="online"))
    fake = SimpleNamespace(
        init=init, __spec__=spec, setup=lambda: online, login=lambda **options: True, Error=OSError
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for start_step in (0, 1, 0):
        with Tracker(tmp_path / "run", ["wandb"], 3, {"seed": 1}, start_step=start_step) as tracker:
            tracker.log({"a": 1.0}, step=start_step + 1)
    assert [options["id"] for options in started] == [None, "abc", None]
    assert started[0]["name"] == "run" and started[0]["config"] == {"seed": 1}
    assert logged[:2] == [({"a": 1.0}, 1), ({"a": 1.0}, 2)]


def test_a_logger_that_is_not_installed_fails_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"package wandb is not installed(.|\n)*pip install wandb"):
        Tracker(tmp_path / "run", ["console", "wandb"], 3, {})
    assert not (tmp_path / "run").exists()


def test_versions_name_what_bits_depend_on(tmp_path: Path) -> None:
    versions = json.loads(write_versions(tmp_path).read_text())
    assert versions["packages"]["torch"] == version("torch")  # without +cu130, which `device` has
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["threads"]["torch"] == torch.get_num_threads()
    assert versions["device"]["type"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert versions["cpu"]["model"]
    capability = torch.backends.cpu.get_cpu_capability()
    assert ("avx512f" in versions["cpu"]["flags"]) or capability != "AVX512"


def full_run(run_dir: Path, steps: int = 30) -> Path:
    entries = []
    for step in range(1, steps + 1):
        entry = {
            "step": step,
            "critic/score/mean": step / steps,
            "mismatch/k3": 1e-3 / step,
            "actor/pos_outside_band_frac_after_first": 0.1,
            "actor/neg_outside_band_frac_after_first": 0.2,
        }
        entries.append(entry | ({"val/accuracy": step / steps} if step % 10 == 0 else {}))
    write_lines(run_dir, *entries)
    return run_dir


def test_plots_of_a_run(tmp_path: Path) -> None:
    paths = plot_run(full_run(tmp_path / "a"))
    names = ("reward", "accuracy", "k3", "outside_band")
    assert paths == [tmp_path / "a" / "plots" / f"{name}.png" for name in names]
    assert all(
        path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in paths
    )


@pytest.mark.long
def test_wandb_without_a_key_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"W&B has no key[\s\S]*WANDB_MODE=offline"):
        check_wandb_key()
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    wandb.teardown()
    check_wandb_key()
    monkeypatch.delenv("WANDB_MODE")
    wandb.teardown()
    host = urlsplit(wandb.setup().settings.base_url).hostname
    (tmp_path / "netrc").write_text(f"machine {host} login user password {'x' * 40}\n")
    check_wandb_key()


def test_an_error_in_looking_for_warning_signs_ends_the_looking_and_not_the_run(
    tmp_path, monkeypatch, capsys
):
    calls = []

    def fail(self: WarningLog, step: int, metrics: dict[str, float]) -> list[str]:
        calls.append(step)
        raise KeyError("a bug")

    monkeypatch.setattr(WarningLog, "after", fail)
    with Tracker(tmp_path, [], 2, {}) as tracker:
        tracker.log({"x": 1.0}, step=1)
        tracker.log({"x": 2.0}, step=2)
    assert calls == [1] and tracker.problem is None
    assert [entry["x"] for entry in read_metrics(tmp_path)] == [1.0, 2.0]
    assert (
        "no more warning signs are looked for after step 1 (KeyError: 'a bug')"
        in capsys.readouterr().err
    )
