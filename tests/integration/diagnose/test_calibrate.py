"""`qarl diagnose calibrate`: the gradients against the training path, the costs against hand-made ratios, the
candidates, and a whole run with real vLLM in which the level `model` must be the truth itself."""

from __future__ import annotations

import json
import math

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from memory_cases import SMALL
from random_models import save_random_model
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.checks.model_size import ModelSize
from qarl.config import Config, OptimConfig, load_config
from qarl.config.actor import LOSSES
from qarl.config.actor import RolloutCorrectionConfig as Correction
from qarl.diagnose import candidates as candidates_module
from qarl.diagnose.__main__ import main
from qarl.diagnose.calibrate import best, t_tail
from qarl.diagnose.candidates import bands, base_config, clipped_share, corrections, needed_memory, with_keys
from qarl.diagnose.gradients import objective_gradients
from qarl.errors import UserError
from qarl.objectives.loss import objective_loss
from qarl.objectives.settings import Settings, objective_settings
from qarl.quant import get_scheme
from qarl.rollout.engine import RolloutBatch
from qarl.tbpo.config import TBPOConfig
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.optim import MasterOptimizer
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("in_the_checkout")


def four_responses() -> Batch:
    tokens = [[7, 8, 9], [10, 11], [12], [13, 14]]
    rollout = RolloutBatch([[5, 6]] * 4, tokens, [[-4.0] * len(one) for one in tokens], ["stop"] * 4, weight_version=0)
    return make_batch(rollout, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, 0.0]), pad_token_id=0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = save_random_model(tmp_path_factory.mktemp("model"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return Policy(model, get_scheme("w8a8"), ("lm_head",), align="linears")


@pytest.mark.verl
def test_each_gradient_is_that_of_the_training_path(policy: Policy) -> None:
    """One forward for all: the bits of a forward, `loss.backward()` and the optimizer's sums for each objective."""
    config = with_keys(
        load_config(["config=quickstart.yaml"]), {"actor.ppo_micro_batch_size_per_gpu": 2, "rollout.temperature": 1.0}
    )
    batch = four_responses()
    with torch.no_grad():
        old = policy.response_log_probs(batch, slice(0, 4), temperature=1.0)
    capped = TBPOConfig(seq_tis_imp_ratio_cap=1.001)
    objectives = [Settings(), Settings(tbpo=capped), Settings(loss="tbpo"), Settings(loss="grpo")]
    found = objective_gradients(policy, config, batch, old, objectives, start=1)
    optimizer = MasterOptimizer(policy.model.named_parameters(), OptimConfig(), total_training_steps=1, seed=0)
    for index, settings in enumerate(objectives):
        for rows in batch.micro_batches(2, start=1):
            log_probs = policy.response_log_probs(batch, rows, temperature=1.0)
            loss, _ = objective_loss(
                log_probs,
                old[rows],
                batch.rollout_log_probs[rows],
                batch.advantages[rows],
                batch.response_mask[rows],
                settings,
                responses=3,
                tokens=5,
            )
            loss.backward()
            optimizer.accumulate()
        sums = optimizer.gradients
        flat = [sums[n] if n in sums else torch.zeros_like(p) for n, p in policy.model.named_parameters()]
        assert torch.equal(found.by_parameters[index], torch.cat([one.float().flatten() for one in flat]))
        optimizer.zero_grad()
    assert found.by_parameters[0].any() and not torch.equal(found.by_parameters[0], found.by_parameters[1])
    assert found.silent(0, batch.advantages[1:]) == 0.0


@pytest.mark.verl
def test_shares_of_clipped_weights() -> None:
    log_ratio = torch.tensor([[math.log(3.0), math.log(1.1)], [math.log(0.2), 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    for settings, share in (
        (Settings(loss="grpo"), 0.0),
        (Settings(loss="grpo", correction=Correction(rollout_is="token")), 1 / 3),
        (Settings(loss="grpo", correction=Correction(rollout_is="token", rollout_is_mode="icepop")), 2 / 3),
        (Settings(loss="grpo", correction=Correction(rollout_is="sequence", rollout_is_threshold=3.2)), 2 / 3),
        (Settings(loss="grpo", correction=Correction(rollout_is="geometric")), 0.0),
        (Settings(tbpo=TBPOConfig(seq_tis_imp_ratio_cap=2.0)), 1 / 3),
        (Settings(tbpo=TBPOConfig(seq_tis_imp_ratio_cap=1.0)), 0.0),
        (Settings(loss="mis_gspo", mis_imp_ratio_cap=2.0), 2 / 3),
    ):
        assert clipped_share(settings, log_ratio, mask) == pytest.approx(share), settings


@pytest.mark.parametrize("loss", LOSSES)
def test_every_candidate_is_a_config_that_is_accepted(loss: str) -> None:
    """The keys of each candidate pass the checks of a run, and thresholds reject the stated shares of samples."""
    torch.manual_seed(0)
    config = load_config(["config=quickstart.yaml", f"actor.loss={loss}"])
    ratios = [(0.1 * torch.randn(500, 10), torch.ones(500, 10, dtype=torch.bool))]
    tried = corrections(config, ratios) + bands(config)
    base = base_config(config)
    assert (tried[1].kind == "as configured") == (loss in ("tbpo", "mis_gspo"))
    assert tried[0].kind == "base" and tried[0].settings == objective_settings(base)
    kinds = {one.kind for one in tried} - {"base", "as configured"}
    wanted = {"rejection", "cap" if loss in ("tbpo", "mis_gspo") else "weight"}
    assert kinds == wanted | (set() if loss in ("sapo", "reinforce") else {"band"})
    for one in tried:
        Config.model_validate(with_keys(base, one.keys).model_dump())
    sums = ratios[0][0].double().sum(1)
    thresholds = [one.keys["rollout_correction.rollout_rs_threshold"][0] for one in tried if "[seq_sum_k1]" in one.name]
    shares = [float((-sums > threshold).double().mean()) for threshold in thresholds]
    assert len(shares) == 4
    assert shares[1:] == [pytest.approx(share, abs=0.01) for share in (0.2, 0.05, 0.01)]


def test_the_best_of_a_kind_and_the_noise() -> None:
    def row(kind: str, cosine: float, gain: float, std: float) -> dict[str, object]:
        return {
            "kind": kind,
            "batches": 4,
            "cosine": {"mean": cosine},
            "cosine_gain": {"mean": gain, "std": std},
        }

    found = best(
        [row("base", 1, 0, 0), row("cap", 0.8, 0.1, 0.2), row("cap", 0.9, 0.2, 0.08), row("band", 0.5, 0.1, 0.1)]
    )
    assert found["cap"]["cosine"]["mean"] == 0.9 and found["cap"]["beyond_noise"]
    assert list(found) == ["cap", "band"] and not found["band"]["beyond_noise"]


@pytest.mark.parametrize(("loss", "tried", "widths"), [("tbpo", 18, 6), ("grpo", 26, 6), ("sapo", 26, 0)])
def test_the_memory_by_hand(loss: str, tried: int, widths: int) -> None:
    """74560 weights. No sample gives more candidates than are counted."""
    config = with_keys(load_config(["config=quickstart.yaml"]), {"actor.loss": loss, "quant.align": "exact"})
    torch.manual_seed(0)
    for scale in (0.01, 1.0):
        ratios = [(scale * torch.randn(500, 10), torch.ones(500, 10, dtype=torch.bool))]
        assert tried - 2 <= len(corrections(config, ratios)) <= tried and len(bands(config)) == widths
    four, five = (needed_memory(SMALL, config, batches) for batches in (4, 5))
    assert five - four == (2 * 4 + 2) * 74560 and five > (3 * tried + 9) * 4 * 74560


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["config=quickstart.yaml"])
    size = ModelSize.from_config(AutoConfig.from_pretrained(config.model.path))
    monkeypatch.setattr(candidates_module, "available_memory", lambda: needed_memory(size, config, 5))
    candidates_module.check_memory(config, 5)
    with pytest.raises(UserError, match=r"(?s)comparing 6 batches may need.*lower batches"):
        candidates_module.check_memory(config, 6)


def test_tails_of_student_t_against_the_incomplete_beta_function() -> None:
    mpmath = pytest.importorskip("mpmath")
    for degrees in (1, 2, 3, 4, 7, 20, 999):
        for t in (0.0, 0.5, 2.0, 3.5):
            beta = mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True)
            assert t_tail(t, degrees) == pytest.approx(float(beta) / 2, rel=1e-4)


@pytest.mark.parametrize("given", ["batches=3", "batches=many"])
def test_a_wrong_number_of_batches_is_one_error(given: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "config=quickstart.yaml", given]) == 2
    assert given.removeprefix("batches=") in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.vllm
@needs_w4a16_cpu
def test_a_run(tmp_path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = ["config=quickstart.yaml", f"output_dir={tmp_path}", "batches=4", "rollout.cpu_kvcache_space_gib=0.25"]
    keys.append("actor.use_kl_loss=true")
    assert main(["calibrate", *keys]) == 0
    report = json.loads((tmp_path / "quickstart" / "calibrate.json").read_text())
    rows = {row["name"]: row for row in report["corrections"]}
    assert report["mismatch_abs_max_at_exact"] == 0 and report["batches"] == 4
    assert 0.5 < rows["no correction"]["cosine"]["mean"] < rows["quant.align=linears"]["cosine"]["mean"]
    assert rows["quant.align=model"]["relative_error"]["mean"] < 1e-3
    assert set(report["best"]) == {"cap", "rejection", "band"}
    printed = capfd.readouterr().out
    assert "| no correction |" in printed and "best band: " in printed
