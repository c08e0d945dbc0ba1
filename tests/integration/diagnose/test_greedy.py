"""`qarl diagnose greedy` through the user's door: at the default level no batch size changes an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cpu_features import needs_w4a16_cpu

from qarl.__main__ import main


@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.vllm
@needs_w4a16_cpu
def test_every_batch_size_gives_the_same_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["batch_sizes=1,3,12", f"output_dir={tmp_path}", "trainer.val_max_prompts=12"]
    assert main(["diagnose", "greedy", "config=quickstart.yaml", *words]) == 0
    report = json.loads((tmp_path / "quickstart" / "greedy.json").read_text())
    assert [row["batch_size"] for row in report["batch_sizes"]] == [1, 3, 12]
    assert [row["other_answers"] for row in report["batch_sizes"]] == [0, 0, 0]
    assert report["prompts"] == 12
    assert report["tokens"] > 1
    assert report["std_at_acc"] == 0
    assert "Std@Acc 0.000% (12 greedy answers" in capfd.readouterr().out


@pytest.mark.usefixtures("in_the_checkout")
def test_validation_prompts_are_needed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [f"output_dir={tmp_path}", "data.val_files=[]", "trainer.val_before_train=false"]
    assert (
        main(["diagnose", "greedy", "config=quickstart.yaml", "trainer.test_freq=-1", *words]) == 2
    )
    assert "data.val_files" in capfd.readouterr().err
