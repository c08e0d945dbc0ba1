"""The `qarl` command: help and version of every command, wrong ones, Ctrl-C at any moment, and
docs/lookup/config_reference.md."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from qarl.__main__ import COMMANDS, main
from qarl.config import describe_keys, load_config
from qarl.config.demos import DEMOS
from qarl.config.help import key_table
from qarl.config.schema import sections
from qarl.console import READER_LEFT, stage, summary_text
from qarl.errors import UserError

WITH_CONFIG = ("train", "doctor", "diagnose")
HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "verl",
    "datasets",
    "compressed_tensors",
    "ray",
    "matplotlib",
)


@pytest.fixture
def out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> pytest.CaptureFixture[str]:
    monkeypatch.setenv("COLUMNS", "100")
    return capsys


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, out: pytest.CaptureFixture[str]) -> None:
    """Through `qarl` in both orders, and as `python -m qarl.COMMAND` calls it: the same text, and nothing else."""
    texts, flag = set(), "--help"
    own = importlib.import_module(COMMANDS[command][0]).main
    for call, arguments in ((main, [command, flag]), (own, ["a=b", flag])):
        assert call(arguments) == 0
        printed = out.readouterr()
        assert printed.err == ""
        texts.add(printed.out)
    (text,) = texts
    assert f"usage: qarl {command} " in text and "exit codes:" in text and "Ctrl-C" in text
    assert max(map(len, text.splitlines())) <= 100
    if command in WITH_CONFIG:
        assert all(f"  {name}: " in text for name in sections()) and "quickstart.yaml" in text
    assert main([command, "--version"]) == 0 and out.readouterr().out == f"qarl {version('qarl')}\n"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_qarl(flag: str, out: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    text = out.readouterr().out
    assert "usage: qarl COMMAND" in text
    assert all(f"  {command} " in text for command in COMMANDS)
    assert all(f"  {path.name} " in text for path in (ROOT / "configs").glob("*.yaml"))
    assert main([]) == 2
    assert out.readouterr().out == text
    assert main(["--version"]) == 0 and out.readouterr().out == f"qarl {version('qarl')}\n"


WRONG = {
    ("tarin",): "did you mean train?",
    (
        "xyz",
        "--help",
    ): "the commands are demo, train, warm-start, data, doctor, diagnose, export, convert-gguf, eval, report, bench",
    ("config=quickstart.yaml",): "write qarl train config=quickstart.yaml",
    ("train", "--hepl"): "--help describes the keys",
    ("train", "--help", "grad_clip"): "did you mean actor.grad_clip?",
    ("diagnose", "--help", "qqq"): "the sections are model, data,",
    ("export", "--halp"): "write export halp; --help describes the keys",
    ("demo", "meo"): "the demos are quickstart, smollm2, moe, verl,",
    ("bench",): "one of kernels,",
    ("bench", "--help", "stesp"): "nearest: steps",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_wrong_command_line(arguments: tuple[str, ...], out: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = out.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("error:") == 1
    assert WRONG[arguments] in printed.err


@pytest.mark.parametrize("section", sections())
def test_help_of_a_section(section: str, out: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", section]) == 0
    words = " ".join(out.readouterr().out.split())
    for key in key_table()[section]:
        assert f"{key.name} {key.meaning} {key.facts}" in words
    assert main(["train", "--help", key.name]) == 0
    assert " ".join(out.readouterr().out.split()) == f"{key.name} {key.meaning} {key.facts}"


def test_the_page_of_the_configuration_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import config_page

    assert config_page.PAGE.read_text(encoding="utf-8") == config_page.page(), (
        "run python scripts/config_page.py"
    )
    meanings = {key.name: key.meaning for keys in key_table().values() for key in keys}
    assert meanings == {
        name: text for name, text in describe_keys().items() if name not in sections()
    }


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """Also from a folder without configs: the shipped ones are found."""
    lines = [[], *([command] for command in COMMANDS), ["train", "actor"], ["bench", "kernels"]]
    code = (
        "import sys; from qarl.__main__ import main\n"
        f"codes = [main([*line, '--help']) for line in {lines!r}]\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'{codes} {loaded}' if any(codes) or loaded else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "quickstart.yaml" in done.stdout


def test_what_is_imported_before_threads_are_limited_imports_no_torch() -> None:
    """Later `limit_threads` would change nothing."""
    modules = "qarl.eval.__main__, qarl.eval.arguments, qarl.doctor.__main__, qarl.demo.__main__, qarl.warm_start"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


ENDS = {
    "at the end": ("", "", 0),
    "in the middle": ("1", "", READER_LEFT),
    "with an error": ("", "bad", 2),
}


@pytest.mark.parametrize("case", ENDS)
def test_nobody_reads_the_output_to_its_end(case: str) -> None:
    """As by `qarl train --help | head`."""
    unbuffered, error, code = ENDS[case]
    program = (
        "import sys; from qarl.console import run_command; from qarl.errors import UserError\n"
        f"def command(words):\n    print('text')\n    if {error!r}: raise UserError({error!r})\n    return 0\n"
        "sys.exit(run_command(command, [], describe=str))"
    )
    reads, writes = os.pipe()
    os.close(reads)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)}
    with os.fdopen(writes, "wb") as out:
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment, timeout=120
        )
    assert (done.returncode, done.stderr) == (code, f"error: {error}\n" if error else "")


def test_a_summary_names_the_command_that_resumes(tmp_path: Path) -> None:
    def text(finished: bool) -> str:
        return summary_text(
            "a",
            tmp_path,
            {"steps": 3, "finished": finished},
            report=False,
            argv=["config=a.yaml", "name=b c"],
        )

    assert "not possible: there is no checkpoint" in text(False) and "resume" not in text(True)
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    assert text(False).endswith("qarl train config=a.yaml 'name=b c'")


def test_garbage_is_collected_again_after_the_imports() -> None:
    for imports in (True, False):
        with pytest.raises(KeyboardInterrupt), stage("working", imports=imports):
            assert gc.isenabled() != imports
            raise KeyboardInterrupt
        assert gc.isenabled()


@pytest.mark.parametrize("name", DEMOS)
def test_a_missing_model_is_refused_with_the_command_that_makes_it(
    name: str, tmp_path: Path, out: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for missing in ("no model folder 'models/", "no such data file: data/"):
        assert main(["train", f"config={DEMOS[name].config}"]) == 2
        text = " ".join(out.readouterr().err.split())
        assert missing in text and "`qarl demo --help`" in text
        Path(load_config([f"config={DEMOS[name].config}"]).model.path).mkdir(
            parents=True, exist_ok=True
        )


def test_a_demo_makes_the_model_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    from qarl.demo import tiny_model

    called: list[Any] = []

    def make(recipe: tiny_model.Recipe) -> None:
        called.append(recipe)
        if len(called) == 3:
            raise UserError("no room")

    monkeypatch.setattr(tiny_model, "make_missing", make)
    monkeypatch.setattr("qarl.train.main", lambda argv: called.append(argv) or 0)
    assert main(["demo", "moe", "trainer.total_training_steps=2"]) == 0
    made, trained = called
    assert (str(made.output), str(made.data), made.experts) == (
        "models/tiny-qwen3-moe",
        "data/column_addition",
        8,
    )
    assert trained == ["config=quickstart_moe.yaml", "trainer.total_training_steps=2"]
    assert main(["demo"]) == 2 and len(called) == 3, "a model that cannot be made is not trained"


def test_the_demo_of_the_mismatch_runs_both_arms_and_compares_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: pytest.CaptureFixture[str]
) -> None:
    """Same seed, one key apart. An override replaces the demo's own value in both."""
    from qarl.demo import tiny_model

    trained: list[dict[str, Any]] = []

    def train(argv: list[str]) -> int:
        config = load_config(argv)
        trained.append(config.model_dump())
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "metrics.jsonl").write_text('{"step": 0, "val/accuracy": 0.2}\n')
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny_model, "make_missing", lambda recipe: None)
    monkeypatch.setattr("qarl.train.main", train)
    assert main(["demo", "mismatch", "trainer.total_training_steps=2"]) == 0
    off, default = trained
    assert {arm["trainer"]["total_training_steps"] for arm in trained} == {2}
    assert (off["quant"].pop("align"), default["quant"].pop("align")) == ("off", "model")
    assert off.pop("name") != default.pop("name") and off == default
    assert off["actor"]["old_log_probs"] == "rollout" and off["actor"]["loss"] == "grpo"
    assert "runs/mismatch.html" in out.readouterr().out
    assert "val/accuracy mismatch_off" in (tmp_path / "runs/mismatch.html").read_text(
        encoding="utf-8"
    )


