"""The section `reward` of a config."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from qarl.config.types import RewardName, Sane, Section, Unit


class WeightedFunction(Section):
    """One of several reward functions. `name`: of its metric; None: the function's own name."""

    function: RewardName
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")] | None = None

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name or self.function.rpartition(":")[2]


def _with_its_name(value: Any) -> Any:
    """Return the keys of an entry that is only the name of a function."""
    return {"function": value} if isinstance(value, str) else value


class RewardConfig(Section):
    """How a response is scored."""

    function: RewardName = "arithmetic"
    """`arithmetic`, `math_verify`, `reasoning_gym` (the task's own scorer, for files of `qarl data reasoning_gym`),
    `environment` (the sum of the rewards of rollout.environment), or your own function: `module:function` or
    `path/to/file.py:function`."""

    functions: list[Annotated[WeightedFunction, BeforeValidator(_with_its_name)]] = Field(
        default=[], json_schema_extra={"words": "list of {function, weight, name}, or of names"}
    )
    """Several functions instead of `function`: the reward is the sum of their scores times their weights (default 1).
    A name alone has these defaults. Each is logged as rewards/NAME/mean; name is by default the function's. A weight of
    0 only logs it."""

    timeout_s: Annotated[float | None, Unit("seconds"), Sane(0.01, 3600)] = Field(
        default=60.0, gt=0, le=86_400
    )
    """Time limit for scoring one response; exceeding it is an error. null means no limit."""

    keep_special_tokens: bool = False
    """Give the function the response with the tokenizer's special tokens, including the one that ends it. They are
    removed by default, so a function that looks for `<answer>` sees nothing if that is a special token."""

    check_ground_truths: bool = True
    """Before the run, score the ground truths of the first 64 rows as if they were answers. If fewer than half are
    right, it is an error for a built-in function, and a warning for your own."""

    overlong_buffer_len: Annotated[int | None, Unit("tokens")] = Field(default=None, ge=1)
    """Soft overlong punishment of DAPO: in training, a response that enters the last overlong_buffer_len tokens before
    data.max_response_length loses reward, in proportion. null means none. Needs backend=local."""

    overlong_penalty_factor: Annotated[float, Unit("reward"), Sane(0.01, 10)] = Field(
        default=1.0, gt=0
    )
    """How much reward a response of data.max_response_length tokens loses."""

    workers: Annotated[int, Unit("processes"), Sane(1, 64)] = Field(default=2, ge=1, le=1024)
    """Most processes that run the function at the same time. Each loads it once, with its model if it has one. Backend
    verl: in each of its reward workers, of which there are 8 in all on GPUs and 1 on a CPU."""

    @property
    def parts(self) -> tuple[WeightedFunction, ...]:
        """The functions whose scores are added: those of `functions`, or `function` alone."""
        return tuple(self.functions) or (WeightedFunction(function=self.function),)

    @property
    def names(self) -> tuple[str, ...]:
        """The functions as the config names them."""
        return tuple(part.function for part in self.parts)

    @property
    def key(self) -> str:
        """The key that names the functions, for errors."""
        return "reward.functions" if self.functions else "reward.function"

    @property
    def labels(self) -> tuple[str, ...]:
        """The names in metrics of the `functions`. `function` has no metric of its own besides the reward."""
        return tuple(part.label for part in self.functions)
