"""The tokens that a chat template puts between two turns: the end of one, an environment's messages, the next's start.

Of Qwen's template, for an answer 42 of a tool, these are

    <|im_end|>\\n<|im_start|>user\\n<tool_response>\\n42\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n

without the first token if the model sampled it. The template renders the messages after a stand-in for the turn, and
what follows the stand-in is the frame. So nothing before it matters, which templates may render otherwise once the
conversation goes on: Qwen3's drops the thinking of earlier turns, and others insert a date or a system message. TRL
(`_get_tool_suffix_ids`) and verl (`render_delta_token_id`) take the difference of two renderings, so TRL refuses
templates whose first is no prefix of the second, and verl has a class for each family that adds the newline after
<|im_end|>. Both come out of the rendering here.

The frame is encoded by itself. A pair that spans a turn's last token and the frame's first is thus never merged, which
is what keeps the sampled ids.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qarl.errors import UserError, shortened
from qarl.turns.conversation import Message

STAND_IN = "stands-in-for-a-turn-7f3a"
"""The text of a turn in a rendering. No template changes it: it has no white space, markup or capital letter."""
_ASKED = {"role": "user", "content": "?"}


class ChatFrame:
    """The frames of a tokenizer's chat template. `stop_token_ids`: those with which a model ends a turn. `variables`:
    those of the template, by name. `also`: other ids at which the engine stops (`rollout.stop_token_ids`), such as the
    one of </tool_call>: the template's end of turn still follows them, unless it is that token."""

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Collection[int],
        variables: Mapping[str, Any] | None = None,
        also: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._stops = frozenset({*stop_token_ids, *also})
        self._end = self._end_of_turn()
        self._stops = frozenset({*stop_token_ids, *(set(also) & set(self._end))})

    def token_ids(self, messages: Sequence[Message], *, after: int | None) -> list[int]:
        """Return the tokens between a turn and the next, with the environment's `messages` and the start of the next.

        `after`: the turn's last token. If it is a stop token, the model has ended its turn itself, and the frame begins
        behind the template's end of turn. Otherwise the turn was cut, and the frame ends it.

        Raises:
            UserError: the chat template refuses the messages, or does not render a turn's text as it is.
        """
        ids = self._encoded(self._behind(messages))
        if after in self._stops and ids[: len(self._end)] == self._end:
            return ids[len(self._end) :]
        return ids

    def _end_of_turn(self) -> list[int]:
        """Return what the template writes behind a turn, up to its first stop token. It is empty without one."""
        try:
            ids = self._encoded(self._text([_ASKED, _turn()], start=False).split(STAND_IN)[-1])
        except Exception:  # templates raise their own errors; `token_ids` reports them
            return []
        stops = [place for place, token in enumerate(ids) if token in self._stops]
        return ids[: stops[0] + 1] if stops else []

    def _behind(self, messages: Sequence[Message]) -> str:
        """Return what the template renders behind a turn that `messages` follow."""
        try:
            text = self._text([_ASKED, _turn(), *messages], start=True)
        except Exception as error:  # templates raise their own errors
            if any(message["role"] == "tool" for message in messages):
                return self._behind_calls(messages, error)
            raise self._refused(messages, error) from error
        _, found, behind = text.partition(STAND_IN)
        if not found:
            raise UserError(
                "the chat template does not render the text of an assistant's message",
                where=self._where,
                why="so QaRL cannot tell what it writes between two turns",
                fix="put a chat template for several turns into the model's folder",
            )
        return behind

    def _behind_calls(self, messages: Sequence[Message], error: Exception) -> str:
        """Do the same for a template that refuses the role `tool` behind a message without calls: render a message with
        calls, and take the difference."""
        calls = [
            {"type": "function", "id": _call_id(message, number), "function": _called(message)}
            for number, message in enumerate(messages)
            if message["role"] == "tool"
        ]
        turn = _turn() | {"tool_calls": calls}
        try:
            before = self._text([_ASKED, turn], start=False)
            after = self._text([_ASKED, turn, *messages], start=True)
        except Exception:  # the first error says more
            raise self._refused(messages, error) from error
        if not after.startswith(before):
            raise self._refused(messages, error) from error
        end = self._text([_ASKED, _turn()], start=False).split(STAND_IN)[-1]
        return end + after[len(before) :]

    def _refused(self, messages: Sequence[Message], error: Exception) -> UserError:
        roles = ", ".join(str(message["role"]) for message in messages)
        return UserError(
            f"the chat template refuses messages after a turn of the model (roles: {roles})",
            where=self._where,
            why=f"{type(error).__name__}: {error}",
            fix="let the environment return roles that the template has, such as user; or put another "
            "chat_template.jinja into the model's folder",
        )

    @property
    def _where(self) -> str:
        return str(getattr(self._tokenizer, "name_or_path", "")) or "chat template"

    def _text(self, messages: Sequence[Message], *, start: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=start, tokenize=False, **self._variables
        )
        if not isinstance(text, str):
            raise TypeError(f"it rendered {shortened(text)}")
        return text

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _turn() -> Message:
    return {"role": "assistant", "content": STAND_IN}


def _called(message: Message) -> dict[str, Any]:
    return {"name": message.get("name", "tool"), "arguments": {}}


def _call_id(message: Message, number: int) -> str:
    """Return the id of a call. Mistral's template takes nine letters or digits."""
    return str(message.get("tool_call_id") or f"call{number:05d}")
