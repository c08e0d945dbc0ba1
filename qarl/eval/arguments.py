"""The arguments of `qarl eval`, and what the config of a run adds to them."""

from __future__ import annotations

import json
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from qarl.checkpoint.best_step import CheckpointStep
from qarl.checkpoint.export_folder import step_of
from qarl.checkpoint.storage import EXPORT, SUMMARY_FILE
from qarl.checkpoint.trl_folder import refuse_trl
from qarl.config import Config, load_config
from qarl.config.command_arguments import writes_json
from qarl.config.lora import FOLDER
from qarl.config.reward import RewardConfig
from qarl.config.schema import RolloutConfig
from qarl.config.types import Text, TokenId
from qarl.console import note
from qarl.errors import UserError

BF16 = "bf16"
TASK_LENGTHS = (4096, 2048)
"""Tokens of prompts and of responses for tasks of lm-evaluation-harness: MMLU-Pro has five worked examples, and asks
for 2048 tokens."""
FILE_LENGTHS = (1024, 2048)
"""Tokens of prompts and of responses for files, if neither arguments nor a run say otherwise."""
_OF_FILES = (
    "files",
    "reward",
    "environment",
    "n",
    "temperature",
    "keep_special_tokens",
    "apply_chat_template_kwargs",
    "stop",
    "stop_token_ids",
    "min_tokens",
)
_OF_TASKS = ("include_path", "num_fewshot", "apply_chat_template")
_ROLLOUT = RolloutConfig(n=2)
_ENDS = ("stop", "stop_token_ids", "min_tokens")
_Count = Annotated[int, Field(gt=0)]


def _parsed(text: Any) -> Any:
    """Return the value of a mapping that is written as on the command line of `qarl train`."""
    try:
        return yaml.safe_load(text) if isinstance(text, str) else text
    except yaml.YAMLError as error:
        raise ValueError("it is not a YAML mapping such as {enable_thinking: false}") from error


def _list(text: Any) -> Any:
    """Return the items of a list that is written as on the command line of `qarl train`; a text alone is one item."""
    value = text
    if isinstance(text, str) and text.startswith("["):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError('it is not a YAML list such as ["</answer>"]') from error
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True, config={"extra": "forbid"})
class EvalRequest:
    """The arguments of the command line; None is the default that the help names."""

    model: Path
    against: str | None = None
    step: CheckpointStep | None = None
    files: str | None = None
    reward: str | None = None
    environment: str | None = None
    plugins: str | None = None
    n: _Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_prompt_length: _Count | None = None
    max_response_length: _Count | None = None
    limit: _Count | None = None
    seed: int = 0
    output: Annotated[Path, writes_json("samples", "scores")] | None = None
    keep_special_tokens: bool = False
    apply_chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_parsed)] = None
    stop: Annotated[list[Text] | None, BeforeValidator(_list)] = None
    stop_token_ids: Annotated[list[TokenId] | None, BeforeValidator(_list)] = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    trust_remote_code: bool = False
    tasks: str | None = None
    include_path: Path | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    apply_chat_template: bool = False

    @property
    def file_names(self) -> list[str]:
        """The values of `files`, also if they are written as a list of the config."""
        return _names(self.files)

    @property
    def overrides(self) -> list[str]:
        """Arguments of `qarl train` for what the run's config names and has moved meanwhile."""
        changed = []
        if self.plugins is not None:
            changed.append(f"plugins={json.dumps(_names(self.plugins))}")
        if self.environment is not None:
            changed.append(f"rollout.environment={json.dumps(self.environment)}")
        return changed

    @property
    def task_names(self) -> list[str]:
        return self.tasks.split(",") if self.tasks else []


def _names(text: str | None) -> list[str]:
    """Return names that commas separate, also if they are written as a list of the config."""
    text = (text or "").strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return [name.strip() for name in text.split(",")] if text else []


@plain_dataclass(frozen=True)
class Settings:
    """What is scored, and how. `config`: of the run, if there is one. Lengths in tokens. `rollout`: the keys
    that end responses, from the request, the run or the defaults."""

    config: Config | None
    files: tuple[str, ...]
    reward: RewardConfig
    temperature: float
    max_prompt_length: int
    max_response_length: int
    rollout: RolloutConfig = _ROLLOUT


