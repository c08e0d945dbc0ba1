"""The in-process vLLM engine and the publisher, against the engine's own layers and a freshly started vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, SCHEME, greedy, load_model

from qarl.errors import UserError
from qarl.quant import QuantLinear, get_scheme, packed_state_dict
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]


@pytest.fixture(scope="module")
def model(pristine_model) -> torch.nn.Module:
    return load_model(pristine_model)


@pytest.fixture(scope="module")
def engine(pristine_model) -> Iterator[RolloutEngine]:
    config = EngineConfig(
        str(pristine_model), SCHEME, ("lm_head",), max_model_len=320, kv_cache_gib=0.25
    )
    with RolloutEngine(config) as engine:
        yield engine


@pytest.fixture
def published(engine, model) -> RolloutEngine:
    """The engine with `model`'s weights as version 1."""
    engine.publish(packed_state_dict(model), version=1)
    return engine


def test_a_new_engine_refuses_to_generate(engine):
    assert engine.stale
    with pytest.raises(UserError, match="refuses to generate"):
        engine.generate(PROMPTS, SamplingConfig(4))


def test_published_weights_survive_later_changes_of_the_trainer(engine, pristine_model):
    other = load_model(pristine_model, noise_seed=1)
    engine.publish(packed_state_dict(other), version=2)
    before = greedy(engine)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    for layer in other.modules():
        if isinstance(layer, QuantLinear):
            for tensor in layer.quantized().tensors.values():
                tensor.zero_()
    engine.llm.reset_prefix_cache()
    assert greedy(engine) == before


def test_seeded_requests_draw_no_other_noise(published):
    """vLLM's own sampler on a CPU draws and overwrites noise of the global generator, too. The tokens are the same."""
    sampling = SamplingConfig(16, temperature=1.0)
    seeds = list(range(len(PROMPTS)))
    before = torch.get_rng_state()
    drawn = published.generate(PROMPTS, sampling, seeds)
    assert torch.equal(torch.get_rng_state(), before)
    (sampler,) = published.llm.collective_rpc(
        lambda worker: worker.model_runner.sampler.topk_topp_sampler
    )
    chosen = sampler.forward
    sampler.forward = sampler.forward_cpu
    try:
        again = published.generate(PROMPTS, sampling, seeds)
    finally:
        sampler.forward = chosen
    assert not torch.equal(torch.get_rng_state(), before)
    assert again.response_token_ids == drawn.response_token_ids
    assert again.rollout_log_probs == drawn.rollout_log_probs


def test_a_response_depends_on_its_seed_and_not_on_the_batch(published):
    sampling = SamplingConfig(16, temperature=1.0)
    seeds = list(range(100, 116))
    whole = published.generate(PROMPTS, sampling, seeds)
    assert (
        published.generate(PROMPTS, sampling, seeds).response_token_ids == whole.response_token_ids
    )
    alone = published.generate(PROMPTS[5:6], sampling, seeds[5:6])
    assert alone.response_token_ids == whole.response_token_ids[5:6]
    assert (
        published.generate(PROMPTS, sampling, seeds[::-1]).response_token_ids
        != whole.response_token_ids
    )
    assert all(
        len(r) == len(lp)
        for r, lp in zip(whole.response_token_ids, whole.rollout_log_probs, strict=True)
    )


def test_more_prompt_tokens_than_one_prefill_holds_are_sampled_with_their_seeds(published):
    """vLLM 0.29 on CPU crashes if a seeded request's prefill is chunked; 128 prompts of 40 tokens pass 4096."""
    prompts = [[3 + (i + t) % 50 for t in range(40)] for i in range(128)]
    batch = published.generate(prompts, SamplingConfig(2), seeds=list(range(128)))
    alone = published.generate(prompts[-1:], SamplingConfig(2), seeds=[127])
    assert batch.response_token_ids[-1:] == alone.response_token_ids


def test_the_log_probs_are_the_sampled_tokens_though_the_likeliest_are_asked_for(published):
    seeds = list(range(16))
    plain = published.generate(PROMPTS, SamplingConfig(16), seeds)
    rollout = published.generate(PROMPTS, SamplingConfig(16, top_tokens=True), seeds)
    assert (
        rollout.response_token_ids == plain.response_token_ids
        and rollout.top_token_ids != plain.response_token_ids
    )
    assert rollout.rollout_log_probs == plain.rollout_log_probs


def test_prompts_that_share_a_beginning_are_each_prefilled_whole(published):
    """Two blocks of vLLM's KV cache on CPU, and a few tokens more."""
    prompts = [[3 + t % 50 for t in range(256)] + [5, 6 + i] for i in range(2)]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts * 2]
    outputs = [published.llm.generate(request, use_tqdm=False)[0] for request in requests]
    assert [output.num_cached_tokens for output in outputs] == [0] * 4


@pytest.mark.parametrize(
    ("prompts", "why"),
    [(["1+1"], "a prompt is '1.1'"), ([[]], r"a prompt is \[\]"), ([[5], [6]], "and 1 seeds")],
)
def test_requests_that_vllm_would_choke_on_do_not_end_the_engine(published, prompts, why):
    with pytest.raises(UserError, match=why):
        published.generate(prompts, SamplingConfig(max_tokens=2), [0])
    with pytest.raises(UserError, match="packed_state_dict"):
        published.publish({}, version=2)
    assert published.generate([[5]], SamplingConfig(max_tokens=2), [0]).response_token_ids


@pytest.mark.parametrize(
    ("scheme", "ignore"), [("w4a16", ("lm_head",)), (get_scheme("w4a16"), "lm_head")]
)
def test_settings_of_an_engine_that_are_texts(scheme, ignore):
    with pytest.raises(UserError, match="get_scheme"):
        EngineConfig("model", scheme, ignore, 64)
