"""`qarl.bench plan` and `ceilings`: the commands, a check against measured steps, and what is measured for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from qarl.bench import report
from qarl.bench.__main__ import main
from qarl.bench.arguments import Arguments
from qarl.bench.cost.arguments import CeilingsArguments, PlanArguments
from qarl.bench.cost.ceilings import Block, Ceilings
from qarl.bench.cost.check import compare, workload_of
from qarl.bench.cost.gpus import assumed_ceilings
from qarl.bench.cost.plan import workload_of as plan_workload
from qarl.bench.cost.step import Layout, predict
from qarl.bench.steps.models import find_model
from qarl.checks.memory import ModelSize
from qarl.errors import UserError

STEPS: dict[str, Any] = {
    "kind": "steps",
    "device": "a CPU",
    "model": {"name": "small", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "layers": [2],
              "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "model_type": "llama"},
    "workload": {"prompts": 2, "n": 2, "prompt_length": 8, "response_length": 24, "mini_batches": 1,
                 "micro_batch_size": 4, "threads": 1, "group_size": 32, "master_dtype": "fp32"},
}  # fmt: skip


def strings(content: Any) -> Iterator[str]:
    """Every string in a JSON document, keys aside."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from strings(value)


def steps_file(folder: Path, scale: float, scheme: str = "w8a8", level: str = "linears") -> tuple[Path, Path]:
    """Steps that took `scale` times what is predicted from the ceilings beside them."""
    size = ModelSize.from_config({**STEPS["model"], "num_hidden_layers": 2})
    ceilings = replace(assumed_ceilings("h100"), links=None, memory_bytes=0, facts={"threads": 1})
    step = predict(size, ceilings, workload_of(STEPS), scheme, level)
    phases = {p: {"mean": scale * step.seconds(p)} for p in ("prefill", "decode", "backward")}
    result = {
        "scheme": scheme,
        "level": level,
        "layers": 2,
        "phases": {**phases, "step": {"mean": scale * step.step}},
    }
    for name, content in (("steps", STEPS | {"results": [result]}), ("ceilings", ceilings.to_json())):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "steps.json", folder / "ceilings.json"


