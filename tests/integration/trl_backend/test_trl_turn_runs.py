"""Three turns with a tool under TRL, on a real vLLM: δ = 0 on every token of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from glossary import glossary_metrics
from trl_turns import save_chat_model

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
slow = partial(pytest.param, marks=pytest.mark.slow)
LONG = {"max_completion_length": 2200, "max_turn_length": 600, "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat") / "model")


def run(model: Path, kind: str, **settings: Any) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests/support/trl_turn_run.py"), str(model), kind]
    done = subprocess.run(
        [*command, json.dumps(settings)], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    found = [line for line in done.stdout.splitlines() if "OUTCOME " in line]
    assert found, done.stderr[-3000:]
    outcome: dict[str, Any] = json.loads(found[-1].partition("OUTCOME ")[2])
    return outcome


def assert_exact(outcome: dict[str, Any], steps: int) -> None:
    logs = [entry for entry in outcome["history"] if "mismatch/abs_max" in entry]
    assert len(logs) == steps
    for entry in logs:
        assert entry["mismatch/abs_max"] == 0.0
        assert entry["mismatch/k3"] == 0.0
        assert entry["grad_norm"] > 0
    sampled = [entry for entry in logs if "turns/mean" in entry]
    assert sampled
    for entry in sampled:
        assert entry["turns/mean"] > 2.5
        assert entry["turns/context_tokens"] > 20
    turns = {name for entry in logs for name in entry if name.startswith("turns/")}
    assert turns - glossary_metrics() == set()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("environment", {"quant_scheme": "w4a16"}),
        slow("tools", {"quant_scheme": "w8a8", "quant_group_size": 128}),
        slow("tools", {"quant_scheme": "bf16", "loss_type": "grpo", "num_iterations": 2}),
        slow("environment", {"quant_scheme": "w4a16", "lora": LORA}),
    ],
    ids=["w4a16", "w8a8", "bf16", "adapters"],
)
def test_three_turns_have_no_mismatch(model: Path, kind: str, settings: dict[str, Any]) -> None:
    outcome = run(model, kind, **settings)
    assert_exact(outcome, steps=3)
    lengths = [entry.get("completions/mean_length", 0) for entry in outcome["history"]]
    assert max(lengths) <= 60  # three turns of 20, without what the tool says


@pytest.mark.slow
def test_long_conversations_are_held_in_sessions(model: Path) -> None:
    outcome = run(model, "tools", max_steps=2, **LONG)
    assert outcome["sessions"]
    assert_exact(outcome, steps=2)


def test_tool_tokens_in_the_mask_by_mistake_are_noticed(model: Path) -> None:
    """They were not sampled, so their log-probs in the rollout are 0, and the trainer's are not."""
    outcome = run(model, "environment", unmask=True)
    assert outcome["error"] is not None
    assert "mismatch" in outcome["error"] or "models" in outcome["error"]
