"""A run folder to which nothing can be written any more: one cause gives one error, which claims no file that is not
there. The engine and the update are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
from ends import STEPS, restored_limit
from local_ends import RUN, Trainer, at

from qarl.metrics.tracker import read_metrics

pytestmark = pytest.mark.usefixtures("no_probe")


def files() -> set[str]:
    return {path.relative_to(RUN).as_posix() for path in RUN.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("saves", "checkpoint"),
    [
        ("trainer.save_freq=1", f"the newest checkpoint is {RUN}/checkpoints/step_1"),
        ("trainer.save_freq=-1", "there is no checkpoint, so the weights are lost"),
    ],
)
@pytest.mark.parametrize("plots", ["trainer.plots=true", "trainer.plots=false"])
def test_a_folder_that_becomes_unwritable_is_one_error(
    train, monkeypatch, saves, checkpoint, plots
):
    before: set[str] = set()
    with restored_limit(0) as refuse_all:

        def lock(trainer: Trainer) -> None:
            before.update(files())
            refuse_all()

        monkeypatch.setattr(Trainer, "at_step", at(2, lock))
        code, printed = train(saves, plots)
    assert code == 2 and printed.count("error: ") == 1, printed
    error = printed[printed.index("error: ") :]
    assert "metrics.jsonl could not be written" in error
    assert "why: File too large" in error and checkpoint in error, printed
    for unwritten in (
        "the model after step 2 could not be exported",
        "summary.json could not be written",
    ):
        assert error.count(unwritten) == 1, printed
    assert "are in" not in printed, "it claims files that are not there"
    assert files() == before, "half a file is left"
    assert not (RUN / "summary.json").exists()
    assert [entry["step"] for entry in read_metrics(RUN)] == [0, 1]


def test_an_unwritable_export_names_what_can_be_done_for_the_weights(train, monkeypatch):
    with restored_limit() as fill_the_disk:
        monkeypatch.setattr(Trainer, "at_step", at(STEPS, lambda trainer: fill_the_disk()))
        code, printed = train("trainer.save_freq=2")
    assert code == 2 and printed.count("error: ") == 1, printed
    error = printed[printed.index("error: ") :]
    assert f"the newest checkpoint is {RUN}/checkpoints/step_2" in error
    assert f"qarl export run={RUN} step=2 output=" in error, printed
    exported = Path("elsewhere")
    command = error.partition("qarl export ")[2].partition("output=")[0].split()
    from qarl.export import main

    assert main([*command, f"output={exported}"]) == 0
    assert (exported / "model.safetensors").is_file()