class TestCommands:
    def test_check_passes_what_agrees(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        steps, ceilings = steps_file(tmp_path, 1.0)
        out = tmp_path / "check.json"
        assert main(["plan", f"check={steps}", f"ceilings={ceilings}", f"json={out}"]) == 0
        assert "1 of 1 steps within 20%" in capsys.readouterr().out
        (result,) = json.loads(out.read_text())["results"]
        assert result["phases"]["step"]["error"] == pytest.approx(0)

    @pytest.mark.parametrize("scale", [0.8, 1.3])
    def test_check_fails_what_is_off_by_more_than_a_fifth(self, tmp_path: Path, scale: float) -> None:
        steps, ceilings = steps_file(tmp_path, scale)
        assert main(["plan", f"check={steps}", f"ceilings={ceilings}"]) == 1
        assert main(["plan", f"check={steps}", f"ceilings={ceilings}", "tolerance=0.3"]) == 0

    def test_a_phase_that_is_not_predicted_is_an_error_of_its_own(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The BF16 step has no quantizer: one that takes 2% of a step within 20% fails, one of 0.5% is let pass."""
        steps, ceilings = steps_file(tmp_path, 1.0, "bf16", "off")
        content = json.loads(steps.read_text())
        phases = content["results"][0]["phases"]
        for share, code in ((0.02, 1), (0.005, 0)):
            phases["quantize"] = {"mean": share * phases["step"]["mean"]}
            steps.write_text(json.dumps(content))
            out = tmp_path / "check.json"
            assert main(["plan", f"check={steps}", f"ceilings={ceilings}", f"json={out}"]) == code
            (result,) = json.loads(out.read_text())["results"]
            assert result["phases"]["quantize"]["error"] == -1
            assert result["not_predicted"] == (["quantize"] if code else [])
            printed = capsys.readouterr().out
            assert ("not predicted: quantize of bf16 off" in printed) == bool(code)
            assert "1 of 1 steps within 20%" in printed

    def test_a_step_without_a_measured_time_is_a_failure(self, tmp_path: Path) -> None:
        steps, ceilings = steps_file(tmp_path, 0.0)
        out = tmp_path / "check.json"
        assert main(["plan", f"check={steps}", f"ceilings={ceilings}", f"json={out}"]) == 1
        assert json.loads(out.read_text())["results"][0]["phases"]["step"]["error"] is None

    def test_no_folder_of_this_machine_in_a_file(self, tmp_path: Path) -> None:
        """Neither of the arguments, nor of a model that is a folder."""
        folder = tmp_path / "some model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(find_model("Qwen3-8B").config)))
        steps, ceilings = steps_file(tmp_path, 1.0)
        out = tmp_path / "out.json"
        given = [f"model={folder}", "gpus=4", "prompts=16", "scheme=bf16", f"json={out}", f"plot={tmp_path / 'x.png'}"]
        assert main(["plan", *given]) == 0
        text = out.read_text()
        assert str(tmp_path) not in text and '"json": "out.json"' in text and '"model": "some model"' in text
        assert main(["plan", "model=Qwen3-8B", "prompts=16", f"ceilings={ceilings}", f"json={out}"]) == 0
        text = out.read_text()
        assert str(tmp_path) not in text and '"ceilings": "ceilings.json"' in text
        assert main(["plan", f"check={steps}", f"ceilings={ceilings}", f"json={out}"]) == 0
        assert str(tmp_path) not in out.read_text()

    def test_arguments_in_a_file_name_no_folder(self) -> None:
        given = report.given(Arguments("cpu", ("small",), json=Path("/some/where/x.json")))
        assert given["json"] == "x.json" and given["plot"] is None and given["model"] == ("small",)

    def test_committed_results_name_no_folder(self) -> None:
        files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
        assert files
        for path in files:
            found = [text for text in strings(json.loads(path.read_text(encoding="utf-8"))) if text.startswith("/")]
            assert not found, f"{path.name}: {found}"

    def test_nothing_compared_is_a_failure(self, tmp_path: Path) -> None:
        steps, ceilings = steps_file(tmp_path, 1.0)
        steps.write_text(json.dumps(STEPS | {"results": []}))
        assert main(["plan", f"check={steps}", f"ceilings={ceilings}"]) == 1

    def test_threads_must_be_the_same(self) -> None:
        ceilings = replace(assumed_ceilings("h100"), facts={"threads": 2})
        with pytest.raises(UserError, match="1 threads, the ceilings on 2"):
            compare(STEPS | {"results": []}, ceilings)

    def test_a_plan_has_a_row_for_each_scheme_and_level(self, tmp_path: Path) -> None:
        out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
        assert main(["plan", "model=Qwen3-8B", "gpus=4", "prompts=16", f"json={out}", f"plot={picture}"]) == 0
        rows = json.loads(out.read_text())["results"]
        assert [(row["scheme"], row["level"]) for row in rows] == [
            ("bf16", "off"), ("w8a8", "off"), ("w8a8", "linears"), ("fp8", "off"), ("fp8", "linears"),
            ("w4a16", "off"), ("w4a16", "linears"),
        ]  # fmt: skip
        assert rows[0]["speedup"] == {"rollout": 1.0, "step": 1.0}
        assert len(rows[2]["links"]) == 4 and "links" not in rows[1] and picture.stat().st_size > 10000

    @pytest.mark.parametrize(
        "given, message",
        [
            (["gpu=h300"], "no gpu 'h300'"),
            (["gpu=cpu"], "no data sheet"),
            (["gpus=8", "tensor_parallel=3"], "do not make engines of 3"),
            (["prompts=10", "mini_batches=4"], "do not make 4 mini-batches"),
            (["prompts=1", "n=2", "mini_batches=1"], "2 responses for 8 GPUs"),
            (["response_length=1,2,3"], "more than two numbers"),
            (["response_length=many"], "invalid literal"),
            (["gpus=0"], "no whole number"),
            (["gpu_memory_utilization=1.5"], "above 0 and at most 1"),
            (["check=steps.json"], "needs measured ceilings"),
            (["model=Qwen9"], "no model"),
            (["gpuz=8"], "no key 'gpuz'"),
        ],
    )
    def test_arguments_that_will_not_do(self, given: list[str], message: str) -> None:
        with pytest.raises(UserError, match=message):
            PlanArguments.parse(given)

    def test_ceilings_arguments(self) -> None:
        assert CeilingsArguments.parse(["json=x.json", "schemes=bf16,w8a8"]).schemes == ("bf16", "w8a8")
        for given, message in (
            (["rounds=3"], "where shall"),
            (["json=x", "device=cuda"], "not measured on device=cuda"),
        ):
            with pytest.raises(UserError, match=message):
                CeilingsArguments.parse(given)

    def test_a_file_that_is_none(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        for content, message in (("{", "cannot read"), ("[]", "no JSON object"), ("{}", "no ceilings file"),
                                 ('{"kind": "ceilings"}', "incomplete")):  # fmt: skip
            path.write_text(content)
            with pytest.raises(UserError, match=message):
                Ceilings.load(path)


def documented_settings() -> list[list[str]]:
    """Rows of the table in docs/cost_model.md that is set against the paper."""
    text = (ROOT / "docs" / "cost_model.md").read_text(encoding="utf-8")
    table = text.partition("| engines of |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_figures_beside_the_papers_are_what_the_model_gives() -> None:
    """arXiv 2604.07853 gives 1.4 and 1.3 for its mixture of experts on 8 GPUs. It does not give all that decides, so no
    number here is a prediction of those, and no test holds the two together: this one keeps the page true."""
    size = ModelSize.from_config(find_model("Qwen3-30B-A3B").config)
    ceilings, rows = assumed_ceilings("h800"), documented_settings()
    assert len(rows) == 3
    for parallel, mean, share, micro, *figures in rows:
        given = ["prompts=512", "prompt_length=512", "mini_batches=8", f"response_length={mean},16384"]
        given += [f"micro_batch={micro}", f"log_prob_micro_batch={micro}", f"gpu_memory_utilization={share}"]
        given += [f"tensor_parallel={parallel.split()[0]}", "model=Qwen3-30B-A3B", "gpu=h800"]
        arguments = PlanArguments.parse(given)
        work, layout = plan_workload(arguments), Layout(8, arguments.tensor_parallel, arguments.gpu_memory_utilization)
        base, off, aligned = (
            predict(size, ceilings, work, scheme, level, layout)
            for scheme, level in (("bf16", "off"), ("w4a16", "off"), ("w4a16", "linears"))
        )
        ratios = (base.rollout / off.rollout, base.step / off.step, base.step / aligned.step)
        assert figures == [f"{base.rollout / base.step:.0%}", *(f"{ratio:.2f}" for ratio in ratios)]


class TestMeasuring:
    def test_a_block_is_taken_apart(self) -> None:
        from qarl.bench.cost import measure_blocks as mb

        made = Block(1e-4, 2e-9, 3e-9, 5e-9, 7e-9, tuple((float(t), t * 1e-11) for t in mb.LENGTHS))
        seconds = {str(t): mb.ROWS * mb.LENGTH * 512 * t * 1e-11 for t in mb.LENGTHS}
        for name, size in {**mb.VARIANTS, mb.FEW: mb.BASE}.items():
            tokens = mb.LENGTH * (1 if name == mb.FEW else mb.ROWS)
            query, pair = size.heads * 64, 2 * size.kv_heads * 64
            normed = (query + pair / 2) * made.qk_norm_width if size.kind == "qwen3" else 0.0
            token = size.hidden * made.hidden + size.intermediate * made.intermediate + normed
            token += (query + pair) * made.attention_width + query * mb.LENGTH * 1e-11
            seconds[name] = size.layers * (made.call + tokens * token)
        found = mb._block(seconds)
        assert dataclasses.astuple(found)[:5] == pytest.approx(dataclasses.astuple(made)[:5], rel=1e-6)
        assert [s for _, s in found.attention] == pytest.approx([s for _, s in made.attention])

    def test_a_stand_in_gives_the_blocks_everything_but_products(self) -> None:
        """With stand-ins a block's forward and backward run, and no linear's weight is touched."""
        from qarl.bench.cost import measure_blocks as mb

        size = replace(mb.BASE, hidden=64, intermediate=64, heads=2, kv_heads=1)
        for level in mb.LEVELS:
            passes = mb._block_passes(size, level, 1)
            grads: Any = passes["backward"]()
            assert all(grad is not None for grad in grads)
            assert len(grads) == 1 + 4 * size.layers  # the embeddings, and two norms of the stream, two of q and k

    def test_everything_a_prediction_needs_is_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The real thing on next to nothing, vLLM included; then a plan from its file."""
        from qarl.bench.cost import measure, measure_blocks, measure_engine, measure_products
        from qarl.bench.cost.rig import PRODUCTS

        small = replace(PRODUCTS, layers=2, hidden=128, intermediate=256, heads=2, kv_heads=1, vocab=256)
        for module in (measure, measure_engine, measure_products):
            monkeypatch.setattr(module, "PRODUCTS", small)
        monkeypatch.setattr(measure_engine, "RESPONSE", (2, 4))
        monkeypatch.setattr(measure_engine, "WIDE", replace(measure_engine.TINY, vocab=2048))
        monkeypatch.setattr(measure_products, "HEAD", (64, 512))
        monkeypatch.setattr(measure_products, "TRAINER_ROWS", (8, 32))
        monkeypatch.setattr(measure_products, "ENGINE_ROWS", (1, 64))
        monkeypatch.setattr(measure_blocks, "LENGTHS", (32, 64))
        monkeypatch.setattr(measure_blocks, "ROWS", 2)
        monkeypatch.setattr(measure_blocks, "LENGTH", 64)
        monkeypatch.setattr(measure_blocks, "PARAMETERS", ((2, 64, 64), (1, 512, 64)))
        monkeypatch.setattr(measure, "VOCABULARIES", (256, 512))
        monkeypatch.setattr(measure_blocks, "LOGITS", (32, 512))
        kept: list[str] = []
        monkeypatch.setattr(measure, "keep_freed_memory", lambda: kept.append("asked") or True)
        path = tmp_path / "ceilings.json"
        assert measure.run(CeilingsArguments(path, schemes=("bf16", "w8a8"), rounds=1)) == 0
        ceilings = Ceilings.load(path)
        assert kept == ["asked"] and ceilings.facts["keeps_freed_memory"] is True
        assert not ceilings.assumed and set(ceilings.publish.apply) == {"bf16", "w8a8"}
        assert main(["plan", "model=SmolLM2-135M", f"ceilings={path}", "scheme=bf16,w8a8", "prompts=4", "n=2"]) == 0
        printed = capfd.readouterr().out
        assert "(measured)" in printed and "| w8a8 | linears |" in printed
        with pytest.raises(UserError, match="no engine forward w4a16 products"):
            ceilings.product("engine", "forward", "w4a16")
