"""Sample the responses of one or two models in the rollout engine, score them, and tabulate the scores.

The engine is the run's own: the same kernels and settings, and the bytes of the export, published as in training. Both
models get the same prompts and seeds. Where verl's validation averages bootstraps, this takes the plain mean.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from qarl.checkpoint.export import ExportRequest, export
from qarl.checkpoint.model_files import read_tensors
from qarl.checkpoint.storage import EXPORT, write_json
from qarl.checks.generation import check_stops, stop_token_ids
from qarl.checks.gpu_memory_decides import DEFAULT_SEQUENCES
from qarl.config.lora import FOLDER
from qarl.console import say, stage
from qarl.data.ground_truths import judge, refusal
from qarl.data.prompts import Prompt, load_prompts, prompt_options, with_samples
from qarl.data.response_text import response_texts
from qarl.data.reward_outcomes import Scored
from qarl.data.scoring import compares_answers, reward_of, scored_responses
from qarl.data.votes import vote_of
from qarl.data.weighted_reward import part_means
from qarl.data.worker_roles import ENVIRONMENT, ONE_OF_REWARDS, REWARD
from qarl.errors import UserError
from qarl.eval.arguments import BF16, EvalRequest, Settings
from qarl.eval.harness import find_tasks, score_tasks, sets_of
from qarl.lora.adapter import Adapter, read_adapter
from qarl.metrics.estimates import Estimate, average, differences, interval, normal
from qarl.metrics.validation import MEANS, Answer, prompt_figures
from qarl.rollout.adapter_spec import AdapterSpec
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.engine_config import ends_of
from qarl.rollout.turns import Conversations, conversations_of, scored_prompts
from qarl.schemes import UNQUANTIZED, from_quantization_config
from qarl.schemes.kernel_choice import KernelChoice

Sets = Mapping[str, Mapping[Any, float]]
"""Name of a set (`data_source`) -> row -> a figure of its responses."""
Estimates = dict[str, dict[str, Any]]
"""Name of a set -> number of prompts, and the estimate of each model."""


_MOVED = {ENVIRONMENT.key: "environment", ONE_OF_REWARDS.key: "reward", REWARD.key: "reward"}
"""Key of a run's config that names a function -> the argument that replaces it here."""


def evaluate(request: EvalRequest, settings: Settings) -> str:
    """Return the table of scores. Raise UserError if model, data or reward cannot be used."""
    try:
        return _evaluated(request, settings)
    except UserError as error:
        key = (error.where or "").partition("=")[0]
        if key not in _MOVED or settings.config is None:
            raise
        named = f"name the function where it is now: {_MOVED[key]}=NAME"
        error.fix = f"{error.fix}; or {named}" if error.fix else named
        told = UserError(error.what, where=error.where, why=error.why, fix=error.fix)
        error.args = told.args  # the class of the error stays
        raise


def _evaluated(request: EvalRequest, settings: Settings) -> str:
    manager = find_tasks(request) if request.tasks else None
    with ExitStack() as stack:
        scores: dict[str, dict[str, Sets]] = {}
        samples: dict[str, int] = {}
        for label, folder in folders(request, stack):
            what = f"scoring {label}" + " with its adapter" * (folder / FOLDER).is_dir()
            if manager is not None:
                with stage(what, quiet=True):  # the harness has bars of its own
                    engine_config = engine_of(folder, request, settings, adapter_of(folder))
                    results = score_tasks(folder, engine_config, manager, request)
                scores.setdefault(MEANS, {})[label] = sets_of(results, request.task_names)
                continue
            prompts = _prompts(request, settings, folder)
            if not scores:
                warn_of_ground_truths(prompts, settings)
            for prompt in prompts:
                samples[prompt.data_source] = max(
                    samples.get(prompt.data_source, 1), prompt.samples or 1
                )
            with stage(what):
                for figure, sets in score_model(folder, prompts, request, settings).items():
                    scores.setdefault(figure, {})[label] = sets
    # Metrics of one task are no sets to average.
    estimates = {
        figure: tabulated(of_models, averaged=manager is None)
        for figure, of_models in scores.items()
        if len(of_models) == len(scores[MEANS])  # one model may have given no answer
    }
    means = estimates.pop(MEANS)
    if request.output:
        written = {"samples": samples, "scores": means, "figures": estimates}
        write_json(request.output, written)
    tables = [table(means, samples)]
    tables += [table(each, {}, figure) for figure, each in estimates.items()]
    return "\n\n".join(tables)


