"""The counts of responses and tokens while vLLM samples, after each of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, SCHEME, load_model

from qarl.progress import live
from qarl.quant import packed_state_dict
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.engine_config import sampling_params
from qarl.rollout.live_counts import LiveCounts

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]
LENGTHS = (2, 5, 3)


@pytest.fixture(scope="module")
def engine(pristine_model) -> Iterator[RolloutEngine]:
    config = EngineConfig(
        str(pristine_model), SCHEME, ("lm_head",), max_model_len=320, kv_cache_gib=0.25
    )
    with RolloutEngine(config) as engine:
        engine.publish(packed_state_dict(load_model(pristine_model)), version=0)
        yield engine


def test_each_step_of_vllm_adds_a_token_to_each_open_response(engine):
    sampling = SamplingConfig(1, ignore_eos=True)
    params = [sampling_params(replace(sampling, max_tokens=length), 0) for length in LENGTHS]
    counts = LiveCounts(engine.llm, len(LENGTHS))
    assert (counts().done, counts().tokens) == (0, 0)
    requests: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS[: len(LENGTHS)]]
    engine.llm.enqueue(requests, params, use_tqdm=False)
    seen = []
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
        now = counts()
        seen.append((now.done, now.tokens, now.tokens_of_done))
    assert seen == [(0, 3, 0), (1, 6, 2), (2, 8, 5), (2, 9, 5), (3, 10, 10)]


def test_a_call_remembers_its_tokens_for_the_next(engine):
    engine.generate(PROMPTS[:2], SamplingConfig(7, ignore_eos=True), [0, 1])
    assert live._DISPLAY.tokens_before[("sampling", 2)] == 14
