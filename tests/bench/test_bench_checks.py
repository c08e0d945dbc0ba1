"""What the benchmark of steps checks before it prints a figure: by hand, and real runs in which something is broken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from random_models import save_random_model
from torch.nn.functional import linear

from qarl.align.blocks import AlignedRMSNorm
from qarl.bench.__main__ import main
from qarl.bench.steps.arguments import Arguments
from qarl.bench.steps.checks import log_prob_bound, problems, worst
from qarl.bench.steps.compare import error_of, move_weights
from qarl.bench.steps.models import MODELS
from qarl.bench.steps.trainer import at_level
from qarl.bench.steps.worker import EngineBench, StepBench, TrainerBench
from qarl.quant.linear import QuantLinear
from qarl.rollout.engine import RolloutEngine


def parse(*given: str, part: str = "steps") -> Arguments:
    return Arguments.parse(part, ["device=cpu", *given])


def tiny(folder: Path, *given: str, part: str) -> Arguments:
    sizes = ("prompts=2", "n=4", "prompt_length=4", "response_length=8", "group_size=32")
    return parse(f"model={folder}", *sizes, *given, part=part)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models") / "model")


def multiply_unquantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every QuantLinear is there, publishes what it should, and multiplies in BF16."""
    monkeypatch.setattr(QuantLinear, "forward", lambda layer, x: linear(x, layer.weight, layer.bias))


def test_the_bound_on_log_probs_by_hand() -> None:
    """bf16, 2 layers: sqrt(2 * 8) * 2^-8 of the spread, and 2^-8 of the largest; a mean of 4 tokens twice that."""
    by_hand: dict[str, Any] = {"layers": 2, "spread": 0.5, "largest": 8.0, "tokens": 144}
    assert log_prob_bound("bf16", "linears", **by_hand) == pytest.approx((4 * 0.5 + 8) / 256)
    assert log_prob_bound("bf16", "off", **by_hand) == pytest.approx((4 * 0.5 + 8) / 256)
    assert log_prob_bound("bf16", "off", **by_hand | {"tokens": 4}) == pytest.approx((4 * 0.5 + 8) / 128)
    assert log_prob_bound("w8a8", "off", **by_hand) is None
    unit: dict[str, Any] = {"layers": 4, "spread": 1.0, "largest": 0.0, "tokens": 1000}
    w4, w8, fp8 = (log_prob_bound(scheme, "linears", **unit) for scheme in ("w4a16", "w8a8", "fp8"))
    assert w4 is not None and w8 is not None and fp8 is not None and w4 < w8 < fp8
    assert w8 == pytest.approx((4 * (8 / 65536 + 8 * 16 / 127**2 / 12)) ** 0.5)
    assert log_prob_bound("fp8", "model", **unit) == fp8


TILES = torch.cpu._is_amx_tile_supported()
GOOD = {
    "mismatch_abs_mean": 1e-3,
    "mismatch_bound": 1e-2,
    "grad_norm": 1.0,
    "kernels": ["vllm_cpu_int8"],
    "quantized_layers": 14,
    "expected_layers": 14,
    "response_lengths": [8, 8],
    "response_length": 8,
    "layer_error": 0.0,
    "layer_bound": 0.0,
    "layer_worst": "model.layers.1.mlp.down_proj",
    "layer_against": "the engine's layer",
    "layers_compared": 8,
    "layers_expected": 8,
    "unlike_tensors": [],
    "sample_abs_mean": 1e-4,
    "first_abs_median": 1e-4,
    "first_abs_median_below": 1e-2,
    "sample_bound": 1e-2,
    "sample_spread": 1.0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mismatch_abs_mean": 2e-2}, "2.00e-02, 1.00e-02 is allowed"),
        ({"mismatch_abs_mean": float("nan")}, "not finite"),
        ({"grad_norm": float("inf")}, "gradient"),
        ({"kernels": ["reference"]}, "reference"),
        ({"quantized_layers": 13}, "13 linears"),
        ({"response_lengths": [8, 7]}, "7 to 8 tokens"),
        ({"layer_error": 1e-9}, "layers.1.mlp.down_proj: on the same input"),
        ({"layer_error": float("nan")}, "0.0e+00 is allowed"),
        ({"layers_compared": 7}, "7 linears could be compared, not 8"),
        ({"unlike_tensors": ["model.norm.weight", "a", "b"]}, "model.norm.weight and 2 others is not the trainer's"),
        ({"sample_abs_mean": 2e-2}, "2.00e-02, 1.00e-02 is allowed"),
        ({"first_abs_median_below": 9e-4}, "attention have 9.00e-04"),
        ({"sample_spread": float("nan")}, "not finite"),
    ],
)
def test_what_withholds_a_figure(change: dict[str, Any], message: str) -> None:
    assert problems(GOOD) == [] and problems(GOOD | {"mismatch_bound": None, "mismatch_abs_mean": 5.0}) == []
    (found,) = problems(GOOD | change)
    assert message in found
    assert worst([GOOD, GOOD | {"mismatch_abs_mean": 5e-3}, GOOD])["mismatch_abs_mean"] == 5e-3


