"""Fixtures that several folders of tests ask for, and which tests run on this machine.

torch is imported where it is used: with pytest-xdist the process that reads this file first runs no test, and the
others wait for it."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from bad_runs import CONFIG, EngineConstructed, Refusal, row, write_rows
from checkout import ROOT
from config_problems import MINIMAL
from verl_runs import quickstart

from qarl.config import write_resolved
from qarl.schemes.w4a16 import W4A16

FOLDER_MARKS = {
    "bench": "long",
    "demo": "long",
    "e2e": "vllm",
    "gpu": "gpu",
    "scripts": "long",
    "trl_backend": "long",
    "verl_backend": "verl",
}
"""Every test in these folders of `KINDS`, or of tests/, has the mark."""
KINDS = ("unit", "integration", "nightly")
"""Folders of tests/. A unit test needs neither an engine nor verl, TRL or a compiler. All tests of nightly are slow."""
FP8_FILES = {
    "test_align_engine",
    "test_cpu_experts",
    "test_kernels",
    "test_lora_long",
    "test_lora_training",
    "test_rollout_moe",
    "test_rollout_schemes",
    "test_trl_run",
    "test_verl_adapters",
    "test_verl_experts",
}
"""Files whose tests of fp8 take minutes where oneDNN emulates its products."""
NOT_FAST = {"slow", "long", "vllm", "verl", "compiles", "gpu"}
"""`make test-fast` leaves out what has one of these marks."""
FREEZE, UNFREEZE = gc.freeze, gc.unfreeze
IMPORTED_BY_ENGINES = (
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)


def pytest_configure() -> None:
    """A shell has SIGINT ignored in its background jobs, and `nohup` SIGHUP, and so have the programs that tests start
    and interrupt.

    Python's garbage collector pauses while tests are collected, because that imports much. In a process of pytest-xdist
    that only hands out tests it stays off."""
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    FREEZE()
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm"):
        _freeze_vllms_modules()


@cache
def _freeze_vllms_modules() -> None:
    """An engine collects garbage six times and unfreezes all objects as it closes. With the objects of all modules that
    takes 3.6 seconds. So what is frozen stays frozen, and no engine is."""
    from qarl.process import configure_vllm_process

    configure_vllm_process()
    for module in IMPORTED_BY_ENGINES:
        importlib.import_module(module)
    gc.collect()
    FREEZE()


def pytest_unconfigure() -> None:
    gc.freeze, gc.unfreeze = FREEZE, UNFREEZE
    gc.unfreeze()  # else nanobind, which checks at the end, reports leaks


def pytest_markeval_namespace() -> dict[str, object]:
    from qarl.kernels.cpu.layer_ops import attention_unavailable

    return {"attention_unavailable": attention_unavailable}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch
    from cpu_features import FP8_EMULATED, fp8_is_emulated, needs_vllm_cpu

    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        kind, *folders = item.path.relative_to(ROOT / "tests").parts
        if mark := FOLDER_MARKS.get(folders[0] if kind in KINDS else kind):
            item.add_marker(mark)
        if kind == "nightly":
            item.add_marker("slow")
        if torch.cuda.is_available():
            continue
        if item.get_closest_marker("gpu"):  # keywords contain the names of folders, too
            item.add_marker(no_gpu)
        if item.get_closest_marker("vllm"):
            item.add_marker(needs_vllm_cpu)
        if _multiplies_fp8(item) and fp8_is_emulated():
            item.add_marker(pytest.mark.skip(reason=FP8_EMULATED))
    _long_files_first(items)


def _multiplies_fp8(item: pytest.Item) -> bool:
    scheme = (
        isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and "fp8" in item.callspec.id.split("-")
    )
    return scheme and item.path.stem in FP8_FILES


def _long_files_first(items: list[pytest.Item]) -> None:
    """Otherwise one process of pytest-xdist works alone at the end. Needs --no-loadscope-reorder, see the Makefile."""
    marks = ("compiles", "verl", "vllm")
    marked = [{item.path for item in items if item.get_closest_marker(mark)} for mark in marks]
    items.sort(key=lambda item: [item.path not in paths for paths in marked])


@pytest.fixture(autouse=True)
def verl_is_imported_by_marked_tests_only(request: pytest.FixtureRequest) -> Iterator[None]:
    """Importing verl takes seconds: `make test-fast` does without it only if every test that needs it is marked."""
    # Elsewhere the test that happens to come first in its process would answer for all the others.
    before = "verl" in sys.modules or "verl" not in request.config.option.markexpr
    yield
    if (
        not before
        and "verl" in sys.modules
        and not NOT_FAST & {mark.name for mark in request.node.iter_markers()}
    ):
        pytest.fail("this test imports verl: mark it with pytest.mark.verl")


@pytest.fixture(autouse=True)
def torchs_default_dtype_stays() -> Iterator[None]:
    """vLLM changes it while it builds a model. A test that leaves it changed would make others fail."""
    import torch

    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert left == torch.float32, "the test left torch's default dtype changed"


@pytest.fixture(scope="module")
def in_the_checkout() -> Iterator[None]:
    """The quickstart's paths are relative to the checkout."""
    before = Path.cwd()
    os.chdir(ROOT)
    yield
    os.chdir(before)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="session")
