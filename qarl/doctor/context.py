"""The data that the doctor's checks share: the config, the target machine, and files and objects of the run.

Files and objects are called parts. Each part is loaded at most once, by the topic that it belongs to, which calls
`load` and reports an error. Other checks call `get`. If loading failed, they are reported as not made. So one fault
gives one error, even if many checks need the part.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from qarl.align.model import resolve_level, unconfirmed
from qarl.checks import layers, model_folder
from qarl.checks.model_size import ModelSize
from qarl.config import Config
from qarl.data import PromptDataset, run_prompts
from qarl.data.rewards import RewardFn, get_reward_fn
from qarl.doctor.target import Target
from qarl.errors import UserError
from qarl.kernels.registry import Choice
from qarl.quant.convert import linear_shapes
from qarl.quant.scheme import Scheme, get_scheme

Value = TypeVar("Value")


class NotCheckedError(Exception):
    """A check could not be made. The message says why, and `fix` how to make it possible."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


class Part(Generic[Value]):
    """A value that is loaded at most once. The value or the error is stored."""

    def __init__(self, what: str, load: Callable[[], Value]) -> None:
        self._what, self._load = what, load
        self._result: Value | UserError | NotCheckedError | None = None

    def load(self) -> Value:
        """Return the value, or raise the error that prevented loading it."""
        if self._result is None:
            try:
                self._result = self._load()
            except (UserError, NotCheckedError) as error:
                self._result = error
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def get(self) -> Value:
        """Return the value. Raise NotCheckedError if it cannot be loaded."""
        try:
            return self.load()
        except UserError as error:
            fix = "correct that first, then run the doctor again"
            raise NotCheckedError(f"it needs {self._what}, which could not be loaded (see above)", fix) from error


@dataclass
class Context:
    """The shared data. `threads_given`: the user's OMP_NUM_THREADS, before the doctor changed it."""

    config: Config
    target: Target
    threads_given: str | None = field(default_factory=lambda: os.environ.get("OMP_NUM_THREADS"))
    no_model: UserError | None = None
    """The error that loading the model's config raised, if the doctor uses QaRL's copy of that config instead."""

    @cached_property
    def scheme(self) -> Scheme:
        return get_scheme(self.config.quant.scheme, group_size=self.config.quant.group_size)

    @cached_property
    def ignore(self) -> tuple[str, ...]:
        return tuple(self.config.quant.ignore)

    @cached_property
    def is_folder(self) -> bool:
        """Whether the model is a local folder; otherwise it is a name on the Hub."""
        return Path(self.config.model.path).is_dir()

    @cached_property
    def hf_config(self) -> Part[Any]:
        def load() -> Any:
            model = self.config.model
            hf_config, self.no_model = model_folder.hf_config_or_carried(model.path, model.trust_remote_code)
            return hf_config

        return Part("the model's config", load)

    @cached_property
    def size(self) -> Part[ModelSize]:
        def read() -> ModelSize:
            hf_config = self.hf_config.get()
            try:
                return ModelSize.from_config(hf_config)
            except KeyError as error:
                why = f"config.json of this {hf_config.model_type} model has no key {error}"
                raise NotCheckedError(why, "estimate sizes and memory by hand for this architecture") from error

        return Part("the model's sizes", read)

    @cached_property
    def tokenizer(self) -> Part[Any]:
        def load() -> Any:
            self.hf_config.get()
            if self.no_model is not None:
                raise NotCheckedError(self.no_model.what, self.no_model.fix or "")
            return model_folder.load_tokenizer(self.config.model.path, self.config.model.trust_remote_code)[0]

        return Part("the tokenizer", load)

    @cached_property
    def model(self) -> Part[nn.Module]:
        """The trainer's model on the meta device, without storage."""
        trust = self.config.model.trust_remote_code
        return Part("the model's layers", lambda: layers.meta_model(self.hf_config.get(), trust_remote_code=trust))

    @cached_property
    def linears(self) -> Part[layers.Shapes]:
        """[N, K] of every linear of the trainer's model, including each expert's."""
        return Part("the model's layers", lambda: linear_shapes(self.model.get()))

    @cached_property
    def quantized(self) -> Part[layers.Shapes]:
        """[N, K] of the linears that the run quantizes."""
        return Part("layers to quantize", lambda: layers.select_shapes(self.linears.get(), self.scheme, self.ignore))

    @cached_property
    def choices(self) -> dict[tuple[int, int], Choice | UserError]:
        """The trainer's kernel for each shape, or the error if no kernel supports it. The topic "kernels" fills it."""
        return {}

    @property
    def kernel_names(self) -> dict[tuple[int, int], str]:
        return {shape: c.kernel.name for shape, c in self.choices.items() if isinstance(c, Choice)}

    @cached_property
    def reward_fn(self) -> Part[RewardFn]:
        return Part("the reward function", lambda: get_reward_fn(self.config.reward.function))

    def align_level(self) -> tuple[str, tuple[str, ...]]:
        """Return the alignment level that applies on the target, and the reasons why no higher level does."""
        capability = self.target.capability
        return resolve_level(
            self.hf_config.get(),
            self.config.quant.align,
            device_type=self.target.device,
            kernels=set(self.kernel_names.values()),
            workers=self.config.rollout.tensor_model_parallel_size,
            capability=None if capability is None else divmod(capability, 10),
        )

    def unconfirmed(self, level: str) -> str | None:
        """Return why an applied level promises no mismatch on the target, or None."""
        eager = self.config.rollout.enforce_eager is True
        return unconfirmed(level, self.target.device, self.hf_config.get(), eager=eager)

    @cached_property
    def train_prompts(self) -> Part[PromptDataset]:
        return Part("the training prompts", lambda: run_prompts.load_train_prompts(self.config, self.tokenizer.get()))

    @cached_property
    def val_prompts(self) -> Part[PromptDataset | list[Any]]:
        return Part("the evaluation prompts", lambda: run_prompts.load_val_prompts(self.config, self.tokenizer.get()))
