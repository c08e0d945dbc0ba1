"""Keys of verl's that QaRL's choices rest on, whatever the run: each is in the composed config, with the reason."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl_runs import quickstart

from qarl.config import Config
from qarl.verl.run import verl_config

pytestmark = pytest.mark.usefixtures("own_environment")

ROLLOUT = "actor_rollout_ref.rollout"
# Value and reason.
FIXED = {
    f"{ROLLOUT}.calculate_log_probs": (True, "TBPO compares the rollout's log-probs"),
    f"{ROLLOUT}.logprobs_mode": ("processed_logprobs", "those of the distribution that was sampled from"),
    f"{ROLLOUT}.load_format": ("dummy", "the first weights come from the trainer too"),
    f"{ROLLOUT}.name": ("vllm", "the receiver is a worker extension of vLLM's"),
    "algorithm.rollout_correction.bypass_mode": (False, "the trainer's own log-probs are the old ones"),
    "actor_rollout_ref.actor.kl_loss_type": ("low_var_kl+", "a KL term that a run adds has an unbiased gradient"),
    "actor_rollout_ref.model.override_config.attn_implementation": ("sdpa", "verl's flash_attention_2 is in no lock"),
    f"{ROLLOUT}.agent.default_agent_loop": ("qarl_single_turn", "verl's own needs the tokens of a model family"),
    "actor_rollout_ref.actor.strategy": ("fsdp2", "the layers are quantized where FSDP2 gathers them"),
}
"""Value and reason."""
ON_CPU = {
    f"{ROLLOUT}.enable_chunked_prefill": (False, "a prompt in chunks gets other bits, or vLLM crashes"),
    f"{ROLLOUT}.enable_prefix_caching": (False, "a prompt whose beginning is cached gets other bits"),
}


@pytest.fixture(params=["w4a16", "bf16"])
def run(request: pytest.FixtureRequest) -> Config:
    return quickstart(**{"quant.scheme": request.param, "rollout.temperature": 0.7})


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_no_run_may_have_otherwise(run: Config, on_cpu: bool) -> None:
    composed = verl_config(run, on_cpu=on_cpu)
    wanted = FIXED | (ON_CPU if on_cpu else {})
    found = {key: OmegaConf.select(composed, key) for key in wanted}
    assert found == {key: value for key, (value, _) in wanted.items()}