def folders(request: EvalRequest, stack: ExitStack) -> Iterator[tuple[str, Path]]:
    """Yield name and folder of each model. Checkpoints are exported to a folder that `stack` removes."""

    def exported(format: Any) -> Path:
        output = Path(stack.enter_context(tempfile.TemporaryDirectory())) / EXPORT
        trust = request.trust_remote_code
        say(
            export(
                ExportRequest(
                    request.model, output, step=request.step, format=format, trust_remote_code=trust
                )
            )
        )
        return output

    if not (request.model / "config.yaml").is_file():  # not a run
        yield str(request.model), request.model
    elif (
        request.against == BF16 or request.step is not None or not (request.model / EXPORT).is_dir()
    ):
        yield str(request.model), exported("quantized")
    else:
        yield str(request.model), request.model / EXPORT
    if request.against == BF16:
        yield BF16, exported("bf16")
    elif request.against:
        yield request.against, Path(request.against)


def _prompts(request: EvalRequest, settings: Settings, folder: Path) -> list[Prompt]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=request.trust_remote_code)
    check_stops(settings.rollout, tokenizer, section="")
    variables = request.apply_chat_template_kwargs
    options: dict[str, Any] = {"tokenizer": tokenizer, "apply_chat_template_kwargs": variables}
    if settings.config:
        options = prompt_options(settings.config, tokenizer)
    options |= {"max_prompt_length": settings.max_prompt_length, "limit": request.limit}
    prompts = load_prompts(settings.files, **options)
    usual = settings.config.rollout.val_n if settings.config else 1
    asked = with_samples(prompts, usual)
    if request.n is not None:
        asked = [replace(prompt, samples=request.n) for prompt in prompts]
    if settings.temperature == 0 and any(prompt.samples != 1 for prompt in asked):
        fix = "add temperature=0.6, which the paper uses, or n=1"
        raise UserError(
            "several responses to a prompt at temperature 0 would all be the same", fix=fix
        )
    return asked


def warn_of_ground_truths(prompts: Sequence[Prompt], settings: Settings) -> None:
    """Print a warning if most ground truths are no right answers, so that every score would be 0."""
    scoring = settings.reward
    reward = reward_of(scoring)
    compared = compares_answers(scoring, reward)
    if not scoring.check_ground_truths or compared is None:
        return
    function, compares = compared
    try:
        judged = judge(compares, prompts, timeout_s=scoring.timeout_s)
    finally:
        reward.stop()
    if refused := refusal(judged, function, "the files"):
        say(f"warning: {refused}")


def score_model(
    folder: Path, prompts: Sequence[Prompt], request: EvalRequest, settings: Settings
) -> dict[str, Sets]:
    """Return the figures of each prompt's responses (`qarl.metrics.validation`), from an engine with the weights of
    `folder`."""
    from transformers import AutoTokenizer

    scoring = settings.reward
    reward = reward_of(scoring)
    reward.load()
    rows = [prompt for prompt in prompts for _ in range(prompt.samples or 1)]
    draw = random.Random(f"eval-{request.seed}")
    seeds = [draw.getrandbits(31) for _ in rows]
    adapter = adapter_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=request.trust_remote_code)
    conversations = conversations_in(folder, tokenizer, request, settings)
    with RolloutEngine(engine_of(folder, request, settings, adapter)) as engine:
        engine.publish(read_tensors(folder), version=0)
        if adapter is not None:
            engine.publish_adapter(adapter, version=0)
        sampling = SamplingConfig(
            settings.max_response_length,
            temperature=settings.temperature,
            **ends_of(settings.rollout),
        )
        if conversations is None:
            responses = engine.generate([row.prompt_token_ids for row in rows], sampling, seeds)
        else:
            responses = conversations.hold(engine, rows, sampling, seeds)
            conversations.environment.stop()
    keep = scoring.keep_special_tokens
    texts = response_texts(tokenizer, responses.response_token_ids, keep_special_tokens=keep)
    scored = scored_prompts(rows, responses, scoring.names)
    outcomes = scored_responses(reward, scored, texts, timeout_s=scoring.timeout_s)
    reward.stop()
    for name, value in part_means(outcomes, scoring.labels).items():
        say(f"{name} of {folder}: {value:.4g}")
    votes = map(vote_of, repeat(scoring.names), texts, outcomes)
    answers = zip(rows, outcomes, votes, strict=True)
    return dict(prompt_figures(answers_of(answers)))


