"""On two gloo ranks without Ray: TBPO without the quantized actor, the quantized actor with a loss of verl's, and the
mismatch guard before the first update."""

from __future__ import annotations

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from fsdp_ranks import BANDS, QUANT, as_batch, load_policy, make_rows, run_engine
from random_models import save_random_model

from qarl.quant import get_scheme
from qarl.quant.quantize import quantize

pytest.importorskip("verl")
pytestmark = needs_w4a16_cpu

JOB = {"quant": QUANT, "bands": BANDS, "lr": 1e-2, "micro": 2}
JOBS = {
    "tbpo alone": JOB | {"quant": None, "steps": 2},
    "quantized alone": JOB | {"loss": "vanilla", "steps": 2, "servers": True},
    "guarded": JOB | {"quant": QUANT | {"mismatch_limit": None}},
    "raised limit": JOB,
    "guarded without quantization": JOB | {"quant": None},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("halves")
    model = str(save_random_model(folder))
    rows = make_rows(model)
    with torch.no_grad():
        old = load_policy(model).response_log_probs(as_batch(rows), slice(0, 8), temperature=1.0)
    rows["old_log_probs"] = old
    spoilt = old.clone()
    spoilt[1::2] += 0.5  # those of the second rank alone
    noise = 1e-5 * torch.randn(old.shape, generator=torch.Generator().manual_seed(2))
    rows["rollout_log_probs"] = (old + noise) * rows["response_mask"]
    jobs = [
        job | ({} if name.endswith("alone") else {"guard": spoilt}) for name, job in JOBS.items()
    ]
    return dict(zip(JOBS, run_engine(folder, 2, model, rows, jobs), strict=True))


def test_tbpo_alone_reports_its_metrics_and_publishes_bf16(results):
    outcome = results["tbpo alone"]
    assert len(outcome["metrics"]) == 2
    for metrics in outcome["metrics"]:
        assert 0 < metrics["mismatch/abs_mean"][0] < 1e-4
        assert "actor/inside_band_frac" in metrics
    assert outcome["made"] == []
    assert outcome["published"].keys() == outcome["masters"].keys()
    for name, master in outcome["masters"].items():
        assert torch.equal(outcome["published"][name], master.bfloat16()), name


def test_the_quantized_actor_alone_publishes_what_its_forward_multiplies_by(results):
    outcome = results["quantized alone"]
    assert set(outcome["made"]) == {1}
    scheme = get_scheme("w4a16", group_size=32)
    packed = [name for name in outcome["published"] if name.endswith(".weight_packed")]
    assert len(packed) == 14
    for name in packed:
        layer = name.removesuffix(".weight_packed")
        expected = quantize(outcome["masters"][f"{layer}.weight"].bfloat16(), scheme, name=layer)
        assert torch.equal(outcome["published"][name], expected.tensors["weight_packed"])


@pytest.mark.parametrize(
    ("job", "limit"),
    [
        ("guarded", "0.0051 that quant.align=model allows"),
        ("guarded without quantization", "0.15 that is allowed by default"),
    ],
)
def test_a_mismatch_over_the_limit_stops_all_ranks_before_the_first_update(results, job, limit):
    for text in results[job]["guard"]:
        assert "trainer and engine disagree" in text and f"nats per token, over the {limit}" in text
    (metrics,) = results[job]["metrics"]  # the update after it, of healthy log-probs
    assert metrics["mismatch/over_limit"] == [0.0]


def test_no_rank_publishes_before_the_servers_have_answered_the_first(results):
    """An engine that one rank publishes to answers nothing until all ranks do: the first would wait for its answer, and
    the others for the first."""
    first, second = results["quantized alone"]["servers"][False]
    assert first["answered"] > 0 and first["error"] == second["error"] == ""
    assert second["begun"] >= first["answered"]


def test_all_ranks_name_a_dead_server(results):
    for rank in results["quantized alone"]["servers"][True]:
        assert "cannot be published to: vllm_server_1_0" in rank["error"]


def test_the_guard_keeps_to_its_limit(results):
    assert results["raised limit"]["guard"] == ["", ""]
