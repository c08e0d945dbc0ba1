"""Conversations beyond the border of `exact`: in sessions δ = 0, with a request for each turn it is not.

The border depends on the machine (`longest_exact_prompt`), so the conversations are made longer than it.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import transformers
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from random_models import save_random_model

from qarl.kernels.cpu.attention_tiles import longest_exact_prompt
from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]
HEAD = 256  # t0, t1 and t2 are special tokens, which the tokenizer finds in t17, too
TURN = 60
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}t1 {% endif %}"
    "{% endfor %}"
)
ENVIRONMENT = """
def answer(messages, **_):
    turns = sum(message["role"] == "assistant" for message in messages)
    reply = " ".join(f"t{{30 + (7 * place + turns) % 30}}" for place in range(20))
    return {{"reply": reply if turns < {turns} else None, "reward": len(messages[-1]["content"]) % 3}}
"""


def trainer_of(folder: Path, *keys: str, family: str = "qwen3", turns: int = 4) -> LocalTrainer:
    """A trainer of a random model with heads of 256, whose later turns begin behind the border."""
    border = longest_exact_prompt(HEAD)
    model = save_random_model(
        folder / "model",
        family,
        head_dim=HEAD,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    rng = Random(0)
    words = [" ".join(f"t{rng.randrange(30, 60)}" for _ in range(border - 10)) for _ in range(4)]
    rows = [
        {
            "data_source": "x",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"ground_truth": "1"},
        }
        for text in words
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "environment.py").write_text(ENVIRONMENT.format(turns=turns))
    settings = config(
        folder,
        f"model.path={model}",
        f"data.train_files={folder}/rows.jsonl",
        "data.val_files=[]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "data.train_batch_size=4",
        f"data.max_prompt_length={border}",
        f"data.max_response_length={turns * (TURN + 25)}",
        "rollout.n=2",
        f"rollout.environment={folder}/environment.py:answer",
        "reward.function=environment",
        f"multi_turn.max_turn_length={TURN}",
        "actor.ppo_mini_batch_size=4",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "actor.log_prob_micro_batch_size_per_gpu=4",
        "actor.old_log_probs=recompute",
        "quant.mismatch_limit=100",
        "trainer.report=false",
        *keys,
    )
    assert settings.longest_prefill > border
    return LocalTrainer(settings, prepare_run(settings))


@pytest.mark.parametrize("scheme", ["w4a16", pytest.param("w8a8", marks=pytest.mark.slow)])
def test_long_conversations_have_no_mismatch(tmp_path: Path, scheme: str) -> None:
    trainer = trainer_of(tmp_path, f"quant.scheme={scheme}")
    conversations = trainer.parts.conversations
    assert conversations is not None and conversations.sessions
    with trainer.engine:
        trainer.publish()
        conversations.sessions = 3  # groups of three, three and two
        in_sessions = trainer.train_step()
        conversations.sessions = None
        by_requests = trainer.train_step()
    assert in_sessions["turns/mean"] > 2
    assert in_sessions["mismatch/abs_max"] == 0.0
    assert by_requests["mismatch/abs_max"] > 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "keys"),
    [("qwen3_moe", ["quant.ignore=[lm_head,re:.*mlp.gate$]"]), ("qwen3", ["lora.r=8"])],
    ids=["experts", "adapters"],
)
def test_experts_and_adapters(tmp_path: Path, family: str, keys: list[str]) -> None:
    trainer = trainer_of(tmp_path, *keys, family=family)
    with trainer.engine:
        trainer.publish()
        for _ in range(2):
            metrics = trainer.train_step()
            assert metrics["mismatch/abs_max"] == 0.0
            assert metrics["turns/mean"] > 2
            assert metrics.get("mismatch/other_experts_frac", 0.0) == 0.0


def test_a_run_after_sessions_publishes_and_samples(tmp_path: Path) -> None:
    """Sessions leave nothing in the engine: three steps, with a turn that is cut at its limit of tokens in each."""
    trainer = trainer_of(tmp_path, turns=3)
    with trainer.engine:
        trainer.publish()
        for step in range(3):
            batch, metrics = trainer.rollout()
            assert not trainer.engine.llm.llm_engine.has_unfinished_requests()
            assert batch.conversations is not None and batch.later_prefills is not None
            for conversation, prefills in zip(
                batch.conversations, batch.later_prefills, strict=True
            ):
                assert len(prefills) == len(conversation.turns) - 1
                assert all(end - start <= TURN for start, end in conversation.turns)
            assert metrics["turns/mean"] > 1, step
