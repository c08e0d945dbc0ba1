"""The benchmark of steps: arguments, rounds and launches, tables. Its checks are in
test_bench_checks.py, its statistics in test_bench_spread.py."""

from __future__ import annotations

import json
import mmap
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT

from qarl.bench.__main__ import main
from qarl.bench.steps import run, spread, tables
from qarl.bench.steps.arguments import Arguments
from qarl.bench.steps.meter import Memory, Meter
from qarl.bench.steps.models import cut_config, default_group_size, find_model, known_models
from qarl.bench.steps.results import Key, results
from qarl.errors import UserError


def parse(*given: str, part: str = "steps") -> Arguments:
    return Arguments.parse(part, ["device=cpu", *given])


def test_the_default_says_something_real() -> None:
    arguments = parse()
    assert arguments.schemes == ("bf16", "w8a8", "fp8", "w4a16") and arguments.levels == ("off", "linears", "model")
    assert arguments.response_length[0] > arguments.prompt_length and arguments.prompts > 1 and arguments.n > 1
    assert arguments.repeats >= 3
    assert arguments.source.name == "SmolLM2-135M" and arguments.layers == (30,) and arguments.group_size == 64
    assert arguments.levels_of("bf16") == ("off", "model")
    assert parse("schemes=w4a16,bf16").schemes == ("bf16", "w4a16")


def test_all_engines_together_take_a_gpus_share() -> None:
    """Those of two depths too: four schemes at two depths are eight engines."""
    for given, engines in (("layers=30", 4), ("layers=2,4", 8), ("schemes=bf16,fp8,fp8", 2)):
        assert engines * parse(given).gpu_memory_utilization == pytest.approx(0.6), given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("scheme=fp8", "nearest: schemes"),
        ("schemes=w4a8", "no schemes"),
        ("levels=all", "no levels"),
        ("model=Qwen3-9B", "nearest: qwen3-8b"),
        ("model=some/folder", "no config.json"),
        ("layers=31", "has 30 layers"),
        ("layers=1,2,3", "will not do"),
        ("layers=2,2", "will not do"),
        ("layers=x", "numbers"),
        ("prompts=0", "1 or more"),
        ("n=1", "2 or more"),
        ("repeats=1", "no spread"),
        ("warmup=0", "1 or more"),
        ("response_length=1", "2 or more"),
        ("response_length=8,16", "rollout` takes several"),
        ("batch=8", "rollout` takes several"),
        ("response_length=9000", "8192 positions"),
        ("mini_batches=3", "must divide prompts"),
        ("micro_batch=3", "no multiple"),
        ("master_dtype=fp16", "nearest"),
        ("gpu_memory_utilization=2", "at most 1"),
        ("model=Qwen3-30B-A3B", "no quantized experts"),
        ("prompts", "not key=value"),
    ],
)
def test_arguments_that_will_not_do(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=message):
        parse(given)
    assert main(["steps", "device=cpu", given]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_parts_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step"]) == 2 and "nearest: steps" in capsys.readouterr().err
    assert main([]) == 2


def test_rollout_takes_several() -> None:
    arguments = parse("batch=1,8", "response_length=4,16", part="rollout")
    keys = [key for key, _ in run.commands(arguments, "bf16", 30)]
    assert keys == [Key("bf16", "", 30, batch, length) for length in (4, 16) for batch in (1, 8)]
    assert [parse("model=Qwen3-30B-A3B", "schemes=bf16", "layers=1", part="rollout").source.has_experts] == [True]


def test_models_by_name_and_folder(tmp_path: Path) -> None:
    assert {"Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B", "Qwen3-8B", "Qwen3-30B-A3B"} <= set(known_models())
    shape = find_model("qwen3-0.6b").shape()
    assert (shape["hidden_size"], shape["head_dim"], shape["num_key_value_heads"]) == (1024, 128, 8)
    assert find_model("SmolLM2-135M").shape()["head_dim"] == 64
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 7}))
    assert find_model(str(tmp_path)).layers == 7
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"]}
    assert cut_config(config, 2) == {"num_hidden_layers": 2, "layer_types": ["a", "b"]}
    assert default_group_size(find_model("Qwen3-8B").config) == 128


