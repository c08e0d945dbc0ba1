"""A tool, and a parser that takes every turn for a call of it, so that a model that knows no tools has several turns.

verl executes this file (`multi_turn.function_tool_path`), and so registers both."""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool


def count_letters(text: str) -> str:
    """Count.

    Args:
        text: what the model has said
    """
    return f"={len(text)}"


if count_letters.__name__ not in FUNCTION_TOOL_REGISTRY:  # else imported, and executed by verl, too
    function_tool(count_letters)


@ToolParser.register("every_turn")
class EveryTurn(ToolParser):
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        return text, [FunctionCall(name="count_letters", arguments=json.dumps({"text": text}))]
