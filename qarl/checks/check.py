"""What a check is: the inputs that it reads, what it says, and how checks are made.

The inputs of a run are loaded when a check first needs them, and all checks share them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from qarl.align.applied_level import AppliedLevel, unconfirmed
from qarl.checks import layers, model_folder
from qarl.checks.generation import stop_token_ids
from qarl.checks.inputs_record import Record, record_of
from qarl.checks.machine import Machine, this_machine
from qarl.checks.model import applied_level, check_served
from qarl.checks.model_size import ModelSize
from qarl.config import Config
from qarl.data.prompts import (
    PromptDataset,
    PromptSampler,
    load_prompts,
    load_val_prompts,
    prompt_options,
)
from qarl.data.reward_workers import Reward
from qarl.data.scoring import reward_of
from qarl.errors import UserError
from qarl.kernels.base import ExpertsShape, Kernel
from qarl.kernels.registry import Choice, choose_experts_kernel, choose_linear_kernel
from qarl.lora.start import weights_of
from qarl.quant.convert import linear_shapes
from qarl.rollout.turns import Conversations, conversations_of
from qarl.schemes import get_scheme


class NotCheckedError(Exception):
    """A check could not be made. The message says why, and `fix` how to make it possible. No reason to refuse a run."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


class RunInputs:
    """The inputs of a run on `machine` (None: this one). A property raises `UserError` if its input is unusable.

    `plan`: the inputs are only examined, so QaRL's copy of a public model's config is enough if the Hub is out of
    reach. `no_model` is then the error that loading the real one raised. `reported`: notes and warnings of the checks.
    """

    def __init__(
        self, config: Config, machine: Machine | None = None, *, plan: bool = False
    ) -> None:
        self.config = config
        self.plan = plan
        self.machine = machine or this_machine(config.backend)
        self.scheme = get_scheme(config.quant.scheme, group_size=config.quant.group_size)
        self.no_model: UserError | None = None
        self.reported: list[Finding] = []

    @cached_property
    def hf_config(self) -> Any:
        model = self.config.model
        if not self.plan:
            return model_folder.load_hf_config(model.path, model.trust_remote_code)
        hf_config, self.no_model = model_folder.hf_config_or_carried(
            model.path, model.trust_remote_code
        )
        return hf_config

    @cached_property
    def tokenizer(self) -> Any:
        path = self.config.model.path
        hf_config = self.hf_config
        if self.no_model is not None:
            raise NotCheckedError(self.no_model.what, self.no_model.fix or "")
        if not self.machine.here and Path(path).is_dir() and not model_folder.has_tokenizer(path):
            raise NotCheckedError(
                "the folder has no tokenizer; the machine of the run needs one", "copy it there"
            )
        return model_folder.load_tokenizer(
            path, self.config.model.trust_remote_code, hf_config=hf_config
        )[0]

    @cached_property
    def model(self) -> nn.Module:
        """The trainer's model on the meta device, if engine and trainer build the same one."""
        return check_served(self.hf_config, trust_remote_code=self.config.model.trust_remote_code)

    @cached_property
    def size(self) -> ModelSize:
        try:
            return ModelSize.from_config(self.hf_config)
        except KeyError as error:
            raise NotCheckedError(
                f"config.json has no key {error}", "estimate the memory by hand"
            ) from error

    @cached_property
    def linears(self) -> layers.Shapes:
        """[N, K] of every linear of the trainer's model, including each expert's."""
        return linear_shapes(self.model)

    @cached_property
    def quantized(self) -> layers.Shapes:
        """[N, K] of the linears that the run quantizes."""
        if not self.scheme.quantized:
            return {}
        return layers.select_shapes(self.linears, self.scheme, self.config.quant.ignore)

    @cached_property
    def kernels(self) -> dict[tuple[int, int], Choice | UserError]:
        """The trainer's kernel for each [N, K] of a dense layer, or the error if no kernel supports it."""
        import torch

        choices: dict[tuple[int, int], Choice | UserError] = {}
        scheme = self.scheme
        device = torch.device(self.machine.device)
        kernels = self.config.quant.kernels
        dense = (shape for name, shape in self.quantized.items() if not layers.of_expert(name))
        for shape in dict.fromkeys(dense) if self.config.quant.align.low_bit else ():
            try:
                choices[shape] = choose_linear_kernel(scheme, device, shape, kernels=kernels)
            except UserError as error:
                choices[shape] = error
        return choices

    @property
    def linear_kernels(self) -> dict[tuple[int, int], type[Kernel]]:
        """The trainer's kernel for each [N, K] of a dense layer that has one."""
        return {
            shape: choice.kernel
            for shape, choice in self.kernels.items()
            if isinstance(choice, Choice)
        }

    @cached_property
    def experts_kernel(self) -> Choice | None:
        """The trainer's kernel for experts, or None if none are quantized. Raise UserError if none supports them."""
        import torch

        if not self.config.quant.align.low_bit or not any(map(layers.of_expert, self.quantized)):
            return None
        size = self.size
        scheme = self.scheme
        shape = ExpertsShape(
            size.experts, size.experts_per_token, size.hidden, size.moe_intermediate
        )
        device = torch.device(self.machine.device)
        return choose_experts_kernel(scheme, device, shape, kernels=self.config.quant.kernels)

    @property
    def trainer_kernels(self) -> dict[tuple[int, int], type[Kernel]]:
        """The trainer's kernel for each [N, K], also of experts."""
        if self.experts_kernel is None:
            return self.linear_kernels
        experts = {shape for name, shape in self.quantized.items() if layers.of_expert(name)}
        return dict.fromkeys(experts, self.experts_kernel.kernel) | self.linear_kernels

    @cached_property
    def level(self) -> AppliedLevel:
        """The alignment level that applies, and the reasons why no higher one does. Kernels are asked only by the
        doctor; the trainer asks them when it builds the model."""
        self.model  # noqa: B018  a refused model has no level
        kernels = set(self.linear_kernels.values()) if self.plan else set()
        machine = self.machine
        if self.plan and machine.here and not machine.on_cpu and self.experts_kernel is not None:
            kernels.add(self.experts_kernel.kernel)
        return applied_level(
            self.config, self.hf_config, machine.device, kernels, machine.capability
        )

    @cached_property
    def unconfirmed(self) -> str | None:
        """Why the applied level promises no mismatch, or None."""
        engine = {
            "eager": self.config.rollout.enforce_eager is True,
            "adapters": bool(self.config.lora.r),
        }
        return unconfirmed(self.level.level, self.machine.device, self.hf_config, **engine)

    @cached_property
    def weight_files(self) -> list[Path]:
        return model_folder.weight_files(self.config.model.path)

    @cached_property
    def reward_fn(self) -> Reward:
        reward = reward_of(self.config.reward)
        reward.load()
        return reward

    @cached_property
    def conversations(self) -> Conversations | None:
        """What holds conversations, if there is an environment, which is loaded."""
        config = self.config
        if config.rollout.environment is None:
            return None
        stops = stop_token_ids(config.model.path, self.tokenizer, self.hf_config)
        return conversations_of(config, self.tokenizer, stops)

    @cached_property
    def train_prompts(self) -> PromptDataset:
        self._need_files(self.config.data.train_files)
        return load_prompts(
            self.config.data.train_files, **prompt_options(self.config, self.tokenizer)
        )

    @cached_property
    def val_prompts(self) -> PromptDataset | list[Any]:
        self._need_files(self.config.data.val_files)
        return load_val_prompts(self.config, self.tokenizer)

    @cached_property
    def sampler(self) -> PromptSampler:
        config = self.config
        size = config.data.train_batch_size
        return PromptSampler(
            len(self.train_prompts), size, seed=config.seed, shuffle=config.data.shuffle
        )

    @cached_property
    def record(self) -> Record:
        """What the run reads, as a checkpoint records it."""
        return record_of(
            self.config,
            hf_config=self.hf_config,
            tokenizer=self.tokenizer,
            train=self.train_prompts,
            val=self.val_prompts,
            weight_files=[*self.weight_files, *self._start_files],
        )

    @property
    def _start_files(self) -> list[Path]:
        """The adapter that the run begins from, which is a part of the reference of a KL term."""
        path = self.config.lora.path
        return [weights_of(path)] if path and self.weight_files else []

    @property
    def read_record(self) -> Callable[[], Record]:
        """A function that returns `record`, for a check that needs it only if there is a checkpoint."""
        return lambda: self.record

    def _need_files(self, files: Sequence[str]) -> None:
        if self.machine.here:
            return
        if missing := [file for file in files if not Path(file).is_file()]:
            raise NotCheckedError(
                f"not on this machine: {', '.join(missing)}", "run the doctor where they are"
            )