def answer(step: float, publish: float = 0.1) -> dict[str, Any]:
    phases = {"rollout": step / 2, "prefill": step / 8, "decode": step * 3 / 8, "publish": publish, "step": step}
    peaks = {"rollout": 2**30, "step": 2**31}
    return {"phases": phases | {"publish_share": publish / step}, "peak_bytes": peaks, "checks": {}}


def test_results_of_two_depths() -> None:
    arguments = parse("layers=2,4", "schemes=bf16,w8a8", "levels=off,linears")
    samples = {
        Key("bf16", "off", 2): [[answer(12.0), answer(24.0)]],
        Key("bf16", "off", 4): [[answer(14.0), answer(28.0)]],
        Key("w8a8", "off", 2): [[answer(8.0), answer(16.0)]],
        Key("w8a8", "off", 4): [[answer(9.0), answer(18.0)]],
        Key("w8a8", "linears", 2): [[answer(9.0), answer(18.0)]],
    }
    peaks = {Key("w8a8", "linears", 2): {"rollout": 2**30, "step": 2**31}}
    found = {(r["scheme"], r["level"], r["layers"]): r for r in results(arguments, samples, peaks)}
    assert set(found) == {(k.scheme, k.level, k.layers) for k in samples} | {("bf16", "off", 30), ("w8a8", "off", 30)}
    whole = found["w8a8", "off", 30]  # fixed 7, half a second a layer
    assert whole["extrapolated"] and whole["phases"]["step"]["samples"] == [[22, 44]]
    assert whole["step_per_layer"]["samples"] == [[0.5, 1]] and whole["step_fixed"]["samples"] == [[7, 14]]
    assert whole["speedup"]["step"]["samples"] == [pytest.approx([40 / 22] * 2)]
    assert whole["publish_share"]["samples"] == [pytest.approx([0.1 / 22, 0.1 / 44])]
    shallow = found["w8a8", "linears", 2]
    assert shallow["to_off"]["step"]["mean"] == 9 / 8 and shallow["speedup"]["step"]["mean"] == pytest.approx(4 / 3)
    assert shallow["tokens_per_s"]["prefill"] == pytest.approx(32 * 8 / (9 / 8 * 1.5))
    assert shallow["tokens_per_s"]["decode"] == pytest.approx(32 * 15 / (9 * 3 / 8 * 1.5))
    assert shallow["peak_bytes"] == {"rollout": 2**30, "step": 2**31} and whole["peak_bytes"] == {}


def test_one_depth_claims_nothing_about_the_whole() -> None:
    arguments = parse("layers=2", "schemes=bf16")
    (found,) = results(arguments, {Key("bf16", "off", 2): [[answer(12.0), answer(24.0)]]})
    assert found["layers"] == 2 and "extrapolated" not in found


# The meter.


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 2 s before and 1 s after an inner phase of 3 s, which runs twice."""
    now = [0.0]
    meter = Meter(Memory(torch.device("cpu")))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with meter.phase("outer"):
        now[0] += 2
        for _ in range(2):
            with meter.phase("inner"):
                now[0] += 3
        now[0] += 1
    inclusive, own, _ = meter.take()
    assert inclusive == {"outer": 9, "inner": 6, "step": 9} and own == {"outer": 3, "inner": 6}
    assert meter.take() == ({"step": 0.0}, {}, {})


def test_a_peak_belongs_to_every_phase_that_is_open() -> None:
    """64 MiB from the system itself: malloc may hold as much that another test freed."""
    meter = Meter(Memory(torch.device("cpu")))
    if meter.memory.source != "peak RSS":
        pytest.skip("this system does not set its high-water mark back")
    with meter.phase("before"):
        pass
    with meter.phase("outer"):
        with meter.phase("inner"):
            held = mmap.mmap(-1, 2**26)
            torch.frombuffer(held, dtype=torch.uint8).fill_(1)
        held.close()
    with meter.phase("after"):
        pass
    _, _, peaks = meter.take()
    assert peaks["inner"] <= peaks["outer"] < peaks["inner"] + 2**20 and peaks["inner"] > peaks["before"] + 2**25
    assert peaks["inner"] > peaks["after"] + 2**25


KEPT = """
import torch
from qarl.bench.steps.meter import Memory, Meter
from qarl.process import keep_freed_memory

