"""Packed rows: what goes into a pack, and that a row's log-probs, the loss and gradients do not depend on it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from packed_rows import made_batch, make_policy
from random_models import save_random_model
from updating_trainer import updating_trainer

from qarl.align.cpu_attention import uses_engine_attention
from qarl.kernels.cpu.layer_ops import Group
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.batch import Batch, fill, make_batch
from qarl.trainer.layout import lay_out
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("in_the_checkout")

LEVELS = ["off", "linears", pytest.param("model", marks=needs_w4a16_cpu)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_random_model(root / family, family) for family in ("qwen3", "qwen3_moe")}


def log_probs(policy: Policy, batch: Batch, packs: list[list[int]]) -> torch.Tensor:
    log_probs = torch.full_like(batch.rollout_log_probs, torch.nan)
    with torch.no_grad():
        for pack in packs:
            log_probs[pack] = policy.response_log_probs(batch, torch.tensor(pack), temperature=1.0)
    return log_probs


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_rows_log_probs_are_those_of_the_row_alone(folders, family, level):
    """Of a plain forward of one row for each row: whatever the order and the neighbours, packed or padded."""
    batch = made_batch()
    policy = make_policy(folders[family], level)
    alone = torch.zeros_like(batch.rollout_log_probs)
    for i, length in enumerate(batch.lengths.tolist()):
        prompt = int(batch.prompt_lengths[i])
        extra = (
            {"prompt_lengths": batch.prompt_lengths[i : i + 1]}
            if uses_engine_attention(policy.model)
            else {}
        )
        with torch.no_grad():
            logits = policy.model(
                input_ids=batch.input_ids[i : i + 1, :length], use_cache=False, **extra
            ).logits[0]
        chosen = logits.float().log_softmax(-1)[prompt - 1 : length - 1]
        alone[i, : length - prompt] = chosen.gather(1, batch.input_ids[i, prompt:length, None])[
            :, 0
        ]
    assert alone[batch.response_mask].std() > 0.1
    order = list(range(len(batch)))
    for packs in ([order], [order[::-1]], [[3, 0], [1], [4], [2, 7, 5, 6]]):
        assert torch.equal(log_probs(policy, batch, packs), alone), packs
    assert torch.equal(
        log_probs(make_policy(folders[family], level, packed=False), batch, [order]), alone
    )


def update(
    policy: Policy, batch: Batch, old: torch.Tensor, tmp_path: Path, *keys: str
) -> tuple[float, list, dict]:
    """The loss of one mini-batch, TBPO's statistics of its micro-batches, and its FP32 gradients."""
    trainer = updating_trainer(config(tmp_path, "actor.seq_clip_ratio_high=9", *keys), policy)
    statistics, _ = trainer.backward(batch, old, slice(0, len(batch)))
    return sum(values["sum/loss"] for values in statistics), statistics, trainer.optimizer.gradients


@needs_w4a16_cpu
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_loss_and_the_gradient_do_not_depend_on_the_micro_batches(folders, family, tmp_path):
    batch = made_batch()
    old = log_probs(make_policy(folders[family], "model"), batch, [list(range(len(batch)))]) + 0.01
    results = {}
    rows = (
        "actor.ppo_micro_batch_size_per_gpu=null",
        "actor.log_prob_micro_batch_size_per_gpu=null",
    )
    dynamic = (*rows, "actor.use_dynamic_bsz=true")
    for name, packed, keys in (
        ("all", True, (*dynamic, "actor.ppo_max_token_len_per_gpu=10000")),
        ("few", True, (*dynamic, "actor.ppo_max_token_len_per_gpu=230")),
        ("rows", True, ("actor.ppo_micro_batch_size_per_gpu=2",)),
        ("padded", False, ("actor.ppo_micro_batch_size_per_gpu=2",)),
    ):
        results[name] = update(
            make_policy(folders[family], "model", packed=packed), batch, old, tmp_path, *keys
        )
    assert len(results["all"][1]) == 1 and len(results["few"][1]) == 3
    assert results["rows"][0] == results["padded"][0]  # the same rows side by side: the same sums
    loss, _, whole = results["all"]
    for name, (other, statistics, gradients) in results.items():
        assert other == pytest.approx(loss, rel=1e-5) and abs(loss) > 0.01, name
        assert sum(part["sum/responses"] for part in statistics) == 7
        for parameter, gradient in whole.items():
            if (
                gradient.norm() > 1e-6
            ):  # BF16 roundings of each product, and of an embedding's every occurrence
                bound = 0.1 if "embed_tokens" in parameter else 2**-5
                assert (gradients[parameter] - gradient).norm() <= bound * gradient.norm(), (
                    name,
                    parameter,
                )