def answers_of(scored: Iterable[tuple[Prompt, Scored, str | None]]) -> Iterator[Answer]:
    """Yield the answers to prompts, each with its outcome and its vote."""
    for row, outcome, vote in scored:
        yield Answer(row.data_source, row.index, outcome.score, vote)


def conversations_in(
    folder: Path, tokenizer: Any, request: EvalRequest, settings: Settings
) -> Conversations | None:
    """Return what holds conversations as the run does, or None if there is no run, or it has no environment."""
    from transformers import AutoConfig

    config = settings.config
    if config is None or config.rollout.environment is None:
        return None
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=request.trust_remote_code)
    conversations = conversations_of(
        config, tokenizer, stop_token_ids(str(folder), tokenizer, hf_config)
    )
    if conversations is not None:
        limits = replace(conversations.limits, response=settings.max_response_length)
        conversations.limits = limits
    return conversations


def adapter_of(folder: Path) -> Adapter | None:
    return read_adapter(folder / FOLDER) if (folder / FOLDER).is_dir() else None


def engine_of(
    folder: Path, request: EvalRequest, settings: Settings, adapter: Adapter | None
) -> EngineConfig:
    """Return the config of an engine for the weights of `folder`, as the run has it if there is one."""
    quantization = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(
        "quantization_config"
    )
    scheme = from_quantization_config(quantization) if quantization else UNQUANTIZED
    more: dict[str, Any] = {}
    if adapter is not None:
        more["adapters"] = AdapterSpec.of(adapter.r, adapter.targets)
    if (config := settings.config) is not None:
        more |= {
            "max_num_seqs": config.rollout.max_num_seqs or DEFAULT_SEQUENCES,
            "max_num_batched_tokens": config.rollout.max_num_batched_tokens,
            "gpu_memory_utilization": config.rollout.gpu_memory_utilization,
            "kv_cache_gib": config.rollout.cpu_kvcache_space_gib,
            "enforce_eager": config.rollout.enforce_eager,
            "head_dtype": config.model.head_dtype,
            "dtype": config.model.dtype,
            "kernels": config.quant.kernels if quantization else KernelChoice.ENGINE,
        }
    return EngineConfig(
        model=str(folder),
        scheme=scheme,
        ignore=tuple(quantization["ignore"] if quantization else ()),
        max_model_len=settings.max_prompt_length + settings.max_response_length,
        trust_remote_code=request.trust_remote_code,
        **more,
    )


def tabulated(scores: dict[str, Sets], *, averaged: bool = True) -> Estimates:
    """Return, by set, the number of prompts, the estimate of each model, and the difference of the first two.

    If `averaged`, several sets have a last row, their average."""
    columns = {
        label: {name: list(rows.values()) for name, rows in sets.items()}
        for label, sets in scores.items()
    }
    estimate: dict[str, Callable[[Sequence[float]], Estimate]] = dict.fromkeys(columns, interval)
    first, *others = columns.values()
    if others:
        second = others[0]
        columns["difference"] = {name: differences(first[name], second[name]) for name in first}
        estimate["difference"] = normal
    estimates: Estimates = {}
    for name, values in first.items():
        row: dict[str, Any] = {"prompts": len(values)}
        for label, sets in columns.items():
            row[label] = asdict(estimate[label](sets[name]))
        estimates[name] = row
    if averaged and len(first) > 1:
        row = {label: asdict(average(sets)) for label, sets in columns.items()}
        estimates["average of the sets"] = {"prompts": sum(map(len, first.values()))} | row
    return estimates


def table(estimates: Estimates, samples: dict[str, int], figure: str = "") -> str:
    """Return the estimates as a Markdown table in percent. `figure`: what they are estimates of, if not of mean@k."""
    models = [label for label in next(iter(estimates.values())) if label != "prompts"]
    head = figure or "mean@"
    lines = [f"| set | prompts | {head} | {' | '.join(models)} |", "|" + "---|" * (3 + len(models))]
    for name, row in estimates.items():
        cells = [name, str(row["prompts"]), str(samples.get(name, ""))]
        for model in models:
            estimate = Estimate(**row[model])
            sign = "+" if model == "difference" else ""
            bounds = f"[{estimate.low:{sign}.1%}, {estimate.high:{sign}.1%}]"
            cells.append(f"{estimate.mean:{sign}.1%} {bounds}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