assert keep_freed_memory()
meter = Meter(Memory(torch.device("cpu")))
assert meter.memory.source == "peak RSS"
for meter.memory.trim in (False, True):
    with meter.phase("large"):
        torch.ones(2**26)  # 256 MiB
    with meter.phase("small"):
        pass
    peaks = meter.take()[2]
    print(peaks["large"], peaks["small"])
"""


def test_kept_memory_is_given_back_where_peaks_are_measured() -> None:
    """In a process of its own, whose malloc keeps what is freed: without trimming all peaks are the highest one."""
    if Memory(torch.device("cpu")).source != "peak RSS" or platform.libc_ver()[0] != "glibc":
        pytest.skip("this system does not set its high-water mark back, or malloc cannot be told")
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True)
    (large, small), (trimmed_large, trimmed_small) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert small > large - 2**24 and trimmed_small < trimmed_large - 2**27


def test_a_phase_that_raises_is_closed() -> None:
    meter = Meter(Memory(torch.device("cpu")))
    with pytest.raises(KeyError), meter.phase("outer"), meter.phase("inner"):
        raise KeyError
    with meter.phase("next"):
        pass
    assert set(meter.take()[1]) == {"outer", "inner", "next"}


# Failing checks, and what becomes of them.


class FakeWorker:
    """Answers as a scheme's process would; w8a8 fails a check in its second round, fp8 cannot start."""

    def __init__(self, arguments: Arguments, scheme: str, layers: int, folder: Path) -> None:
        if scheme == "fp8":
            raise run.WorkerFailed("no kernel")
        self.scheme, self.calls, self.built = scheme, 0, {}

    def call(self, **command: Any) -> dict[str, Any]:
        if command["do"] == "last_round":
            return {}
        self.calls += 1
        assert command["do"] == ("warm" if self.calls in (2, 4) and self.scheme == "w8a8" else "step")
        wrong = self.scheme == "w8a8" and self.calls > 4 and command["level"] == "linears"
        checks = {"mismatch_abs_mean": 1.0 if wrong else 1e-3, "mismatch_bound": 1e-2}
        return answer(10.0 + self.calls) | {"checks": checks}

    def close(self) -> None:
        pass


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Worker", FakeWorker)
    monkeypatch.setattr(run, "write_model", lambda source, layers, folder: 135_000_000)
    monkeypatch.setattr(run, "check_memory", lambda arguments, parameters: None)  # no process takes any


@pytest.mark.usefixtures("fakes")
def test_a_failing_check_withholds_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, image = tmp_path / "sub" / "a.json", tmp_path / "a.png"
    given = ["device=cpu", "schemes=bf16,w8a8,fp8", "levels=off,linears", f"json={path}", f"plot={image}"]
    assert main(["steps", *given]) == 1
    printed = capsys.readouterr()
    assert "no figures: w8a8, level linears, 30 layers: mean |log-prob difference|" in printed.err
    assert "no figures: fp8, 30 layers: no kernel" in printed.err
    assert "| w8a8 | `off` |" in printed.out and "| w8a8 | `linears` |" not in printed.out
    document = json.loads(path.read_text())
    assert {(r["scheme"], r["level"]) for r in document["results"]} == {("bf16", "off"), ("w8a8", "off")}
    assert document["failures"].keys() == {"w8a8, level linears, 30 layers", "fp8, 30 layers"}
    assert str(tmp_path) not in json.dumps(document), "where this machine keeps its files is nobody's business"
    assert document["commit"] and document["date"] and document["versions"]["torch"] == torch.__version__
    assert document["model"]["parameters"] == [135_000_000] and document["workload"]["sequences"] == 32
    assert len(document["results"][0]["phases"]["step"]["samples"][0]) == 3  # the round that warms up is not counted
    assert image.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("fakes")
