"""Messages promise a resume only with the keys with which a run does resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_helpers import config as engine_config
from idle_trainer import Checkpoints, Trainer
from interrupted_runs import BACKENDS, interrupted, record, run_config

from qarl.checkpoint.storage import StorageError
from qarl.config import load_config
from qarl.trainer.loop import run_and_keep
from qarl.trainer.repeat import arguments_that_resume, keys_that_resume
from qarl.trainer.resume import find_start
from qarl.trainer.stop import Stop
from qarl.verl.resume import find_verl_start


def step_of_start(argv: list[str]) -> int:
    """The step after which `qarl train` with `argv` begins."""
    config = load_config(argv)
    if config.backend == "verl":
        return find_verl_start(config, record(config))[0]
    checkpoint = find_start(config, record(config)).checkpoint
    return checkpoint.step if checkpoint else 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_the_arguments_that_are_named_resume(run_folder: Path, backend: str, mode: str) -> None:
    config = run_config(backend)
    interrupted(config, record(config))
    argv = ["config=run.yaml", f"backend={backend}", f"trainer.resume_mode={mode}"]
    config = load_config(argv)
    again = arguments_that_resume(config, argv)
    assert step_of_start(again) == 2
    assert (again == argv) == (step_of_start(argv) == 2) == (keys_that_resume(config) == "")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resume_from_a_path_repeats_itself_in_verl_alone(run_folder: Path, backend: str) -> None:
    argv = ["config=run.yaml", f"backend={backend}", "trainer.resume_mode=resume_path"]
    argv.append("trainer.resume_from_path=runs/other/checkpoints/step_1")
    config = load_config(argv)
    again = ["config=run.yaml", "backend=verl", "trainer.resume_mode=auto"]
    assert arguments_that_resume(config, argv) == (again if backend == "verl" else argv)
    assert ("without trainer.resume_from_path" in keys_that_resume(config)) == (backend == "verl")


@pytest.mark.usefixtures("in_the_checkout", "no_probe")
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("auto", "the same command resumes and exports"),
        ("disable", "the same command with trainer.resume_mode=auto resumes and exports"),
    ],
)
def test_an_export_that_the_disk_refuses_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, words: str
) -> None:
    settings = engine_config(tmp_path, f"trainer.resume_mode={mode}")
    newest = (1, settings.run_dir / "checkpoints" / "step_1")
    monkeypatch.setattr("qarl.trainer.finish.newest_checkpoint", lambda run: newest)
    trainer = Trainer(settings)

    def refuse(folder: Path, tokenizer: object) -> Path:
        raise StorageError("refused", why="No space left on device", fix="free some space")

    monkeypatch.setattr(trainer.policy, "save", refuse)
    with pytest.raises(StorageError) as caught:
        run_and_keep(trainer, Checkpoints(), Stop(), 0.0)
    assert words in str(caught.value)
