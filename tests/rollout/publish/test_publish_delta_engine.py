"""Delta publishes to a real vLLM: its storage and what it generates equal those after a full publish, every scheme,
dense and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import greedy
from random_models import save_random_model
from random_moe import IGNORE, save_random_moe, wire_tensors
from transformers import AutoModelForCausalLM

from qarl.quant import get_scheme, packed_state_dict
from qarl.rollout.engine import EngineConfig, RolloutEngine
from qarl.rollout.publish.receive import WeightReceiver
from qarl.rollout.publish.send import DeltaSender, publish_weights

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]

SLOW = pytest.mark.slow
CASES = [
    ("dense", "w4a16"),
    pytest.param("dense", "w8a8", marks=SLOW),
    pytest.param("dense", "fp8", marks=SLOW),
    pytest.param("dense", "bf16", marks=SLOW),
    ("experts", "w4a16"),
    pytest.param("experts", "w8a8", marks=SLOW),
    pytest.param("experts", "bf16", marks=SLOW),
]


def publishes(folder: Path, kind: str, scheme: Any) -> list[list[tuple[str, torch.Tensor]]]:
    """Three sets of tensors: the model's, with a few other weights, and with all weights a little different."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = []
    for share in (0.0, 0.01, 1.0):
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                chosen = torch.rand(parameter.shape) < share
                parameter.add_(torch.randn_like(parameter) * 0.05 * chosen)
        if kind == "experts":
            model.save_pretrained(folder.parent / "moved")
            found.append(list(wire_tensors(folder.parent / "moved", scheme).items()))
        else:
            found.append([(n, t.clone()) for n, t in packed_state_dict(model, scheme=scheme, ignore=IGNORE)])
    return found


def state(engine: RolloutEngine) -> dict[str, bytes]:
    model = engine.model()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: bytes(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for name, t in named}


@pytest.mark.parametrize(("kind", "scheme_name"), CASES)
def test_changes_give_the_engine_of_a_full_publish(tmp_path, kind, scheme_name):
    scheme = get_scheme(scheme_name, 32)
    save = save_random_moe if kind == "experts" else save_random_model
    folder = save(tmp_path / "model")
    first, few, all_of_them = publishes(folder, kind, scheme)
    config = EngineConfig(str(folder), scheme, IGNORE, max_model_len=64, kv_cache_gib=0.25, delta=True)
    answers = []
    with RolloutEngine(config) as engine:
        core: Any = engine.llm.llm_engine.engine_core
        runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        second = WeightReceiver.of_runner(runner, engine.expected)
        full = engine.publish(first, version=1)
        for version, tensors in enumerate((few, all_of_them, first, few), start=2):
            report = engine.publish(tensors, version=version)
            assert report.is_delta and report.changed["publish/changed_words"] > 0
            assert report.sent_bytes < (0.6 if tensors is few and version == 2 else 1.2) * full.sent_bytes
            after, answer = state(engine), greedy(engine)
            publish_weights(engine, second, tensors, version=version)
            assert state(engine) == after and greedy(engine) == answer
            answers.append(answer)
        assert answers[0] == answers[3] != answers[1] != answers[2]

        # As in verl: another process sends, buffers are used again, and the engine may have lost its weights.
        receiver, sender = WeightReceiver.of_runner(runner, engine.expected, clone=True), DeltaSender()
        for version, tensors in enumerate((all_of_them, few)):
            engine.model().get_parameter("model.norm.weight").data.zero_()
            receiver.feed(sender.stream(tensors, version=version, held=[receiver.held]))
        assert sender.tally.known and state(engine) == after and greedy(engine) == answers[3]