def test_none_is_always_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What wakes first, or follows another scheme's step, is measured under other conditions."""
    order: list[tuple[str, str]] = []

    class Logging(FakeWorker):
        def call(self, **command: Any) -> dict[str, Any]:
            order.append((self.scheme, command.get("level", "")))
            return answer(1.0)

    monkeypatch.setattr(run, "Worker", Logging)
    assert main(["steps", "device=cpu", "schemes=w8a8,w4a16", "levels=off,linears,model", "repeats=3"]) == 0
    rounds = [order[start : start + 6] for start in range(12, 30, 6)]
    assert [one[0] for one in rounds] == [("w8a8", "off"), ("w4a16", "linears"), ("w8a8", "model")]
    for scheme in ("w8a8", "w4a16"):
        levels = [[level for name, level in one if name == scheme] for one in rounds]
        assert [set(place) for place in zip(*levels, strict=True)] == [{"off", "linears", "model"}] * 3


@pytest.mark.usefixtures("fakes")
def test_every_launch_has_processes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds say which process was asked: the third launch's fp8 cannot start, and takes its earlier figures along."""
    started: list[str] = []

    class Numbered(FakeWorker):
        def __init__(self, arguments: Arguments, scheme: str, layers: int, folder: Path) -> None:
            started.append(scheme)
            self.built, self.number = {}, started.count(scheme)
            if scheme == "fp8" and self.number == 3:
                raise run.WorkerFailed("out of memory")

        def call(self, **command: Any) -> dict[str, Any]:
            return answer(float(self.number))

    monkeypatch.setattr(run, "Worker", Numbered)
    path = tmp_path / "a.json"
    given = ["device=cpu", "schemes=bf16,fp8", "levels=off", "launches=4", "repeats=2", f"json={path}"]
    assert main(["steps", *given]) == 1
    document = json.loads(path.read_text())
    (result,) = document["results"]
    assert result["scheme"] == "bf16" and result["phases"]["step"]["mean"] == 2.5
    assert result["phases"]["step"]["samples"] == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert document["failures"] == {"fp8, 30 layers": "out of memory"} and started.count("fp8") == 3


