"""What `qarl export ... overwrite=true` replaces: exports of this version and of earlier ones, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from stored_formats import RUNS, unpack

from qarl.checkpoint.export import ExportRequest, export
from qarl.checkpoint.export_folder import MARK, check_output, why_foreign
from qarl.errors import UserError

RUN = Path("runs/local")
OUT = Path("out")


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory has the runs of an earlier version, `OUT` an export of this one."""
    unpack(tmp_path)
    monkeypatch.chdir(tmp_path)
    export(ExportRequest(RUN, OUT))


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def refused(output: Path, words: str, run: Path = RUN) -> None:
    before = contents()
    with pytest.raises(UserError, match=words) as caught:
        export(ExportRequest(run, output, overwrite=True))
    assert caught.value.fix
    assert contents() == before


def test_an_export_is_replaced_whatever_wrote_it() -> None:
    for run in RUNS:
        shutil.copytree(Path("runs", run, "export"), run)
        assert why_foreign(Path("runs", run, "export")) is None
        for output in (Path("runs", run, "export"), Path(run), OUT):
            export(ExportRequest(Path("runs", run), output, overwrite=True))
            assert (output / MARK).is_file()
            assert (output / "adapter").is_dir() is ("adapter" in run)


def test_an_unquantized_export_of_an_earlier_version_counts_in_its_run() -> None:
    """It has no mark, and nothing in it tells it from another model."""
    export(ExportRequest(RUN, Path("plain"), format="bf16"))
    (Path("plain") / MARK).unlink()
    assert "may be any other model" in str(why_foreign(Path("plain")))
    shutil.rmtree(RUN / "export")
    Path("plain").rename(RUN / "export")
    assert why_foreign(RUN / "export") is None


def add(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("mine")


def trained_again(folder: Path) -> None:
    shutil.copy("model/model.safetensors", folder / "model.safetensors")


def other_tool(folder: Path) -> None:
    """As llm-compressor writes a quantized model."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"version": "0.12.2", "kv_cache_scheme": None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / MARK).unlink()


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file of the user": (add("notes.md"), "notes.md"),
    "a file in a folder": (lambda folder: ((folder / "x").mkdir(), add("x/y")(folder)), "x/y"),
    "weights of another program": (trained_again, "model.safetensors was changed"),
    "another program's quantization": (other_tool, "may be any other model"),
    "a damaged mark": (add(MARK), "is damaged"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_no_export_wrote_is_not_replaced(case: str) -> None:
    spoil, words = FOREIGN[case]
    spoil(OUT)
    refused(OUT, words)


def test_a_model_a_file_and_the_run_are_not_replaced() -> None:
    shutil.copytree("model", "other")
    refused(Path("other"), "may be any other model")
    refused(Path("run.yaml"), "it is a file")
    refused(Path("model"), "the model that the run starts from")
    refused(Path("runs"), "would overwrite checkpoints")
    Path("disk").mkdir()
    (RUN / "checkpoints").rename("disk/checkpoints")
    (RUN / "checkpoints").symlink_to(Path("disk/checkpoints").resolve())
    refused(RUN, "would overwrite checkpoints")
    with pytest.raises(UserError, match="no empty folder") as caught:
        export(ExportRequest(RUN, Path("other")))
    assert "overwrite=true" not in str(caught.value.fix)


def test_an_export_that_a_run_starts_from_is_not_replaced() -> None:
    for checkpoint in (RUN / "checkpoints/step_2", Path("elsewhere/checkpoints/step_2")):
        with pytest.raises(UserError, match="the model that the run starts from"):
            check_output(OUT, RUN, checkpoint, model=str(OUT), overwrite=True)
    config = Path("runs/verl/config.yaml")
    config.write_text(config.read_text().replace("path: model\n", "path: out\n"))
    refused(OUT, "the model that the run starts from", run=Path("runs/verl"))


@pytest.mark.parametrize("place", ["a file", "below a file", "read-only"])
def test_a_place_that_cannot_be_written_is_refused_before_the_checkpoint_is_read(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """By the check that `qarl data`, `qarl convert-gguf` and `qarl warm-start` make."""

    def read(*arguments: object, **keys: object) -> None:
        raise AssertionError("the checkpoint was read")

    monkeypatch.setattr("qarl.checkpoint.read_weights.open_source", read)
    monkeypatch.setattr("qarl.checkpoint.export_adapter.open_trained", read)
    output, words = {
        "a file": (Path("run.yaml"), "run.yaml could not be written\n  why: it is a file"),
        "below a file": (Path("run.yaml/out"), "out could not be written\n  why: it is a file"),
        "read-only": (Path("new/out"), "out could not be written\n  why: the folder"),
    }[place]
    if place == "read-only":
        monkeypatch.setattr("os.access", lambda path, mode: False)
    refused(output, words)