def same_prompts(batch: Batch) -> Batch:
    """Give rows 1, 3 and 5 the prompt of row 3, whose 30 tokens all have room for, and rows 6 and 7 one of 2 tokens."""
    rows = [
        (batch.input_ids[i, : int(batch.prompt_lengths[i])].tolist()) for i in range(len(batch))
    ]
    rows[1] = rows[5] = rows[3]
    rows[7] = rows[6]
    texts = [
        response[mask].tolist()
        for response, mask in zip(batch.responses, batch.response_mask, strict=True)
    ]
    log_probs = [[-4.0 - i / 10] * len(text) for i, text in enumerate(texts)]
    rollout = RolloutBatch(rows, texts, log_probs, ["stop"] * len(rows), weight_version=0)
    return make_batch(rollout, torch.zeros(len(rows)), batch.advantages, pad_token_id=2)


@needs_w4a16_cpu
@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8"])
def test_rows_that_share_a_prompt_have_the_log_probs_of_rows_that_do_not(
    folders, scheme, monkeypatch
):
    batch = same_prompts(made_batch())
    policy = make_policy(folders["qwen3"], "model", scheme)
    packs = [[*range(8)], [1, 5, 7]]
    assert policy.shared_prompt > 30
    layout = policy.lay_out(batch, slice(0, 8))
    assert [len(group.rows) for group in layout.groups] == [1, 3, 1, 1, 2, 1]
    assert layout.size < lay_out(batch, slice(0, 8)).size
    shared = [log_probs(policy, batch, [pack]) for pack in packs]
    monkeypatch.setattr(Policy, "shared_prompt", 0)
    assert not policy.lay_out(batch, slice(0, 8)).shares_prompts
    for pack, ours in zip(packs, shared, strict=True):
        alone = log_probs(policy, batch, [[row] for row in pack])
        assert torch.equal(ours[pack], alone[pack])


