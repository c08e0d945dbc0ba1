"""The arguments of verl's engines and workers that follow from several keys: compilation, graphs, splits, tokens."""

from __future__ import annotations

import pytest
import torch
from random_models import save_random_model
from verl_runs import quickstart

from qarl.verl.keys import worker_environment
from qarl.verl.run import differences, verl_config

pytest.importorskip("verl")
pytestmark = pytest.mark.usefixtures("own_environment")


BY_TOKENS = {
    "actor.use_dynamic_bsz": True,
    "actor.ppo_micro_batch_size_per_gpu": None,
    "actor.log_prob_micro_batch_size_per_gpu": None,
    "actor.ppo_max_token_len_per_gpu": 300,
}


def test_micro_batches_by_tokens_arrive_in_verls_config():
    """The limit for log-probs is by default the one for the update, as in verl's own config."""
    for given, log_probs in ((500, 500), (None, 300)):
        resolved = verl_config(quickstart(**BY_TOKENS | {"actor.log_prob_max_token_len_per_gpu": given}), on_cpu=True)
        actor, rollout = resolved.actor_rollout_ref.actor, resolved.actor_rollout_ref.rollout
        assert (actor.use_dynamic_bsz, rollout.log_prob_use_dynamic_bsz) == (True, True)
        assert (actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu) == (300, log_probs)
        assert resolved.actor_rollout_ref.model.use_remove_padding is True
    plain = verl_config(quickstart(), on_cpu=True)
    assert plain.actor_rollout_ref.actor.use_dynamic_bsz is False


def test_a_cpu_never_compiles():
    """Its workers have TORCHDYNAMO_DISABLE, with which vLLM cannot compile."""
    config = quickstart(**{"rollout.enforce_eager": False})
    for on_cpu in (True, False):
        assert verl_config(config, on_cpu=on_cpu).actor_rollout_ref.rollout.enforce_eager is on_cpu
        assert ("TORCHDYNAMO_DISABLE" in worker_environment(config, on_cpu)) is on_cpu
        assert ("enforce_eager=false becomes true here" in " ".join(differences(config, on_cpu))) is on_cpu


GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("level", ["off", "linears", "model"])
def test_engines_on_gpus_compile_where_the_trainer_follows_none_of_their_operators(scheme, level):
    """As in the local backend (tests/rollout/test_gpu.py): vLLM's default for W4A16 and BF16 below `model`."""
    config = quickstart(**{"quant.scheme": scheme, "quant.align": level})
    wanted = None if scheme in ("bf16", "w4a16") and level != "model" else GRAPHS
    engine = verl_config(config, on_cpu=False).actor_rollout_ref.rollout.engine_kwargs.vllm
    assert engine.get("compilation_config") == wanted


def test_engines_capture_graphs_unless_they_are_eager():
    for asked, on_cpu, wanted in (
        (None, False, GRAPHS),
        (False, False, GRAPHS),
        (True, False, None),
        (None, True, None),
    ):
        resolved = verl_config(quickstart(**{"rollout.enforce_eager": asked}), on_cpu=on_cpu).actor_rollout_ref
        rollout = resolved.rollout
        assert rollout.engine_kwargs.vllm.get("compilation_config") == wanted
        assert rollout.enforce_eager is (wanted is None)
        assert on_cpu or resolved.actor.fsdp_config.quant.enforce_eager is rollout.enforce_eager
        assert rollout.free_cache_engine is not on_cpu


def test_engines_on_gpus_have_one_split_only_where_the_trainer_follows_it(tmp_path, monkeypatch):
    """`quant.align` is `model` in all of them."""

    def one_split(**changes) -> bool:
        rollout = verl_config(quickstart(**changes), on_cpu=False).actor_rollout_ref.rollout
        return "attention_config" in rollout.engine_kwargs.vllm

    assert one_split()
    assert not one_split(**{"trainer.n_gpus_per_node": 2, "rollout.tensor_model_parallel_size": 2})
    assert not one_split(**{"model.path": str(save_random_model(tmp_path, "qwen3_moe")), "quant.group_size": 32})
    assert one_split(**{"model.path": str(tmp_path / "missing")}), "the checks of a run refuse it"
    for capability, level in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert one_split() is level
