"""A user's own agent loops (`rollout.agent.agent_loop_config_path`), one of them with a mistake.

They are not in the file of the tools: verl finds no tools in a file that was imported before it executes it."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from qarl.verl.agent_loop import AnyTokenizer


class OwnLoop(AnyTokenizer, ToolAgentLoop):
    """A user's own loop."""


class UnmaskedLoop(OwnLoop):
    """It says that the model sampled the tools' answers, too."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        output = await super().run(sampling_params, **row)
        output.response_mask = [1] * len(output.response_ids)
        return output