@needs_w4a16_cpu
def test_a_shared_prompts_gradients_are_as_near_to_those_of_fp32_logits(
    folders, monkeypatch, tmp_path
):
    """The exact gradients are those of the same model in FP32, whose weights are the BF16 ones."""
    batch = same_prompts(made_batch())
    weights = torch.linspace(-1, 1, int(batch.response_mask.sum()))

    def gradients(policy, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        policy.model.to(dtype).zero_grad()
        log_probs = policy.response_log_probs(batch, slice(0, 8), temperature=0.7)
        (log_probs[batch.response_mask] * weights).sum().backward()
        return {name: p.grad.double() for name, p in policy.model.named_parameters()}

    exact = gradients(make_policy(folders["qwen3"], "off", "bf16"), torch.float32)
    errors = []
    for longest in (10**6, 0):
        monkeypatch.setattr(Policy, "shared_prompt", longest)
        ours = gradients(make_policy(folders["qwen3"], "model", "bf16"), torch.bfloat16)
        errors.append({n: (ours[n] - exact[n]).norm() / exact[n].norm() for n in exact})
    shared, alone = errors
    assert sum(shared.values()) <= 1.05 * sum(alone.values())
    assert all(shared[name] < 2**-5 for name in exact if "embed" not in name)


def test_every_row_is_in_one_pack_and_no_pack_is_over_the_limit():
    chosen = random.Random(0)
    for _ in range(300):
        limit = chosen.randint(10, 100)
        lengths = [chosen.randint(1, limit) for _ in range(chosen.randint(1, 40))]
        packs = fill(lengths, limit)
        assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
        assert all(pack and sum(lengths[row] for row in pack) <= limit for pack in packs)
        assert packs == sorted(packs) and all(pack == sorted(pack) for pack in packs)
        assert packs == fill(list(lengths), limit)
        assert len(packs) >= -(-sum(lengths) // limit)
    assert fill([], 10) == [] and fill([10], 10) == [[0]]
    with pytest.raises(
        ValueError, match="a row of 11 tokens does not fit into a micro-batch of 10 tokens"
    ):
        fill([3, 11], 10)


def test_a_layout_with_a_shared_prompt_by_hand():
    """Rows of 2 + 3, 3 + 1, 2 + 2 and 2 + 0 tokens; all but the second have the prompt 7, 8."""
    prompts, responses = [[7, 8], [7, 8, 9], [7, 8], [7, 8]], [[11, 12, 13], [14], [15, 16], []]
    rollout = RolloutBatch(
        prompts, responses, [[-1.0] * len(r) for r in responses], ["stop"] * 4, weight_version=0
    )
    batch = make_batch(rollout, torch.zeros(4), torch.zeros(4), pad_token_id=2)
    layout = lay_out(batch, slice(0, 4), shared_prompt=2)
    assert layout.groups == (Group.of(2, (3, 2, 0)), Group.of(3, (1,)), Group.of(53, (0,)))
    assert layout.shares_prompts and layout.inputs["row_lengths"] == (7, 4, 53)
    ids = [7, 8, 11, 12, 13, 15, 16, 7, 8, 9, 14]
    assert layout.inputs["input_ids"].tolist() == [ids + [0] * 53]
    positions = [0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 3]
    assert layout.inputs["position_ids"].tolist() == [[*positions, *range(53)]]
    assert layout.slots.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 0, 1, 5, 6, 0, 1]
    assert layout.predictors.tolist() == [1, 2, 3, 9, 1, 5]
    tokens = layout.unflatten(layout.inputs["input_ids"][0])
    mask = torch.arange(5) < batch.lengths[:, None]
    assert torch.equal(tokens, batch.input_ids * mask)
    alone = lay_out(batch, slice(0, 4), shared_prompt=1)
    assert alone.inputs["row_lengths"] == (5, 4, 4, 2, 49) and not alone.shares_prompts
    assert not lay_out(batch, slice(0, 4), packed=False, shared_prompt=9).shares_prompts


def test_a_layout_by_hand():
    """Two of three rows: 2 + 3 tokens and 5 + 1."""
    batch, rows = made_batch([(2, 3), (1, 1), (5, 1)]), torch.tensor([0, 2])
    layout = lay_out(batch, rows)
    ids = [*batch.input_ids[0, :5].tolist(), *batch.input_ids[2, :6].tolist()]
    assert layout.inputs["input_ids"].tolist() == [ids + [0] * 53]
    assert layout.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, *range(53)]]
    assert layout.inputs["row_lengths"] == (5, 6, 53)
    assert layout.slots.tolist() == list(range(11)) and layout.predictors.tolist() == [1, 2, 3, 9]
    padded = lay_out(batch, rows, packed=False)
    assert padded.inputs["input_ids"].tolist() == batch.input_ids[rows].tolist()
    assert padded.inputs["row_lengths"] == (5, 6)
    assert padded.predictors.tolist() == [1, 2, 3, 10]
    valid = torch.arange(batch.input_ids.shape[1]) < torch.tensor([[5], [6]])
    for form in (layout, padded):
        assert torch.equal(
            form.unflatten(form.flatten(batch.input_ids[rows], -1)),
            batch.input_ids[rows].where(valid, 0),
        )
        responses = batch.responses[rows]
        assert form.of_responses(responses).tolist() == [
            *responses[0, :3].tolist(),
            responses[1, 0],
        ]
        assert torch.equal(
            form.to_responses(form.of_responses(responses)),
            responses.where(batch.response_mask[rows], 0),
        )