Status = Literal["ok", "note", "warning", "error"]
"""`error`: the run would fail. `warning`: the run would start, but probably give bad results. `note`: a useful fact, or
a check that was not made."""


@dataclass(frozen=True)
class Finding:
    """What a check says. `what`, `where`, `why` and `fix` are as in `UserError`. `lines`: details."""

    status: Status
    what: str
    where: str | None = None
    why: str | None = None
    fix: str | None = None
    lines: tuple[str, ...] = ()
    topic: str = ""

    @classmethod
    def of(cls, error: UserError, status: Status = "error") -> Finding:
        return cls(status, error.what, error.where, error.why, error.fix)

    @property
    def error(self) -> UserError:
        return UserError(self.what, where=self.where, why=self.why, fix=self.fix)


Findings = Iterator[Finding]
ok, note, warning, error = (
    partial(Finding, status) for status in ("ok", "note", "warning", "error")
)


class Check(NamedTuple):
    """One check. `name` says what is true if it passes. `make` yields findings, or raises `UserError` if the run would
    fail; without findings all is well. Its parameters are the `RunInputs` that the check needs.

    `here`: whether it is about the current state of this machine. `backend`, `device`: the only one that it is about.
    """

    topic: str
    name: str
    make: Callable[..., object]
    here: bool = False
    backend: str = ""
    device: str = ""

    def findings(self, run: RunInputs) -> Findings:
        findings = self.make(
            **{need: getattr(run, need) for need in inspect.signature(self.make).parameters}
        )
        return findings if isinstance(findings, Iterator) else iter(())

    def applies(self, run: RunInputs) -> bool:
        is_about = self.backend in ("", run.config.backend) and self.device in (
            "",
            run.machine.device,
        )
        return is_about and (run.machine.here or not self.here)


def examine(run: RunInputs, checks: Sequence[Check]) -> Findings:
    """Make all checks that apply, and yield their findings. An input that cannot be loaded is one error."""
    reported: set[str] = set()
    for check in checks:
        if not check.applies(run):
            continue
        not_checked = f"not checked: {check.name}"
        try:
            findings = list(check.findings(run)) or [ok(check.name)]
        except NotCheckedError as unmade:
            findings = [note(not_checked, why=str(unmade), fix=unmade.fix)]
        except UserError as refusal:
            findings = [Finding.of(refusal)]
            if str(refusal) in reported:
                why = f"an input that it needs could not be loaded (see above: {refusal.what})"
                findings = [note(not_checked, why=why, fix="correct that first, then check again")]
            reported.add(str(refusal))
        yield from (replace(finding, topic=check.topic) for finding in findings)
