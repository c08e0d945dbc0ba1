"""`model.head_dtype=fp32`: FP32 logits on both sides, from the same BF16 weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_helpers import config
from random_models import save_random_model
from transformers import AutoModelForCausalLM

from qarl.checks.model import check_head
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.families import ALIGNED
from qarl.quant import get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.policy import Policy
from qarl.vllm_versions import check_head_dtype

pytestmark = pytest.mark.usefixtures("in_the_checkout")
TOKENS = [[7, 8, 9, 10, 11], [12, 13, 14], [15, 16]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("model"))


def policy(folder: Any, head_dtype: str, **more: Any) -> Policy:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return Policy(model, get_scheme("bf16"), ("lm_head",), head_dtype=head_dtype, **more)


def batch() -> Batch:
    zeros = [[0.0] * len(tokens) for tokens in TOKENS]
    rollout = RolloutBatch([[5, 6]] * 3, TOKENS, zeros, ["stop"] * 3, weight_version=0)
    return make_batch(rollout, torch.zeros(3), torch.zeros(3), pad_token_id=0)


def float64_log_probs(made: Policy, batch: Batch) -> torch.Tensor:
    """The log-probs of the model's hidden states, with lm_head and softmax in FP64."""
    hidden: list[torch.Tensor] = []
    head = made.model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0][0]))
    log_probs = []
    for prompt, tokens in zip([[5, 6]] * 3, TOKENS, strict=True):
        made.model(input_ids=torch.tensor([prompt + tokens]), use_cache=False)
        logits = hidden.pop().double() @ head.weight.double().T
        chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(
            1, torch.tensor(tokens)[:, None]
        )[:, 0]
        log_probs.append(chosen)
    hook.remove()
    return torch.cat(log_probs)


@torch.no_grad()
def test_fp32_log_probs_are_those_of_float64_and_bf16_ones_are_not(folder):
    responses = batch()
    expected = float64_log_probs(policy(folder, "model"), responses)
    errors = {}
    for name in ("model", "fp32"):
        log_probs = policy(folder, name).response_log_probs(responses, slice(0, 3), temperature=1.0)
        errors[name] = float((log_probs[responses.response_mask].double() - expected).abs().max())
    assert errors["fp32"] < 2e-6 < 1e-4 < errors["model"]


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("0.24.0", True),
        ("0.28.1", True),
        ("0.29.0", False),
        ("0.29.0+cpu", False),
        ("1.0", False),
        ("unknown", True),
    ],
)
def test_a_vllm_without_an_fp32_head_is_refused(version, refused, monkeypatch):
    monkeypatch.setattr("qarl.vllm_versions.installed_version", lambda: version)
    check_head_dtype("model")
    if not refused:
        check_head_dtype("fp32")
        return
    with pytest.raises(UserError, match=r"needs vLLM 0\.29") as caught:
        check_head_dtype("fp32")
    assert version in str(caught.value) and caught.value.where == "model.head_dtype"


def test_a_model_with_capped_logits_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("qarl.vllm_versions.installed_version", lambda: "0.29.0")
    fp32 = config(tmp_path, "model.head_dtype=fp32")
    for family in ALIGNED:
        check_head(fp32, SimpleNamespace(model_type=family))
    with pytest.raises(UserError, match="gemma2"):
        check_head(fp32, SimpleNamespace(model_type="gemma2"))
    check_head(config(tmp_path), SimpleNamespace(model_type="gemma2"))


@pytest.mark.vllm
def test_the_engine_samples_from_fp32_logits(folder):
    """With both sides in FP32, log-probs differ by FP32 roundings; with one side in BF16, by BF16 roundings."""
    largest = {}
    for name in ("fp32", "model"):
        made = policy(folder, name, align=Level.EXACT)
        with RolloutEngine(
            EngineConfig(
                str(folder),
                get_scheme("bf16"),
                ("lm_head",),
                max_model_len=32,
                kv_cache_gib=0.1,
                head_dtype=name,
            )
        ) as engine:
            engine.publish(made.published_tensors(), version=0)
            rollout = engine.generate(
                [[5, 6, 7 + i] for i in range(6)], SamplingConfig(12), list(range(6))
            )
        responses = make_batch(rollout, torch.zeros(6), torch.zeros(6), pad_token_id=0)
        for other in ("fp32", "model"):
            with torch.no_grad():
                own = policy(folder, other, align=Level.EXACT).response_log_probs(
                    responses, slice(0, 6), temperature=1.0
                )
            largest[name, other] = float(
                (own - responses.rollout_log_probs)[responses.response_mask].abs().max()
            )
    assert largest["model", "model"] < 1e-3 and largest["fp32", "fp32"] < 5e-6
    assert min(largest["fp32", "model"], largest["model", "fp32"]) > 1e-4