SLOW = "import pathlib, time; pathlib.Path('here').touch()\n"
CLEANS_UP = (
    "try:\n    time.sleep(60)\nfinally:\n    pathlib.Path('again').touch()\n    time.sleep(60)\n"
)


class Interrupted:
    """A `qarl` process in a folder whose module torch is `torch`, instead of one that is slow to import."""

    def __init__(self, folder: Path, torch: str, command: str) -> None:
        (folder / "torch.py").write_text(torch, encoding="utf-8")
        self.folder = folder
        (folder / "models" / "tiny-qwen3").mkdir(
            parents=True
        )  # model and data are looked for before torch is imported
        (folder / "data" / "column_addition").mkdir(parents=True)
        for file in ("train", "test"):
            (folder / "data" / "column_addition" / f"{file}.parquet").touch()
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        }
        words = [sys.executable, "-m", "qarl", command, "config=quickstart.yaml"]
        self.process = subprocess.Popen(
            words, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def press(self, when: str, number: int = signal.SIGINT) -> None:
        """Ctrl-C or another signal, once the process has made the file `when`."""
        for _ in range(6000):
            if (self.folder / when).exists() or self.process.poll() is not None:
                break
            time.sleep(0.01)
        assert self.process.poll() is None, self.process.communicate()
        time.sleep(0.05)
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        try:
            err = self.process.communicate(timeout=30)[1]
        finally:
            self.process.kill()
        return self.process.returncode, err.removeprefix("importing PyTorch and vLLM ...\n")


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGHUP, 129)]
ENDS_CLEAN = "try:\n    time.sleep(60)\nfinally:\n    pathlib.Path('cleaned').touch()\n"


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_signal_while_torch_is_imported(
    command: str, number: int, code: int, tmp_path: Path
) -> None:
    run = Interrupted(tmp_path, SLOW + ENDS_CLEAN, command)
    run.press("here", number)
    assert run.end() == (code, "interrupted\n")
    assert (tmp_path / "cleaned").exists()