def pristine_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random Qwen3 that all tests share: read it, or copy it and change the copy."""
    from random_models import save_random_model

    folder = save_random_model(tmp_path_factory.mktemp("pristine") / "model")
    before = contents(folder)
    yield folder
    assert contents(folder) == before, "a test wrote to the model that all tests share"


@pytest.fixture
def startable_run(
    tmp_path: Path, pristine_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The current directory: a run that would start, with its model and data, on a CPU with every flag and a vLLM for
    CPUs."""
    from qarl.checks import machine, model
    from qarl.rollout.engine import RolloutEngine

    def construct(*args: Any, **kwargs: Any) -> None:
        raise EngineConstructed

    monkeypatch.setattr(RolloutEngine, "__init__", construct)
    for module in (machine, model):
        monkeypatch.setattr(module, "runs_on_cpu", lambda backend: True)
    monkeypatch.setattr(machine, "vllm_unusable", machine.vllm_missing)
    monkeypatch.setattr(machine, "cpu_flags", lambda: set(W4A16.cpu_flags))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pristine_model, "model")
    Path("run.yaml").write_text(CONFIG)
    write_rows("train.jsonl", [row(f"t3 t{i}") for i in range(8)])
    write_rows("val.jsonl", [row("t9 t10")])
    with patch.dict(os.environ):  # a run sets variables, some of which verl reads
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        yield tmp_path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory that holds minimal.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minimal.yaml").write_text(MINIMAL)
    return tmp_path


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run starts without sampling its probe: an idle trainer has no prompts."""
    monkeypatch.setattr("qarl.trainer.loop.probe", lambda trainer: "probe: fine")


@pytest.fixture
def hang_ups_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A SIGHUP in a test changes neither the exit codes nor the handler of the tests after it."""
    monkeypatch.setattr("qarl.hangup._HangUp.came", False)
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run with these overrides, insist on a proper refusal that contains `words`, and give its message."""

    def refuse(*overrides: str, words: list[str], config: str = "run.yaml") -> str:
        capsys.readouterr()
        from qarl.train import main

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


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the checkout; what the set-up of a run writes to the environment is taken back."""
    monkeypatch.chdir(ROOT)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def opened(own_environment: None, tmp_path: Path) -> Callable[..., int]:
    """The step that an interrupted quickstart resumes from, with changes of its config."""
    from qarl.verl.resume import open_verl_run

    def start(**changes: object) -> int:
        with open_verl_run(quickstart(**{"output_dir": str(tmp_path), **changes})) as step:
            return step

    run = tmp_path / "quickstart_verl"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    write_resolved(quickstart(output_dir=str(tmp_path)), run / "config.yaml")
    start.run, start.tracker = run, run / "checkpoints" / "latest_checkpointed_iteration.txt"
    return start
