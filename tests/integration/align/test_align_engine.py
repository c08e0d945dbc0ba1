"""Alignment levels end to end: a real vLLM's log-probs of what it sampled against the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from random_models import save_random_model

from qarl.config.level import Level
from qarl.data.prompts import load_prompts
from qarl.kernels.cpu.attention_tiles import longest_exact_prompt
from qarl.quant import Scheme, get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.policy import Policy

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]


def in_threads(count: int) -> Iterator[None]:
    """Set the number of threads for a while. (A CPU engine replaces torch.set_num_threads by a function that warns.)"""
    threads = torch.get_num_threads()
    torch._C.set_num_threads(count)
    yield
    torch._C.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On several threads the tiles of vLLM's prefill, so the bits of long prompts, depend on the engine's batch."""
    yield from in_threads(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    yield from in_threads(2)


@dataclass
class Rollout:
    """Responses sampled at temperature 1 from the published weights of the model in `folder`."""

    folder: Path
    scheme: Scheme
    batch: Batch

    def policy(self, level: str) -> Policy:
        policy = load_policy(self.folder, self.scheme, level)
        assert policy.align == ("exact" if level == "model" else level)
        return policy

    def log_probs(self, policy: Policy, size: int = 16) -> torch.Tensor:
        with torch.no_grad():
            rows = self.batch.micro_batches(size)
            return torch.cat(
                [policy.response_log_probs(self.batch, r, temperature=1.0) for r in rows]
            )

    def delta(self, level: str) -> torch.Tensor:
        """|trainer's log-prob less the engine's| of every sampled token."""
        ours = self.log_probs(self.policy(level))
        return (ours - self.batch.rollout_log_probs)[self.batch.response_mask].abs()


def load_policy(folder: Path, scheme: Scheme, level: str) -> Policy:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return Policy(model, scheme, ("lm_head",), align=Level(level))


def sample(
    folder: Path, scheme_name: str, prompts: list[list[int]], max_tokens: int, **options: Any
) -> Rollout:
    scheme = get_scheme(scheme_name, group_size=32)
    length = max(map(len, prompts)) + max_tokens
    with RolloutEngine(
        EngineConfig(str(folder), scheme, ("lm_head",), length, kv_cache_gib=0.25, **options)
    ) as engine:
        engine.publish(load_policy(folder, scheme, "linears").published_tensors(), version=1)
        rollout = engine.generate(
            prompts, SamplingConfig(max_tokens), seeds=list(range(len(prompts)))
        )
    zeros = torch.zeros(len(prompts))
    return Rollout(folder, scheme, make_batch(rollout, zeros, zeros, pad_token_id=2))


def random_prompts(count: int, length: int) -> list[list[int]]:
    """Prompts of `length` tokens and up to six fewer."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(3, 64, (length - i % 7,), generator=generator).tolist() for i in range(count)
    ]


@pytest.fixture(scope="module", params=["w4a16", "w8a8", "fp8", "bf16"])
def trained(request) -> Iterator[Rollout]:
    """The quickstart's trained model on its own task."""
    from transformers import AutoTokenizer

    folder = ROOT / "models/tiny-qwen3"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    file = str(ROOT / "data/column_addition/test.parquet")
    options: dict[str, Any] = {
        "prompt_key": "prompt",
        "max_prompt_length": 32,
        "filter_overlong_prompts": True,
    }
    prompts = load_prompts(file, tokenizer=tokenizer, limit=48, **options)
    yield sample(folder, request.param, [prompt.prompt_token_ids for prompt in prompts], 80)


def test_every_level_is_nearer_to_the_engine_than_the_one_below(trained):
    assert trained.batch.response_mask.sum() > 1500
    off, linears, model = (trained.delta(level) for level in ("off", "linears", "model"))
    assert off.mean() > 5e-4
    assert linears.mean() < off.mean() or trained.scheme.name == "bf16"
    assert model.max() == 0


def test_a_rows_log_probs_do_not_depend_on_the_rows_beside_it(trained):
    policy = trained.policy("model")
    whole = trained.log_probs(policy, 48)
    for size in (1, 7):
        assert torch.equal(trained.log_probs(policy, size), whole)


@pytest.mark.parametrize("family", [pytest.param("qwen2", marks=pytest.mark.slow), "llama"])
def test_other_families(tmp_path, family):
    """Random weights, biased q, k and v in Qwen2."""
    rollout = sample(
        save_random_model(tmp_path / family, family), "w4a16", random_prompts(16, 40), 40
    )
    assert rollout.delta("off").mean() > 1e-3 and rollout.delta("model").max() == 0


def model_with_heads_of_128(folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    save_random_model(folder)
    config = AutoConfig.from_pretrained(folder)
    config.head_dim, config.max_position_embeddings, config.initializer_range = 128, 1024, 0.06
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("scheme", ["w4a16", "bf16"])
def test_threads_and_a_prefix_cache_up_to_the_border(tmp_path, scheme, two_threads):
    """Each prompt is sampled three times: the second and third prefill only what follows the cached blocks."""
    folder = model_with_heads_of_128(tmp_path / "model")
    prompts = random_prompts(3, longest_exact_prompt(128)) * 3
    rollout = sample(folder, scheme, prompts, 40, enable_prefix_caching=True)
    assert rollout.delta("off").mean() > 1e-4
    assert rollout.delta("model").max() == 0


def test_long_prompts_at_head_size_128(tmp_path):
    """From 334 keys on the engine's prefill sums in another order than its decoding. Each prompt is sampled twice, as
    rollout.n does: a cached prefix would be prefilled in another tiling."""
    folder = model_with_heads_of_128(tmp_path / "model")
    rollout = sample(folder, "w4a16", random_prompts(3, 600) * 2, 40)
    off, linears, model = (rollout.delta(level) for level in ("off", "linears", "model"))
    assert linears.mean() < off.mean() / 10 and model.max() == 0
