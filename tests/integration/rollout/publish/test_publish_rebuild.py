"""An engine that vLLM itself has spoilt, or that is gone: another one is started, in this process, and works."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, SCHEME, greedy, load_model

from qarl.errors import UserError
from qarl.quant import packed_state_dict
from qarl.rollout.engine import EngineConfig, EngineFailed, RolloutEngine, SamplingConfig
from qarl.rollout.publish.writers import ReloadFailed

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]


class Lost(torch.Tensor):
    """A tensor that passes every check and then fails when it is copied."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            raise RuntimeError("transfer lost")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_an_exception_in_the_middle_of_vllms_reload(pristine_model):
    """Through layerwise reload, as on a GPU: half loaded for real, refused from then on, and rebuilt."""
    tensors, other = (
        list(packed_state_dict(load_model(pristine_model, noise_seed=seed))) for seed in (None, 1)
    )
    sizes = {"max_model_len": 64, "kv_cache_gib": 0.25}
    config = EngineConfig(str(pristine_model), SCHEME, ("lm_head",), direct_writes=False, **sizes)
    spoilt = [
        (n, t.as_subclass(Lost) if n == "model.layers.1.mlp.up_proj.weight_packed" else t)
        for n, t in other
    ]
    with RolloutEngine(config) as engine:
        assert any(target.stored is None for target in engine.weights.plan.by_owner.values())
        engine.publish(tensors, version=1)
        expected = greedy(engine)
        engine.publish(other, version=2)
        assert greedy(engine) != expected
        engine.publish(tensors, version=3)
        assert greedy(engine) == expected
        with pytest.raises(ReloadFailed, match=r"(?s)could not reload.*transfer lost"):
            engine.publish(spoilt, version=5)
        with pytest.raises(UserError, match="publish of version 5 did not complete"):
            engine.generate(PROMPTS, SamplingConfig(4))
        with pytest.raises(
            ReloadFailed,
            match=r"(?s)takes no more publishes.*version 5 did not complete.*rebuild\(\)",
        ):
            engine.publish(tensors, version=6)
        with pytest.raises(UserError, match="publish of version 5 did not complete"):
            engine.generate(PROMPTS, SamplingConfig(4))
        old = [
            weakref.ref(tensor)
            for tensor in (
                *engine.model().state_dict(keep_vars=True).values(),
                *engine.weights.kv_caches(),
            )
        ]
        engine.rebuild()
        assert old and not any(
            tensor() is not None for tensor in old
        )  # on a GPU vLLM would refuse the second engine
        with pytest.raises(UserError, match="nothing has been published"):
            engine.generate(PROMPTS, SamplingConfig(4))
        engine.publish(tensors, version=6)
        assert greedy(engine) == expected

        engine.llm.llm_engine.engine_core.shutdown()  # the engine goes away under us
        with pytest.raises(
            EngineFailed, match=r"(?s)the rollout engine is lost.*vLLM failed.*rebuild_on_failure"
        ):
            greedy(engine)
        with pytest.raises(UserError, match=r"(?s)refuses to generate.*vLLM failed"):
            greedy(engine)
        with pytest.raises(ReloadFailed, match=r"(?s)takes no more publishes.*vLLM failed"):
            engine.publish(tensors, version=7)
        engine.rebuild()
        with pytest.raises(ValueError, match="KV cache"):
            RolloutEngine(
                replace(config, kv_cache_gib=1e-4)
            )  # this frees nothing of the first engine
        engine.publish(tensors, version=8)
        assert greedy(engine) == expected

        engine.close()
        with pytest.raises(UserError, match="the rollout engine is closed"):
            engine.publish(tensors, version=9)
        with pytest.raises(UserError, match=r"(?s)refuses to generate.*closed"):
            engine.generate(PROMPTS, SamplingConfig(4))