def settings_of(request: EvalRequest) -> Settings:
    """Return the request's values, and those of the run's config where it has none.

    Raise UserError if there is no such folder, no data file is named, or keys do not go together."""
    is_run = (request.model / "config.yaml").is_file()
    if not is_run and not (request.model / "config.json").is_file():
        _refuse_part_of_run(request.model)
        refuse_trl(
            request.model,
            str(request.model),
            "score what trainer.save_quantized(FOLDER) writes, or its BF16 weights: qarl eval {newest!s} "
            "files=test.parquet reward=NAME",
        )
        why = "it has neither config.yaml, as a run, nor config.json, as a model"
        if not request.model.is_dir():
            why = "it is a file" if request.model.exists() else "there is no such folder"
        raise UserError(
            f"{request.model} cannot be scored",
            why=why,
            fix="give runs/NAME, or the folder of an export",
        )
    if not is_run and (request.step is not None or request.against == BF16):
        what = "step=N and against=bf16 need the folder of a run, whose checkpoints they export"
        raise UserError(
            what,
            where=str(request.model),
            fix="give runs/NAME, or against=FOLDER with a BF16 model",
        )
    if not is_run and request.overrides:
        raise UserError(
            "plugins and environment replace those of a run's config",
            where=str(request.model),
            why="it is a model folder, which names neither",
            fix="give runs/NAME, or leave them out",
        )
    if is_run:
        note_unfinished(request.model)
    # What is scored is in checkpoint and export, so the adapter that the run began from need not be there any more.
    arguments = [f"config={request.model / 'config.yaml'}", "lora.path=null", *request.overrides]
    config = load_config(arguments) if is_run else None
    if config and request.apply_chat_template_kwargs is not None:
        variables = {"apply_chat_template_kwargs": request.apply_chat_template_kwargs}
        config = config.model_copy(update={"data": config.data.model_copy(update=variables)})
    given = {name: getattr(request, name) for name in _ENDS}
    ends = {name: value for name, value in given.items() if value is not None}
    rollout = (config.rollout if config else _ROLLOUT).model_copy(update=ends)
    if config:
        config = config.model_copy(update={"rollout": rollout})
    if config and config.lora.r and request.against == BF16:
        raise UserError(
            "against=bf16 is not possible for a run with adapters",
            where=str(request.model),
            why="it has no BF16 weights: its adapter was trained on the quantized base, and is not merged",
            fix=f"leave against out, or set against={config.model.path}, the base in BF16 without an adapter",
        )
    exported = request.model / EXPORT
    lost = exported.is_dir() and not (exported / FOLDER).is_dir()
    if config and config.lora.r and request.step is None and lost:
        raise UserError(
            "the export of the run has lost its adapter",
            where=str(exported / FOLDER),
            why="the base alone is another policy than the one that was trained",
            fix="restore the folder, or export a checkpoint with `qarl export`, if the run has one, and score that",
        )
    alien = _OF_FILES if request.tasks else _OF_TASKS
    if ignored := [name for name in alien if getattr(request, name) not in (None, False)]:
        fix = f"remove {ignored[0]}" if request.tasks else "add tasks=NAME,..."
        raise UserError(
            f"{ignored[0]} has no effect {'with' if request.tasks else 'without'} tasks", fix=fix
        )
    if request.tasks:
        lengths = (
            request.max_prompt_length or TASK_LENGTHS[0],
            request.max_response_length or TASK_LENGTHS[1],
        )
        return Settings(config, (), RewardConfig(), 0.0, *lengths)
    files = tuple(request.file_names) or (tuple(config.data.val_files) if config else ())
    if not files:
        _refuse_part_of_run(request.model)
        raise UserError(
            "no file with prompts was named", where=str(request.model), fix="add files=test.parquet"
        )
    lengths = lengths_of(request, config)
    _check_least(rollout.min_tokens, lengths[1])
    return Settings(
        config,
        files,
        _scoring(request, config),
        request.temperature
        if request.temperature is not None
        else config.rollout.val_temperature
        if config
        else 0.0,
        *lengths,
        rollout,
    )


def _refuse_part_of_run(folder: Path) -> None:
    """Raise UserError if `folder` is a checkpoint of a run, or the folder of its checkpoints."""
    from qarl.checkpoint.read_weights import refuse_part_of_run  # imports PyTorch

    refuse_part_of_run(folder, str(folder), "qarl eval ")


def check_files(request: EvalRequest, settings: Settings) -> None:
    """Raise UserError if a data file is not there, or `against` is no model folder. What is in the files is checked
    when they are read."""
    if request.against not in (None, BF16):
        _check_model(Path(request.against))
    for file in settings.files:
        if not Path(file).is_file():
            raise _missing(file, request)


def _check_least(min_tokens: int, limit: int) -> None:
    """Raise UserError if no response of at most `limit` tokens could end by itself, as for a run."""
    if min_tokens >= limit:
        raise UserError(
            f"min_tokens={min_tokens} leaves no response an end of its own",
            where="min_tokens, max_response_length",
            why=f"a response has at most max_response_length = {limit} tokens",
            fix=f"set min_tokens below {limit}, or raise max_response_length",
        )