# A trainer without an engine.


def test_trainer_without_an_engine(tmp_path: Path) -> None:
    """In this process: levels on shared weights, one optimizer."""
    folder = save_random_model(tmp_path / "model")
    arguments = parse(f"model={folder}", "response_length=4", "prompt_length=3", "group_size=32", part="trainer")
    bench = TrainerBench(arguments, "w8a8", 2, str(folder))
    off, linears = (bench.trainer.policies[level].model for level in ("off", "linears"))
    before = [p.detach().clone() for p in off.parameters()]
    for level in ("off", "linears", "model"):
        found = bench.trainer_step(level=level)
        assert problems(found["checks"]) == [], level
        assert found["phases"].keys() >= {"old_log_prob", "forward", "backward", "optimizer", "update", "step"}
        assert 0 < found["phases"]["sum"] <= found["phases"]["step"]
    assert all(a is b for a, b in zip(off.parameters(), linears.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, off.parameters(), strict=True))
    assert bench.describe()["kernels"] == ["vllm_cpu_int8_tiles" if TILES else "vllm_cpu_int8"]


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "w4a16"])
def test_a_trainer_alone_that_multiplies_by_other_weights(
    folder: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = TrainerBench(tiny(folder, "levels=linears", part="trainer"), scheme, 2, str(folder))
    assert bench._compare("linears")["layers_compared"] == 14
    assert problems(bench._compare("linears")) == []
    multiply_unquantized(monkeypatch)
    (found,) = problems(bench._compare("linears"))
    assert "published tensors" in found and "other numbers are multiplied" in found


def test_a_trainer_alone_whose_norms_are_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At level `model`; the linears give what they should."""
    bench = TrainerBench(tiny(folder, "levels=model", part="trainer"), "w8a8", 2, str(folder))
    assert problems(bench._compare("model")) == []
    monkeypatch.setattr(AlignedRMSNorm, "forward", lambda norm, x: x.bfloat16())
    (found,) = problems(bench._compare("model"))
    assert "mean |log-prob difference| to level linears" in found


# With an engine, something broken.


bit_equal_w8a8 = pytest.mark.skipif(
    TILES, reason="with AMX `model` leaves differences of a BF16 step, and int8 activations make them as large as any"
)


@pytest.fixture(
    scope="module",
    params=[pytest.param("w8a8", marks=bit_equal_w8a8), "fp8", pytest.param("w4a16", marks=needs_w4a16_cpu)],
)
def steps(request: pytest.FixtureRequest, folder: Path) -> Iterator[StepBench]:
    bench = StepBench(tiny(folder, "levels=linears,model", part="steps"), request.param, 2, str(folder))
    yield bench
    bench.trainer.engine.close()


@pytest.fixture
def intact(steps: StepBench) -> Iterator[StepBench]:
    """What a test breaks in the engine, the next one publishes over."""
    steps.trainer.publish()
    assert [problems(steps._compare(level)) for level in ("linears", "model")] == [[], []]
    yield steps


@pytest.mark.vllm
class TestSteps:
    def test_a_step_carries_the_comparison(self, intact: StepBench) -> None:
        """Made in the step that warms up, at the weights that it moved and published, and kept."""
        warming, counted = (intact.step("model")["checks"] for _ in range(2))
        assert problems(warming) == problems(counted) == []
        assert counted["layer_error"] == 0 and counted["layers_compared"] == 15  # 2 layers of 7, and lm_head
        assert counted["first_abs_median"] == 0 < counted["first_abs_median_below"]
        assert warming["first_abs_median_below"] == counted["first_abs_median_below"]

    def test_a_trainer_that_multiplies_by_unquantized_weights(
        self, intact: StepBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        multiply_unquantized(monkeypatch)
        found = problems(intact._compare("linears"))
        assert "other numbers are multiplied" in found[0] and "the engine's layer" in found[0]

    def test_one_weight_that_was_not_published(self, intact: StepBench) -> None:
        layer = intact.trainer.policies["linears"].model.model.layers[1].mlp.up_proj
        with torch.no_grad():
            layer.weight[5].mul_(1.25)
        for level in ("linears", "model"):
            assert problems(intact._compare(level))[0].startswith("model.layers.1.mlp.up_proj: ")

    def test_a_norm_that_the_engine_holds_otherwise(self, intact: StepBench) -> None:
        norm: Any = intact.trainer.engine.model().get_submodule("model.layers.0.input_layernorm")
        with torch.no_grad():
            norm.weight[3] += 1
        assert "the engine's model.layers.0.input_layernorm.weight is not" in problems(intact._compare("linears"))[0]

    def test_level_model_that_is_not_aligned(self, intact: StepBench, monkeypatch: pytest.MonkeyPatch) -> None:
        linears = at_level(intact.trainer.plain, "linears")
        linears.align = "model"
        monkeypatch.setitem(intact.trainer.policies, "model", linears)
        assert "where unaligned norms" in problems(intact._compare("model"))[-1]

    def test_a_wrong_engine_is_noticed_at_level_off(self, intact: StepBench, monkeypatch: pytest.MonkeyPatch) -> None:
        """There the trainer's linears are plain ones, which differ in any case."""
        monkeypatch.setitem(intact.levels, "off", "off")
        assert problems(intact._compare("off")) == []
        move_weights(intact.trainer.plain, 0)
        assert "model.layers." in problems(intact._compare("off"))[0]


@pytest.mark.vllm
def test_a_publish_that_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing at all; nothing but scales; nothing of one norm."""
    bench = EngineBench(tiny(folder, part="publish"), "w8a8", 2, str(folder))
    with bench.engine:
        assert [problems(bench.publish_step()["checks"]) for _ in range(3)] == [[]] * 3
        publish = bench.engine.publish
        report = publish(old := clones(bench), version=bench.version)
        monkeypatch.setattr(bench.engine, "publish", lambda tensors, version: report)
        found = problems(bench.publish_step()["checks"])
        assert "other numbers are multiplied" in found[0] and "did not write it" in found[1]
        for suffix, message in (("_proj.weight", "other numbers"), ("1.input_layernorm.weight", "1.input_layernorm")):
            kept = {name: tensor for name, tensor in old if name.endswith(suffix)}

            def some(tensors: Any, version: int, kept: dict[str, torch.Tensor] = kept) -> Any:
                return publish([(name, kept.get(name, tensor)) for name, tensor in tensors], version=version)

            monkeypatch.setattr(bench.engine, "publish", some)
            assert message in problems(bench.publish_step()["checks"])[0], suffix


def clones(bench: EngineBench) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in bench.policy.quantize()]


@pytest.mark.vllm
@pytest.mark.parametrize("scheme", ["bf16", "w8a8"])
def test_rollouts_of_other_weights(folder: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that holds something else from the start, and one whose weights go wrong later."""
    arguments = tiny(folder, "batch=1,4", part="rollout")
    bench = EngineBench(arguments, scheme, 2, str(folder))
    with bench.engine:
        checks = [bench.rollout_step(batch, 8)["checks"] for batch in (1, 4)]
        assert [problems(one) for one in checks] == [[], []]
        assert all(one["layers_compared"] == 15 and one["mismatch_bound"] > 0 for one in checks)
        move_weights(bench.policy, 0)
        embedding: Any = bench.engine.model().get_submodule("model.embed_tokens")
        with torch.no_grad():
            embedding.weight.copy_(embedding.weight.roll(1, 0))
        assert "mean |log-prob difference| to the rollout" in problems(bench.rollout_step(4, 8)["checks"])[0]
    publish = RolloutEngine.publish

    def altered(engine: RolloutEngine, tensors: Any, *, version: int) -> Any:
        """Scales, or in BF16 weights, of one linear of each layer are off by 1%."""
        scaled = [(n, t * 1.01 if n.endswith(("o_proj.weight_scale", "o_proj.weight")) and t.is_floating_point() else t)
                  for n, t in tensors]  # fmt: skip
        return publish(engine, scaled, version=version)

    monkeypatch.setattr(RolloutEngine, "publish", altered)
    bench = EngineBench(arguments, scheme, 2, str(folder))
    with bench.engine:
        found = problems(bench.rollout_step(1, 2)["checks"])
    assert "self_attn.o_proj: on the same input" in found[0]


@pytest.mark.vllm
def test_an_old_lm_head_and_one_wrong_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM multiplies by a packed copy of a tied lm_head. And of 96 channels that are off by 3%, 0.3% of the
    whole, one is enough."""
    folder = save_random_model(tmp_path / "model", tie=True)
    bench = EngineBench(tiny(folder, part="publish"), "bf16", 2, str(folder))
    with bench.engine:
        assert problems(bench._compare()) == []
        up_proj = bench.policy.model.model.layers[1].mlp.up_proj
        with torch.no_grad():
            up_proj.weight[5] *= 1.03
        assert problems(bench._compare())[0].startswith("model.layers.1.mlp.up_proj: ")
        bench._publish()
        assert problems(bench._compare()) == []
        monkeypatch.setattr("qarl.rollout.publish.receive.refresh_tied_layers", lambda model: None)
        assert problems(bench.publish_step()["checks"])[0].startswith("lm_head: ")


def test_errors_of_outputs_by_hand() -> None:
    """Columns (3, 4) and (0, 5), both of norm 5. Half off in the first alone: 2.5 of sqrt(50), and of its channel 0.5,
    a fourth of which is less. One of 100 channels: the channel counts. Zero on both sides is no error; NaN is one."""
    expected = torch.tensor([[3.0, 0.0], [4.0, 5.0]])
    assert error_of(expected, expected) == 0
    half = torch.tensor([[1.5, 0.0], [2.0, 5.0]])
    assert error_of(half, expected) == pytest.approx(2.5 / 50**0.5)
    many = torch.ones(2, 100)
    one_off = many.clone()
    one_off[:, 7] = 2.0
    assert error_of(one_off, many) == pytest.approx(1 / 4)
    assert error_of(torch.zeros(2, 3), torch.zeros(2, 3)) != 0, "nothing at all is compared with nothing"
    assert error_of(torch.eye(2, 3), torch.eye(2, 3)) == 0
    assert math.isnan(error_of(torch.full((2, 2), math.nan), expected))


# Real runs.


@pytest.mark.vllm
def test_real_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two schemes, three levels, the engine and the trainer themselves."""
    folder, path = save_random_model(tmp_path / "model"), tmp_path / "steps.json"
    given = [f"model={folder}", "schemes=bf16,w8a8", "prompts=2", "n=2", "prompt_length=4", "response_length=6"]
    assert main(["steps", "device=cpu", *given, "group_size=32", "repeats=2", f"json={path}"]) == 0, capsys.readouterr()
    document = json.loads(path.read_text())
    found = {(r["scheme"], r["level"]): r for r in document["results"]}
    assert found.keys() == {("bf16", "off"), ("bf16", "model")} | {
        ("w8a8", level) for level in ("off", "linears", "model")
    }
    for result in found.values():
        phases = {name: value["mean"] for name, value in result["phases"].items()}
        assert min(seconds for name, seconds in phases.items() if name != "decode") >= 0  # a difference of two others
        assert phases["sum"] <= phases["step"]
        assert result["checks"]["response_lengths"] == [6] * 4 and result["tokens_per_s"]["prefill"] > 0
        assert len(result["speedup"]["step"]["samples"][0]) == 2 and result["peak_bytes"]["update"] > 2**26
    assert found["w8a8", "model"]["checks"]["mismatch_abs_mean"] < found["w8a8", "off"]["checks"]["mismatch_abs_mean"]
    assert document["built"]["w8a8, 2 layers"]["engine_kernels"] == ["CPUInt8ScaledMMLinearKernel"]


@pytest.mark.vllm
def test_real_rollouts(tmp_path: Path) -> None:
    folder, path = save_random_model(tmp_path / "model"), tmp_path / "rollout.json"
    given = [f"model={folder}", "schemes=w8a8", "batch=1,4", "response_length=3,6", "repeats=2", f"json={path}"]
    assert main(["rollout", "device=cpu", *given]) == 0
    sizes = {(r["batch"], r["response_length"]) for r in json.loads(path.read_text())["results"]}
    assert sizes == {(1, 3), (1, 6), (4, 3), (4, 6)}


@pytest.mark.vllm
def test_rollouts_of_experts(tmp_path: Path) -> None:
    """On weights that vLLM makes up; on a CPU it has no kernel for low-bit experts, and that scheme gets no figures."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "moe_intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
    config = json.loads((MODELS / "Qwen3-30B-A3B/config.json").read_text()) | sizes | heads
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts/config.json").write_text(json.dumps(config | {"num_experts": 8, "num_experts_per_tok": 2}))
    path = tmp_path / "rollout.json"
    given = [f"model={tmp_path / 'experts'}", "schemes=bf16,w8a8", "batch=4", "prompt_length=4", "response_length=6"]
    code = main(["rollout", "device=cpu", *given, "group_size=32", "repeats=2", f"json={path}"])
    document = json.loads(path.read_text())
    result, *others = document["results"]
    # With AMX vLLM has a kernel for int8 experts.
    failures = [] if TILES else ["w8a8, 2 layers"]
    assert (code, result["scheme"], list(document["failures"])) == (len(failures), "bf16", failures)
    assert [other["scheme"] for other in others] == (["w8a8"] if TILES else [])
    assert result["checks"]["response_lengths"] == [6] * 4 and result["phases"]["decode"]["mean"] > 0
