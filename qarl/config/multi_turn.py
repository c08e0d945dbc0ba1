"""The section `multi_turn`: the limits of conversations (`rollout.environment`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qarl.config.types import Sane, Section, Unit


class MultiTurnConfig(Section):
    """Limits of conversations with rollout.environment.

    A conversation has data.max_response_length tokens after its prompt, those of the environment included, as in verl.
    verl has these keys under rollout.multi_turn, but for the last three."""

    max_assistant_turns: Annotated[int, Unit("turns"), Sane(2, 100)] = Field(default=8, ge=1)
    """Most turns of the model in a conversation. The environment also sees the last one, and may give it a reward."""

    max_tool_response_length: Annotated[int, Unit("characters")] = Field(default=256, ge=1)
    """Characters of a message of the environment that the model sees, as in verl. What is left out is marked."""

    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Where a longer message is cut."""

    max_turn_length: Annotated[int | None, Unit("tokens")] = Field(default=None, ge=1)
    """Most tokens of a turn of the model; null means what is left of data.max_response_length. The environment answers
    a turn that was cut, too."""

    timeout_s: Annotated[float | None, Unit("seconds"), Sane(0.01, 3600)] = Field(
        default=10.0, gt=0, le=86_400
    )
    """Time limit of a call of the environment. The model is told of a call that takes longer. null means no limit."""

    workers: Annotated[int, Unit("processes"), Sane(1, 64)] = Field(default=2, ge=1, le=1024)
    """Most processes that call the environment at the same time."""
