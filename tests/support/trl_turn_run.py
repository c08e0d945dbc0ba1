"""A TRL run of three turns on a real vLLM, in a process of its own: python trl_turn_run.py MODEL KIND SETTINGS.

Every turn is answered, so a random model has three. Prints the log's entries and the words of an error as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from qarl.metrics.mismatch_limit import MismatchError
from qarl.trl import QaRLConfig, QaRLTrainer
from qarl.turns import conversation

ALWAYS = {
    "x-regex": r"^(?P<content>[\s\S]*?)(?:<\|im_end\|>)?$",
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string"},
        "tool_calls": {
            "const": [{"type": "function", "function": {"name": "again", "arguments": {"n": 3}}}]
        },
    },
}
"""A parser that reads a call of `again` in every turn."""


def again(n: int) -> str:
    """Answer.

    Args:
        n: how often
    """
    return "once more " * n


def answer(messages: list[dict[str, Any]], **_: Any) -> Any:
    turns = sum(message["role"] == "assistant" for message in messages)
    score = float(len(set(messages[-1]["content"])))
    return {"reply": f"turn {turns}" if turns < 3 else None, "reward": score}


def letters(completions: Any, **_: Any) -> list[float]:
    turns = [[m["content"] for m in c if m["role"] == "assistant"] for c in completions]
    return [float(len(set("".join(texts)))) for texts in turns]


def main(model: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    base = {
        "output_dir": f"{model}-runs",
        "report_to": "none",
        "use_cpu": True,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 400,
        "max_turn_length": 20,
        "quant_group_size": 32,
        "vllm_cpu_kvcache_space_gib": 0.25,
        "save_strategy": "no",
        "gradient_checkpointing": False,
    }
    if "loss_type" not in settings:
        base["band_scaling"] = "length"  # of TBPO
    lora = settings.pop("lora", None)
    arguments: dict[str, Any] = {"peft_config": LoraConfig(**lora)} if lora else {}
    if settings.pop("unmask", False):
        everything = property(lambda self: [True] * len(self.response_token_ids))
        conversation.Conversation.mask = everything  # type: ignore[method-assign, assignment]  # the planted mistake
    if kind == "tools":
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        tokenizer.response_schema = ALWAYS
        settings["max_tool_calling_iterations"] = 2
        arguments |= {"tools": [again], "processing_class": tokenizer, "reward_funcs": letters}
    else:
        arguments |= {"environment": answer, "reward_funcs": "environment"}
    questions = [[{"role": "user", "content": f"{i} and {i * i}"}] for i in range(40)]
    rows = [{"prompt": question, "ground_truth": ""} for question in questions]
    data = Dataset.from_list(rows)
    trainer = QaRLTrainer(
        model=model, args=QaRLConfig(**base | settings), train_dataset=data, **arguments
    )
    try:
        trainer.train()
    except MismatchError as error:
        return {"error": str(error), "history": []}
    sessions = trainer.rollouts.turns is not None and trainer.rollouts.turns.conversations.sessions
    return {"error": None, "history": trainer.state.log_history, "sessions": sessions}


if __name__ == "__main__":
    outcome = main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    print("OUTCOME", json.dumps(outcome), flush=True)
