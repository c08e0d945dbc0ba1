"""Tasks of lm-evaluation-harness (package lm_eval), such as ARC-Challenge, for `qarl eval tasks=...`.

The harness has the tasks, their prompts and metrics. Its model is vLLM on the folder of the export, with the arguments
of QaRL's engine; unlike that engine it reads the weights from disk. Each document's value of a metric becomes a row of
the table, so that intervals and differences are those of `qarl.metrics.estimates`, not the harness's standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from qarl.config.errors import nearest
from qarl.config.lora import FOLDER
from qarl.console import say
from qarl.errors import UserError
from qarl.eval.arguments import EvalRequest
from qarl.process import answer_for_vllm, configure_vllm_process
from qarl.quant.meta_model import default_dtype_kept
from qarl.rollout.adapter_spec import servable
from qarl.rollout.chosen_kernel import own_kernels
from qarl.rollout.engine_config import (
    EngineConfig,
    before_start,
    llm_arguments,
)
from qarl.rollout.kernel_request import kernel_request
from qarl.vllm_versions import release_engine_memory

Results = Mapping[str, Any]
"""What the harness returns."""


def find_tasks(request: EvalRequest) -> Any:
    """Return the harness's index of tasks. Raise UserError if it is not installed, has no such task or no data."""
    where = f"tasks={request.tasks}"
    if find_spec("lm_eval") is None:
        raise UserError(
            "lm-evaluation-harness is not installed",
            where=where,
            fix='run pip install "qarl[lm-eval]"',
        )
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=request.include_path and str(request.include_path))
    for name in request.task_names:
        if name not in manager.all_tasks:
            guess = nearest(name, manager.all_tasks)
            fix = (
                f"did you mean {guess}?"
                if guess
                else "`lm_eval ls tasks` lists them; include_path=DIR adds your own"
            )
            raise UserError(f"there is no task {name!r}", where=where, fix=fix)
    try:
        manager.load(request.task_names)
    except (
        Exception
    ) as error:  # the loader of data sets, and code of tasks, raise whatever they like
        why = f"{type(error).__name__}: {error}"
        fix = "check the network, or HF_HOME; some data sets, such as GPQA's, need an account (hf auth login)"
        raise UserError(
            "the data of the tasks cannot be loaded", where=where, why=why, fix=fix
        ) from error
    return manager


def score_tasks(folder: Path, config: EngineConfig, manager: Any, request: EvalRequest) -> Results:
    """Return the harness's results for the model in `folder`."""
    from lm_eval import simple_evaluate

    with _vllm(folder, config, request) as model:
        return simple_evaluate(
            model,
            tasks=request.task_names,
            task_manager=manager,
            num_fewshot=request.num_fewshot,
            limit=request.limit,
            apply_chat_template=request.apply_chat_template,
            bootstrap_iters=0,  # its standard errors, which are not used here
        )


@contextmanager
def _vllm(folder: Path, config: EngineConfig, request: EvalRequest) -> Iterator[Any]:
    """Yield the harness's model. Afterwards vLLM's memory is free for the next one."""
    from transformers import AutoConfig

    configure_vllm_process()
    answer_for_vllm()
    from lm_eval.models.vllm_causallms import VLLM

    model_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    positions = getattr(
        model_config.get_text_config(), "max_position_embeddings", config.max_model_len
    )
    config = replace(config, max_model_len=min(config.max_model_len, positions))
    arguments = llm_arguments(config, statistics=False) | {
        "load_format": "auto",
        "seed": request.seed,
    }
    arguments |= {
        "pretrained": arguments.pop("model"),
        "lora_local_path": config.adapters and str(folder / FOLDER),
    }
    if request.max_response_length:
        arguments["max_gen_toks"] = request.max_response_length
    kernels = own_kernels(kernel_request(config.kernels, config.scheme.name))
    if torch.cuda.is_available():
        before_start(config.gpu_memory_utilization)
    with default_dtype_kept(), kernels, servable(config.adapters, config.scheme):
        model = VLLM(**arguments)
    try:
        yield model
    finally:
        model.model.llm_engine.engine_core.shutdown()
        del model
        release_engine_memory()


def sets_of(results: Results, asked: Sequence[str]) -> dict[str, dict[int, float]]:
    """Return a set for each metric that is a mean over documents, of each task asked for. A group with a metric of its
    own is one set of all its documents."""
    samples = results["samples"]
    children = results["group_subtasks"]
    groups = results.get("groups", {})

    def tasks(name: str) -> list[str]:
        return (
            [name]
            if name in samples
            else [task for child in children[name] for task in tasks(child)]
        )

    sets: dict[str, dict[int, float]] = {}
    shown: list[str] = []
    for word in asked:
        shown += [word] if word in groups else tasks(word)
    for name in shown:
        values: dict[str, list[Any]] = {}
        for sample in (sample for task in tasks(name) for sample in samples[task]):
            for metric in sample["metrics"]:
                values.setdefault(f"{metric},{sample['filter']}", []).append(sample[metric])
        for key, row in values.items():
            reported = results["results"][name].get(key)
            if _is_mean(row, reported):
                sets[f"{name} {key.removesuffix(',none')}"] = dict(enumerate(map(float, row)))
            else:
                say(
                    f"{name} {key}: {reported}; not in the table, because it is no mean over documents"
                )
    if not sets:
        raise UserError(
            "no task has a metric that is a mean over documents", where=f"tasks={','.join(asked)}"
        )
    return sets


def _is_mean(row: Sequence[Any], reported: Any) -> bool:
    try:
        return math.isclose(fmean(row), reported, rel_tol=1e-9, abs_tol=1e-12)
    except TypeError:  # a perplexity has pairs
        return False