@pytest.mark.usefixtures("fakes")
def test_the_last_round_counts_for_checks_and_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16's process ends in it, and costs a peak; w8a8 fails a check in it at one level. What fails at the very first
    step leaves the next level a step of its own to warm up with."""
    log: list[tuple[str, str, str]] = []

    class Last(FakeWorker):
        def __init__(self, arguments: Arguments, scheme: str, layers: int, folder: Path) -> None:
            self.scheme, self.built, self.last = scheme, {}, False

        def call(self, **command: Any) -> dict[str, Any]:
            if command["do"] == "last_round":
                self.last = True
                return {}
            log.append((self.scheme, command["level"], command["do"]))
            if (self.scheme == "bf16" and self.last) or (self.scheme, command["level"]) == ("fp8", "off"):
                raise run.WorkerFailed("killed")
            wrong = self.scheme == "w8a8" and self.last and command["level"] == "linears"
            return answer(1.0) | {"checks": {"grad_norm": float("nan")} if wrong else {}}

    monkeypatch.setattr(run, "Worker", Last)
    path = tmp_path / "a.json"
    given = ["device=cpu", "schemes=bf16,w8a8,fp8", "levels=off,linears", "repeats=2", f"json={path}"]
    assert main(["steps", *given]) == 1
    document = json.loads(path.read_text())
    found = {(result["scheme"], result["level"]): result["peak_bytes"] for result in document["results"]}
    assert found == {("bf16", "off"): {}, ("w8a8", "off"): answer(1.0)["peak_bytes"],
                     ("fp8", "linears"): answer(1.0)["peak_bytes"]}  # fmt: skip
    assert document["failures"] == {"w8a8, level linears, 30 layers": "the gradient is not finite",
                                    "fp8, level off, 30 layers": "killed"}  # fmt: skip
    assert [entry for entry in log if entry[0] == "fp8"][:2] == [("fp8", "off", "step"), ("fp8", "linears", "step")]


@pytest.mark.usefixtures("fakes")
def test_tables_come_from_the_json(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    from bench_table import rewrite

    path = tmp_path / "a.json"
    assert main(["steps", "device=cpu", "schemes=bf16", "levels=off", f"json={path}"]) == 0
    text = rewrite("x\n<!-- bench: a.json -->\nold\n<!-- /bench -->\ny\n", tmp_path)[0]
    assert "old\n<!--" not in text and text.startswith("x\n<!-- bench: a.json -->\nSmolLM2-135M, random weights: 135M")
    rows = [line for line in text.splitlines() if line.startswith("| bf16")]
    assert rows[0].startswith("| bf16 | `off` | 7.00 ±") and rows[0].endswith("| 0.7% |")
    assert rows[1].count("1.00 ±0.00") == 5
    assert tables.markdown(json.loads(path.read_text())) in text


def test_an_extrapolation_says_so() -> None:
    document = {
        "kind": "steps", "device": "cpu", "versions": {}, "commit": "c", "date": "2026-11-20T", "failures": {},
        "arguments": {"launches": 1, "repeats": 2, "response_length": [32]},
        "model": {"name": "M", "weights": "random", "parameters": [1, 2], "layers": [2, 4], "num_hidden_layers": 30},
        "workload": {"prompts": 4, "n": 4, "prompt_length": 16, "mini_batches": 1, "micro_batch_size": 16},
    }  # fmt: skip
    arguments = parse("layers=2,4", "schemes=bf16", "levels=off")
    samples = {Key("bf16", "off", depth): [[answer(10.0 + depth), answer(10.0 + depth)]] for depth in (2, 4)}
    text = tables.markdown({**document, "results": results(arguments, samples)})
    assert "**30 layers were not measured**" in text and "| bf16 | `off` | 30 (extrapolated) |" in text
    one = results(parse("layers=2", "schemes=bf16", "levels=off"), {Key("bf16", "off", 2): [[answer(1.0)] * 2]})
    cut = document | {"model": document["model"] | {"parameters": [1], "layers": [2]}}  # type: ignore[operator]  # a nested dict
    text = tables.markdown({**cut, "results": one})
    assert "extrapolated" not in text and "nothing is said of what those would take" in text
    deep = cut["model"] | {"layers": [2, 30], "parameters": [1, 2]}  # type: ignore[operator]  # a nested dict
    text = tables.markdown({**cut, "model": deep, "results": one})
    assert "nothing is said" not in text, "the whole model is among those that were measured"


def test_a_level_that_fell_back_says_so() -> None:
    arguments = parse("schemes=bf16", "levels=model", part="trainer")
    fallen = answer(1.0) | {"checks": {"level_applied": "linears"}}
    (result,) = results(arguments, {Key("bf16", "model", 30): [[fallen, fallen]]})
    assert tables._labels({"kind": "trainer", "results": [result]}, result) == ["bf16", "`model` (ran as `linears`)"]


def test_seconds_in_three_digits() -> None:
    texts = [tables.seconds(spread.spread([[value, value]])) for value in (0.0, 0.001234, 0.01234, 1.234, 123.4)]
    assert texts == ["0", "0.00123 ±0.00000", "0.0123 ±0.0000", "1.23 ±0.00", "123.4 ±0.0"]


def test_too_little_memory_is_said_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="fewer schemes"):
        run.check_memory(parse("model=Qwen2.5-Math-7B"), [7_000_000_000_000])