def _check_model(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    why = "it has no config.json" if folder.is_dir() else "there is no such folder"
    fix = "give the folder of a model or of an export"
    if (folder / "config.yaml").is_file():
        why = "it is the folder of a run"
        fix = f"export a checkpoint of it with `qarl export run={folder} output=DIR`, and give DIR"
        if (folder / EXPORT / "config.json").is_file():
            fix = f"write against={folder / EXPORT}"
    raise UserError(f"against={folder} is no model folder", where="against", why=why, fix=fix)


def _missing(file: str, request: EvalRequest) -> UserError:
    """Return the error for a data file that is not there."""
    where, fix = "files", "correct the name"
    if not request.files:
        where = f"data.val_files of the run {request.model}"
        fix = "name the files, as files=A,B"
        if not Path(file).is_absolute():
            fix = f"repeat the command in the folder in which the run was started, where {file} is, or {fix}"
    looked = (
        "it is a folder" if Path(file).is_dir() else f"looked in {Path(file).absolute().parent}"
    )
    return UserError(f"no such data file: {file}", where=where, why=looked, fix=fix)


def _scoring(request: EvalRequest, config: Config | None) -> RewardConfig:
    """Return how responses are scored: by the request's function, those of the run, or math_verify."""
    usual = config.reward if config else RewardConfig(function="math_verify")
    keys: dict[str, Any] = {}
    if request.reward:
        keys = {"function": request.reward, "functions": []}
    if request.keep_special_tokens:
        keys["keep_special_tokens"] = True
    return usual.model_copy(update=keys)


def note_unfinished(run: Path) -> None:
    """Print a note if the run has failed or did not reach its last step, so that its model is not the one asked for."""
    try:
        summary = json.loads((run / SUMMARY_FILE).read_text(encoding="utf-8"))
        failed = summary["failed"]
        steps = summary["steps"]
        finished = summary["finished"]
    except (OSError, ValueError, LookupError, TypeError):
        step = step_of(run / EXPORT)
        of = "" if step is None else f"; its export is of step {step}"
        note(f"{run} has no summary, so the run is going on or was killed{of}")
        return
    if failed:
        note(f"{run} failed after step {steps}: {failed}")
    elif not finished:
        note(f"{run} was interrupted after step {steps}")
    if why := summary.get("not_exported"):
        note(f"{run} has no export of its last step: {why}")


def lengths_of(request: EvalRequest, config: Config | None) -> tuple[int, int]:
    """Return the largest numbers of tokens of a prompt and of a response: those of the request, else of the run, else
    `FILE_LENGTHS`, which are lowered in proportion if the model has fewer positions.

    Raise UserError if lengths that were given exceed the positions."""
    folders = [
        request.model,
        *([Path(request.against)] if request.against not in (None, BF16) else []),
    ]
    limits = [limit for folder in folders if (limit := positions_of(folder)) is not None]
    limit = min(limits, default=None)
    usual = (
        (config.data.max_prompt_length, config.data.max_response_length) if config else FILE_LENGTHS
    )
    given = (request.max_prompt_length, request.max_response_length)
    prompt = given[0] or usual[0]
    response = given[1] or usual[1]
    if limit is None or prompt + response <= limit:
        return prompt, response
    if config is None and given == (None, None):
        prompt = max(1, limit * FILE_LENGTHS[0] // sum(FILE_LENGTHS))
        return prompt, limit - prompt
    if config is None and None in given:
        prompt = given[0] or limit - response
        response = given[1] or limit - prompt
    if prompt < 1 or response < 1 or prompt + response > limit:
        total = (given[0] or usual[0]) + (given[1] or usual[1])
        raise UserError(
            f"max_prompt_length + max_response_length = {total} tokens, but the model has {limit} positions",
            where="max_prompt_length, max_response_length",
            fix=f"lower them to at most {limit} together",
        )
    return prompt, response


def positions_of(folder: Path) -> int | None:
    """Return `max_position_embeddings` of a model folder or of a run's export, or None if no config.json says it."""
    for file in (folder / EXPORT / "config.json", folder / "config.json"):
        if file.is_file():
            try:
                positions = json.loads(file.read_bytes())["max_position_embeddings"]
            except LookupError:
                return None
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"{file} cannot be read",
                    why=f"it is no JSON object: {error}",
                    fix="copy the model's folder again, or export the checkpoint again with `qarl export`",
                ) from error
            return positions if isinstance(positions, int) else None
    return None