def test_a_terminal_that_hangs_up_twice_lets_the_command_clean_up(tmp_path: Path) -> None:
    """The shell and the kernel both send SIGHUP."""
    twice = (
        "try:\n    time.sleep(60)\nfinally:\n    pathlib.Path('again').touch()\n    time.sleep(1)\n"
    )
    run = Interrupted(tmp_path, SLOW + twice + "    pathlib.Path('cleaned').touch()\n", "train")
    run.press("here", signal.SIGHUP)
    run.press("again", signal.SIGHUP)
    assert run.end() == (129, "interrupted\n")
    assert (tmp_path / "cleaned").exists()


def test_ctrl_c_twice(tmp_path: Path) -> None:
    run = Interrupted(tmp_path, SLOW + CLEANS_UP, "train")
    run.press("here")
    run.press("again")
    assert run.end() == (130, "interrupted\n")


PRESS = """
import signal, sys
from qarl import console
from qarl.errors import UserError

number = signal.{name}
press = lambda: signal.raise_signal(number)

class Dropped:
    def __del__(self):
        press()

def in_a_context():
    before = signal.getsignal(number)  # as Stop of a run sets it again
    try:
        press()
    finally:
        signal.signal(number, before)

def work(arguments):
    {body}
    return 0

{extra}
sys.argv = ["qarl"]
main, _ = console.entry(work, "")
sys.exit(main())
"""
TURNED = "try: in_a_context()\n    except BaseException as error: raise {kind} from error"
LATER = """
say = console.say
def press_and_say(text):
    press()
    say(text)
console.say = press_and_say
import atexit; atexit.register(press)
"""
IN_A_CALLBACK = "Dropped(); import time; time.sleep(20)"
MOMENTS = {
    "once": ("press()", ""),
    "again while the message is written, and at Python's exit": ("in_a_context()", LATER),
    "again while the run is closed": ("try: in_a_context()\n    finally: press()", ""),
    "where Python would only show it": (IN_A_CALLBACK, ""),
    "there, and again at the end": (IN_A_CALLBACK, LATER),
    "a library turns it into an error": (TURNED.format(kind="RuntimeError('torch')"), ""),
    "QaRL turns it into an error": (TURNED.format(kind="UserError('the engine is lost')"), ""),
}


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_is_one_message(moment: str, name: str) -> None:
    body, extra = MOMENTS[moment]
    program = PRESS.format(body=body, extra=extra, name=name)
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_the_help_names_every_demo(out: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main(["demo", "--help"])
    words = out.readouterr().out.split()
    assert [name for name in DEMOS if name not in words] == []
