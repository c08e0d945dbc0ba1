"""A task of one's own, defined by a Python file of some twenty lines: its tiny model, its data and its config.

`qarl warm-start` calls `make_own`. The file has four functions, and may have a fifth:

    draw(rng)          one problem, hashable, from a random.Random
    prompt(problem)    the text that the model is asked
    answer(problem)    the text that the warm start teaches
    reward(data_source, solution_str, ground_truth, extra_info=None)    as everywhere in QaRL (`qarl.data.rewards`)
    truth(problem)     what the reward gets as `ground_truth`; by default the answer

A task of several turns has a function `environment` (docs/do/turns.md). Then `answer` returns a list, the model's
turns, and the environment is asked what it says between them. It needs no `reward` if the environment gives one.

The config is that of `addition_chain.yaml`, whose bands fit answers of any length, with the task's own lengths.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import yaml
from pydantic import Field
from pydantic.dataclasses import dataclass

from qarl.config.read_config import dump, find_config
from qarl.config.schema import NAME
from qarl.console import say
from qarl.data.rewards import TURN_SCORES, load_module
from qarl.data.rewards import environment as environment_reward
from qarl.demo.tasks import Task
from qarl.demo.tiny_model import POSITIONS, RECORD, Recipe, make_missing, make_tokenizer
from qarl.demo.worked import worked
from qarl.errors import UserError

FUNCTIONS = ("draw", "prompt", "answer", "reward")
TEMPLATE = "addition_chain.yaml"
_NOT_OF_RECIPE = ("file", "overwrite")
_Count = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, config={"extra": "forbid"})
class WarmStart:
    """The arguments of the command line. `file`: the task's. `steps`: most steps of the warm start. `target`: greedy
    accuracy at which it stops. `train_size`, `test_size`: rows of the data files. `experts`: of a mixture; 0: dense.
    `overwrite`: replace model and data that were made with other arguments."""

    file: Path
    steps: _Count = 600
    target: Annotated[float, Field(gt=0, le=1)] = 0.3
    train_size: _Count = 4000
    test_size: _Count = 512
    seed: int = 0
    experts: Annotated[int, Field(ge=0)] = 0
    overwrite: bool = False


def make_own(request: WarmStart) -> Path:
    """Make model, data and config in the working folder. Return the config's path.

    A config that exists is left as it is. Raise UserError if the file is not a task, or a folder has other files, or
    was made with other arguments and `overwrite` is false."""
    task = load_task(request)
    prompt_length, response_length = lengths(task, request.seed)
    recipe = Recipe(
        task,
        Path("models") / f"tiny-{task.name}",
        Path("data") / task.name,
        positions=max(POSITIONS, prompt_length + response_length),
        source=hashlib.sha256(request.file.read_bytes()).hexdigest(),
        **{key: value for key, value in asdict(request).items() if key not in _NOT_OF_RECIPE},
    )
    make_missing(recipe, overwrite=request.overwrite, asks="overwrite=true")
    warn_if_far_below(recipe)
    config = Path(f"{task.name}.yaml")
    if not config.exists():
        config.write_text(
            dump(run_values(request.file, recipe, prompt_length, response_length)), encoding="utf-8"
        )
    return config


def warn_if_far_below(recipe: Recipe) -> None:
    """Say on stderr if the model answers less than half as often right as it should.

    GRPO learns from groups with right and wrong answers, and a model that is never right has none."""
    record = json.loads((recipe.output / RECORD).read_text(encoding="utf-8"))
    accuracy = record["greedy_accuracy"]
    if accuracy >= recipe.target / 2:
        return
    say(
        f"warning: the warm start ended at {accuracy:.1%} right answers, far below its target of {recipe.target:.0%}, "
        f"after {record['steps']} steps; training may have too few right answers to learn from. "
        f"Raise steps={recipe.steps}, or make the problems easier"
    )


def load_task(request: WarmStart) -> Task:
    """Return the task that the file defines, after one problem was tried. Raise UserError if something is missing."""
    if request.file.suffix != ".py" or request.file.is_dir():
        what = f"{request.file} is {'a folder' if request.file.is_dir() else 'no Python file'}"
        fix = "give the task's file, such as my_task.py; docs/learn/own_task.md has an example"
        raise UserError(what, where="the task's file", fix=fix)
    if not re.fullmatch(NAME, request.file.stem):
        why = "the task has the name of its file, and so have its model, data, config and run"
        fix = "rename the file; letters, digits, '.', '_' and '-' are allowed"
        raise UserError(
            f"{request.file.stem!r} cannot name a run", where=str(request.file), why=why, fix=fix
        )
    module = load_module(str(request.file), where="the task's file")
    environment = getattr(module, "environment", None)
    needed = [name for name in FUNCTIONS if name != "reward" or environment is None]
    if missing := [name for name in needed if not callable(getattr(module, name, None))]:
        fix = f"define {', '.join(FUNCTIONS)}; docs/learn/own_task.md has an example"
        raise UserError(f"the task has no function {missing[0]}", where=str(request.file), fix=fix)
    if environment is not None:
        return of_turns(module, request)
    truth = getattr(module, "truth", module.answer)
    functions = (module.draw, module.prompt, module.answer, truth, module.reward)
    task = Task(request.file.stem, *functions, request.target, request.steps)
    try:
        problem = module.draw(random.Random(request.seed))
        hash(problem)
        texts = module.prompt(problem), module.answer(problem)
    except Exception as error:  # the user's code runs and may raise anything
        why = f"{type(error).__name__}: {error}"
        fix = "let draw return a value that can be hashed, and prompt and answer take it"
        raise UserError(
            "the task fails on its first problem", where=str(request.file), why=why, fix=fix
        ) from error
    if not all(isinstance(text, str) and text for text in texts):
        fix = "let prompt and answer return text that is not empty"
        raise UserError(
            "prompt or answer is no text", where=str(request.file), why=f"{texts!r:.200}", fix=fix
        )
    try:
        responses = (texts[1], "", "\N{REPLACEMENT CHARACTER}?")  # a model may write anything
        scores = []
        for response in responses:
            reward = module.reward(task.name, response, truth(problem), {})
            scores.append(float(reward))
        score = scores[0]
    except Exception as error:  # the user's code runs and may raise anything
        why = f"{type(error).__name__}: {error}"
        fix = "let reward also score an empty or a garbled response"
        raise UserError(
            "the task fails on its first problem", where=str(request.file), why=why, fix=fix
        ) from error
    if score <= 0:
        why = f"reward gives {score} for {texts[1]!r:.100}, and the ground truth is {truth(problem)!r:.100}"
        fix = "let the reward be positive for what `answer` returns, or define truth(problem)"
        raise UserError(
            "the task's own answer earns nothing", where=str(request.file), why=why, fix=fix
        )
    return task


def of_turns(module: ModuleType, request: WarmStart) -> Task:
    """Return the task of several turns that a file defines, after one problem was tried. Raise UserError if it fails or
    earns nothing."""
    truth = getattr(module, "truth", None)
    reward = getattr(module, "reward", environment_reward)
    task = Task(
        request.file.stem,
        module.draw,
        module.prompt,
        lambda problem: module.answer(problem)[-1],
        truth or (lambda problem: module.answer(problem)[-1]),
        reward,
        request.target,
        request.steps,
        environment=module.environment,
        worked_turns=module.answer,
    )
    try:
        problem = module.draw(random.Random(request.seed))
        hash(problem)
        turns = module.answer(problem)
        if isinstance(turns, str) or not all(isinstance(turn, str) and turn for turn in turns):
            raise TypeError(f"answer returned {turns!r:.200}, and not a list of texts")
        (conversation,) = worked(make_tokenizer(), task, [problem])
        text = "\n".join(str(message["content"]) for message in conversation.messages)
        extra = {TURN_SCORES: conversation.rewards, "messages": conversation.messages}
        score = float(reward(task.name, text, task.answer(problem), extra))
    except Exception as error:  # the user's code runs and may raise anything
        why = f"{type(error).__name__}: {error}"
        fix = "let answer return the list of the model's turns, and environment reply to each; see docs/do/turns.md"
        raise UserError(
            "the task fails on its first problem", where=str(request.file), why=why, fix=fix
        ) from error
    if score <= 0:
        raise UserError(
            "the task's own answer earns nothing",
            where=str(request.file),
            why=f"the reward is {score} for the turns {turns!r:.100}",
            fix="let the environment return a positive reward for what `answer` does, or define reward",
        )
    return task


def lengths(task: Task, seed: int) -> tuple[int, int]:
    """Return limits for prompt and response in tokens: a quarter above the longest of some hundred, by 32."""
    rng = random.Random(f"lengths-{seed}")
    problems = [task.draw_one(rng) for _ in range(500)]
    longest = [max(len(task.prompt_text(problem).encode()) for problem in problems) + 3]
    if task.environment is None:
        longest.append(max(len(task.response_text(problem).encode()) for problem in problems) + 3)
    else:
        conversations = worked(make_tokenizer(), task, problems)
        longest.append(max(len(each.response_token_ids) for each in conversations))
    prompt, response = (-(-length * 5 // 4 // 32) * 32 for length in longest)
    return prompt, response


def run_values(
    file: Path, recipe: Recipe, prompt_length: int, response_length: int
) -> dict[str, Any]:
    """Return the values of the config."""
    template, _ = find_config(TEMPLATE)
    assert template is not None
    values: dict[str, Any] = yaml.safe_load(template.read_text(encoding="utf-8"))
    values["name"] = recipe.task.name
    values["model"]["path"] = str(recipe.output)
    values["data"] |= {
        "train_files": [str(recipe.data / "train.parquet")],
        "val_files": [str(recipe.data / "test.parquet")],
        "max_prompt_length": prompt_length,
        "max_response_length": response_length,
    }
    values["data"]["train_batch_size"] = min(values["data"]["train_batch_size"], recipe.train_size)
    task = recipe.task
    values["reward"]["function"] = f"{file}:reward"
    if task.environment is not None:
        if task.reward is environment_reward:
            values["reward"]["function"] = "environment"
        values["rollout"]["environment"] = f"{file}:environment"
        rng = random.Random(f"turns-{recipe.seed}")
        turns = max(len(task.turns(task.draw_one(rng))) for _ in range(500))
        values["multi_turn"] = {"max_assistant_turns": turns + 2}
    values["optim"]["lr"] = 2e-4  # YAML 1.1 reads the template's number as text
    values["trainer"] |= {"total_training_steps": 80, "test_freq": 20, "save_freq": 80}
    return values
