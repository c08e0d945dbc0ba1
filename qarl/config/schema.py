"""The typed configuration of a run: every key, with its meaning, unit, bounds and default.

`load_config` reads `python -m qarl.train config=NAME.yaml key=value ...`. The YAML file overrides the defaults below,
and `key=value` overrides the YAML file. Unknown keys are errors, and so are values that would fail or mislead later.
All errors are reported at once, before any work is done. An error about a key also quotes the docstring of that key.

Keys that exist in verl have the same name and unit here (https://verl.readthedocs.io/en/latest/examples/config.html).
So batch sizes of `data` and `ppo_mini_batch_size` are in prompts, micro-batch sizes in responses. There are three
departures from verl: `actor` and `rollout` are not nested under `actor_rollout_ref`, the optimizer is a separate
section, and `trainer` counts only steps, never epochs. "The paper's" values are those of arXiv 2604.07853, appendix B.

This module does not import torch, transformers, vLLM or verl, and it does not check whether files exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from qarl.config.actor import ActorConfig, AdvEstimator, RolloutCorrectionConfig
from qarl.config.checks import check
from qarl.config.errors import ConfigError, Problem
from qarl.config.filter_groups import FilterGroupsConfig
from qarl.config.lora import LoraConfig
from qarl.config.multi_turn import MultiTurnConfig
from qarl.config.optim import OptimConfig
from qarl.config.quant import QuantConfig
from qarl.config.read_config import dump
from qarl.config.reward import RewardConfig
from qarl.config.types import (
    Dotted,
    FunctionName,
    PathList,
    PathText,
    Sane,
    Section,
    Text,
    TokenId,
    Unit,
    as_list,
)
from qarl.config.unused_keys import problems as unread_problems

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What may name a run: its folder has this name."""
MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures above 0 to this value. A test compares it with vLLM's own constant."""


class ModelConfig(Section):
    """The model to train."""

    path: PathText
    """Folder of a Hugging Face checkpoint (config, weights, tokenizer), or its name on the Hub."""

    trust_remote_code: bool = False
    """Run the Python code in the model's folder or Hub repository. It runs with all your rights, so read it first."""

    dtype: Literal["bf16", "fp16"] = "bf16"
    """Dtype of weights and activations in trainer and engine. `fp16` is 8 times as precise as `bf16`, but its largest
    number is 65504 and small gradients become 0, so the loss is scaled (docs/understand/alignment.md). `fp16` requires
    backend=local, quant.scheme=bf16 (unquantized) and optim.master_dtype=fp32."""

    head_dtype: Literal["model", "fp32"] = "model"
    """Precision of the logits. `model`: that of the model. `fp32`: trainer and engine compute FP32 logits from the BF16
    weights. `fp32` requires a model of a family with level `model`, and a vLLM that computes them, as that of
    requirements/cpu.lock does."""

    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward. This needs less memory but about a third more compute. null: only on a
    GPU whose memory would not hold an update otherwise, by the memory plan. With TRL, its own key decides."""

    use_remove_padding: bool = True
    """Pack the rows of a micro-batch into one sequence, without padding. If false, each row is padded to the length of
    the longest row. This takes more time and does not change the log-probs. Set false only for debugging."""


class DataConfig(Section):
    """Prompts and batch sizes."""

    train_files: PathList = Field(min_length=1)
    """One or more Parquet or JSON files (.parquet, .jsonl, .json) of training prompts, in verl's schema. A single name
    may be written without a list."""

    val_files: PathList = []
    """Files of evaluation prompts (same formats and schema). The list may be empty only if nothing is evaluated."""

    train_batch_size: Annotated[int, Unit("prompts")] = Field(ge=1)
    """Prompts per training step. Each gets rollout.n responses."""

    max_prompt_length: Annotated[int, Unit("tokens")] = Field(ge=1)
    """Largest number of tokens in a prompt, including the chat template."""

    max_response_length: Annotated[int, Unit("tokens")] = Field(ge=1)
    """Largest number of tokens in a response. Generation stops there."""

    shuffle: bool = True
    """Shuffle the training prompts, with `seed`."""

    prompt_key: Text = "prompt"
    """Name of the column with the prompt."""

    filter_overlong_prompts: bool = False
    """Leave out prompts longer than max_prompt_length. If false, such a prompt is an error."""

    apply_chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template by name, for example {enable_thinking: false} with Qwen3, which then writes an
    empty thought in front of the response. Each must be named in the template."""


_AGENT_LOOP = "rollout.agent.default_agent_loop"
"""The end of verl's key that names the loop which makes a response."""
BATCHED_TOKENS = {"local": 4096, "verl": 8192}
"""Backend -> the tokens of one vLLM step if `rollout.max_num_batched_tokens` is null. `local`: on a CPU."""


class RolloutConfig(Section):
    """Sampling, and the vLLM engine that samples."""

    n: Annotated[int, Unit("responses"), Sane(2, 1024)] = Field(ge=2)
    """Responses per prompt (GRPO's group). At least 2, because an advantage compares responses to the same prompt."""

    environment: FunctionName | None = None
    """Your function that answers a turn of the model, for conversations of several turns, with or without tools:
    `module:function` or `path/to/file.py:function` (docs/do/turns.md). null: a response is a single turn."""

    temperature: Annotated[float, Sane(0.1, 2.0)] = Field(default=1.0, ge=MIN_TEMPERATURE)
    """Sampling temperature in training. vLLM raises lower ones to 0.01. At 0 all responses to a prompt would be
    equal."""

    top_p: Annotated[float, Sane(0.1, 1.0)] = Field(default=1.0, gt=0, le=1)
    """Probability mass that nucleus sampling keeps. Less than 1 needs backend=local and quant.align=model or exact."""

    top_k: Annotated[int, Unit("tokens")] = Field(default=-1, ge=-1)
    """Sample only from the top_k likeliest tokens; -1 or 0 means all. Values above 0 need backend=local and
    quant.align=model or exact."""

    stop: Annotated[list[Text], BeforeValidator(as_list)] = []
    """Texts that end a response, in training and evaluations, such as </answer>. The tokens up to and including the one
    that completes the text stay as they were sampled, and rewards see the text. In a conversation it ends the turn."""

    stop_token_ids: list[TokenId] = []
    """Token ids that end a response, beside those of the model, in training and evaluations. The token stays in the
    response. In a conversation it ends the turn."""

    min_tokens: Annotated[int, Unit("tokens")] = Field(default=0, ge=0)
    """In training and evaluations no token that ends a response is sampled, and no text of `stop` ends it, before it
    has min_tokens tokens; in a conversation the turn. Above 0 needs backend=local."""

    val_temperature: Annotated[float, Sane(0.0, 2.0)] = Field(default=0.0, ge=0)
    """Sampling temperature of evaluations; 0 is greedy."""

    val_n: Annotated[int, Unit("responses"), Sane(1, 256)] = Field(default=1, ge=1)
    """Responses per prompt of an evaluation. A row's column __rollout_n__ wins (scripts/prepare_math_eval.py). More
    than 1 needs val_temperature above 0."""

    max_num_seqs: Annotated[int | None, Unit("sequences")] = Field(default=None, ge=1)
    """Maximum number of sequences that vLLM decodes at once. null means 256, and up to 512 for a model of up to 2
    billion parameters on a GPU, as many as the KV cache holds at a mean length (a quarter of max_response_length)."""

    max_num_batched_tokens: Annotated[int | None, Unit("tokens")] = Field(default=None, ge=1)
    """Maximum number of tokens in one vLLM step. Must be at least max_num_seqs; null means 8192 with backend=verl,
    and with backend=local 4096 on a CPU and vLLM's default on a GPU. On a CPU at least one whole row fits, because
    prompts are prefilled whole there."""

    gpu_memory_utilization: Annotated[float, Sane(0.01, 0.97)] = Field(default=0.5, gt=0, le=1)
    """Fraction of the GPU's memory that vLLM may use, including its weights. The trainer needs the rest. CUDA only."""

    cpu_kvcache_space_gib: Annotated[float, Unit("GiB"), Sane(1 / 1024, 4096)] = Field(
        default=1.0, gt=0, le=2**20
    )
    """Size of vLLM's KV cache in GiB. CPU only."""

    enable_prefix_caching: bool | None = None
    """Prefill the common start of prompts once, also that of the n responses to a prompt. null means: with
    backend=local on a CPU, where it changes no bit of a prompt as long as data.max_prompt_length; with backend=verl on
    a CPU not; on a GPU vLLM's or verl's default. With experts it is off on a CPU unless set."""

    enforce_eager: bool | None = None
    """Run vLLM without CUDA graphs. It starts faster but decodes more slowly. null means true on a CPU, where
    backend=verl always takes true, and false on GPUs. On GPUs only decode steps are captured, and the model is not
    compiled, except in W4A16 and BF16 below quant.align=model, which take vLLM's default."""

    free_cache_engine: bool = True
    """On GPUs vLLM sleeps while the trainer works: its weights move to host memory, and its KV cache is freed. false
    saves the seconds of the move, but then the update has only the memory that vLLM leaves."""

    tensor_model_parallel_size: Annotated[int, Unit("GPUs")] = Field(default=1, ge=1)
    """Number of GPUs that one copy of the rollout model is split over. Must be 1 with backend=local. If it is above 1,
    quant.align is at most linears, because each GPU rounds its part of a sum."""

    n_gpus_per_node: Annotated[int, Unit("GPUs")] = Field(default=1, ge=1)
    """With trainer.staleness above 0: GPUs of the rollout engines, beside those of the trainer, or the number of
    engines on a CPU. One copy of the model is on each."""

    router_replay: Literal["auto", "on", "off"] = "auto"
    """In a mixture of experts, send each token of the trainer's forward to the experts that it had in the rollout (R3,
    arXiv 2510.11370). `auto`: on at quant.align=off and linears. At model and exact it is off, because trainer and
    engine choose the same experts anyway."""

    rebuild_on_failure: bool = False
    """If vLLM fails or dies, start a new engine and continue. Only for backend=local."""


class AlgorithmConfig(Section):
    """How rewards become advantages."""

    adv_estimator: AdvEstimator = "grpo"
    """An advantage is a reward minus a mean reward of responses to the same prompt. `grpo`: of all of them. `rloo`: of
    all others. `dr_grpo`: as grpo, but without the division by the standard deviation, and token losses are summed, not
    averaged over the response. Not used by actor.loss=reinforce."""

    norm_adv_by_std_in_grpo: bool = True
    """With adv_estimator=grpo: divide each advantage by the standard deviation of the rewards of the same prompt's
    responses."""


class TrainerConfig(Section):
    """Length of the run, evaluation, checkpoints and output."""

    nnodes: Annotated[int, Unit("machines")] = Field(default=1, ge=1)
    """Number of machines. Must be 1 with backend=local."""

    n_gpus_per_node: Annotated[int, Unit("GPUs")] = Field(default=1, ge=1)
    """GPUs per machine, or the number of trainer processes on a CPU. Must be 1 with backend=local."""

    total_training_steps: Annotated[int, Unit("steps")] = Field(ge=1)
    """Number of training steps. Each is one rollout of data.train_batch_size prompts. The data repeats as needed."""

    staleness: Annotated[int, Unit("steps"), Sane(0, 8)] = Field(default=0, ge=0)
    """How many steps older than the weights that are updated the weights may be that a token was sampled from. 0: the
    engine waits for each update. Above 0 engines of their own sample while the trainer updates, which needs
    backend=verl (docs/do/staleness.md)."""

    staleness_strategy: Literal["wait", "drop"] = "wait"
    """With staleness above 0, what happens if an engine lags so much that a response would be older. `wait`: the
    trainer waits for it, and with staleness of 2 or more it may still be up to 2 staleness - 1 steps old when it is
    used. `drop`: the prompt with all its responses is dropped, and another takes its place."""

    test_freq: Annotated[int, Unit("steps")] = Field(default=-1, ge=-1)
    """Evaluate every test_freq steps and after the last step. With -1, backend=local evaluates only after the last
    step, and backend=verl does not evaluate."""

    val_before_train: bool = True
    """Also evaluate before the first step."""

    val_max_prompts: Annotated[int | None, Unit("prompts")] = Field(default=None, ge=1)
    """Maximum number of prompts per evaluation; null means all. The first prompts of val_files are used. With
    backend=verl and data.shuffle, random prompts are used, the same in every evaluation."""

    logger: Annotated[
        list[Literal["console", "tensorboard", "wandb"]], BeforeValidator(as_list)
    ] = ["console"]
    """Where to log metrics. They are always written to metrics.jsonl in the run folder, too."""

    progress: bool = True
    """Show how far a long step is: a live line on a terminal, a line a minute in a file or with backend=verl."""

    plots: bool = True
    """Draw the run's curves at the end, as PNG files in the run folder."""

    report: bool = True
    """Write report.html and samples.jsonl to the run folder, after the first step, every 10 steps (from step
    500 on every 50) and at the end."""

    num_threads: Annotated[int | None, Unit("threads")] = Field(default=None, ge=1, le=4096)
    """CPU threads per process. backend=local has one process for trainer and engine. backend=verl has one process per
    rank. null means OMP_NUM_THREADS if set, otherwise all usable CPUs, but one thread if quant.align is model or exact
    and prompts may be longer than several threads are exact for. With backend=verl, the ranks share the CPUs, or Ray
    decides on GPUs."""

    save_final: bool = True
    """At the end, write a checkpoint that vLLM can load (compressed-tensors format)."""

    save_freq: Annotated[int, Unit("steps")] = Field(default=-1, ge=-1)
    """Write a resumable checkpoint every save_freq steps and at the end; -1 means not by steps."""

    save_minutes: Annotated[float, Unit("minutes")] = Field(default=10.0, ge=-1)
    """Also write a checkpoint when this many minutes have passed without one, and, with backend=local, when Ctrl-C or
    SIGTERM ends the run; -1 means never. If max_ckpt_to_keep is null, the next checkpoint replaces it."""

    max_ckpt_to_keep: Annotated[int | None, Unit("checkpoints")] = Field(default=None, ge=1)
    """Number of newest checkpoints to keep; null keeps all. An old checkpoint is removed when a new one is complete on
    disk. With backend=verl it must be at least 2, because verl removes the oldest before the new one is complete."""

    save_best: bool = False
    """Also keep the checkpoint of the step with the largest val/accuracy, beside those of save_freq and
    max_ckpt_to_keep. best.json in the run folder names it. Needs trainer.test_freq and backend=local."""

    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """`auto`: an interrupted run of this name resumes from its newest good checkpoint; a finished run is moved aside.
    `disable`: any earlier run of this name is moved aside. `resume_path`: resume from resume_from_path."""

    resume_from_path: PathText | None = None
    """With resume_mode=resume_path: the checkpoint folder, OUTPUT_DIR/NAME/checkpoints/step_N (verl: global_step_N). It
    may belong to a different run."""

    @field_validator("test_freq", "save_freq", "save_minutes")
    @classmethod
    def _positive_or_never(cls, count: float, info: ValidationInfo) -> float:
        if count <= 0 and count != -1:
            unit = "minutes" if info.field_name == "save_minutes" else "steps"
            raise PydanticCustomError(
                "freq", f"{count:g} is not a number of {unit}", {"fix": "write -1 for never"}
            )
        return count


class Config(Section):
    """The config of a run. `load_config` builds it from the command line, `build_config` from a dict. `Config(...)`
    itself raises pydantic's `ValidationError` for a bad key, and `ConfigError` for keys that do not fit together."""

    name: Annotated[str, Field(pattern=NAME, max_length=200)]
    """Name of the run and of its folder: at most 200 letters, digits, dots, dashes and underscores."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of data order, sampling and initialisation (32 bits)."""

    plugins: list[PathText] = []
    """Own schemes, kernels, optimizers and objectives: Python files (NAME.py) or modules that are imported before the
    config is checked, in every process of the run (`qarl.plugins`; CONTRIBUTING.md has an example of each)."""

    backend: Literal["local", "verl"] = "local"
    """`local`: one process with vLLM inside, on a CPU or one GPU. `verl`: verl's PPO trainer, several GPUs or nodes."""

    output_dir: PathText = "runs"
    """Folder of all runs. This run writes to output_dir/name."""

    dry_run: bool = False
    """Resolve and check the config, print it, write it to dry_run.yaml in the run folder, and stop."""

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    quant: QuantConfig = QuantConfig()
    lora: LoraConfig = LoraConfig()
    actor: ActorConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    optim: OptimConfig = OptimConfig()
    trainer: TrainerConfig

    verl: Dotted = {}
    """Keys of verl's own config, dotted or nested, for example `verl.trainer.rollout_data_dir=samples`. They need
    backend=verl, and are set after all keys that QaRL sets. In the YAML file, a `+` before a key adds a key that verl's
    config does not have, as on verl's command line."""

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        if problems := check_together(flat_values(self.model_dump(), bad_keys=set())):
            raise ConfigError(problems)
        return self

    @property
    def run_dir(self) -> Path:
        """The folder of this run: output_dir/name."""
        return Path(self.output_dir) / self.name

    @property
    def has_turns(self) -> bool:
        """Whether a response may have several turns: with an environment, or an agent loop that the section verl
        names."""
        loops = [str(value) for key, value in self.verl.items() if key.endswith(_AGENT_LOOP)]
        return self.rollout.environment is not None or any(
            "single_turn" not in name for name in loops
        )

    @property
    def longest_prefill(self) -> int:
        """Most tokens that the engine prefills at once. With an environment, a later turn's prompt is all of a row but
        its last token."""
        data = self.data
        if not self.has_turns:
            return data.max_prompt_length
        return data.max_prompt_length + data.max_response_length - 1

    def resolved_yaml(self) -> str:
        """Return every key with its value, including defaults, as YAML. Loading it gives an equal config."""
        return dump(self.model_dump(mode="json"))


def sections() -> dict[str, type[Section]]:
    """Return the sections of a config by name, in order."""
    types = {name: info.annotation for name, info in Config.model_fields.items()}
    return {
        name: kind
        for name, kind in types.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def flat_values(values: Mapping[str, Any], bad_keys: set[str]) -> dict[str, Any]:
    """Return dotted keys and values, with defaults for keys that are not given, but without those in `bad_keys`."""
    fields = Config.model_fields.items()
    flat = {name: values.get(name, info.default) for name, info in fields if name not in sections()}
    for name, section in sections().items():
        value = values[name]
        if isinstance(value, Mapping):
            for child, info in section.model_fields.items():
                flat[f"{name}.{child}"] = value.get(child, info.default)
    return {key: value for key, value in flat.items() if key not in bad_keys}


def default_values() -> dict[str, Any]:
    """Return dotted keys and their defaults."""
    return flat_values({name: {} for name in sections()}, bad_keys=set())


def check_together(values: Mapping[str, Any]) -> list[Problem]:
    """Return every problem between keys: those that contradict each other, and those that have no effect."""
    problems = check(values)
    named = {problem.key for problem in problems}
    unread = unread_problems(values, default_values())
    return problems + [problem for problem in unread if problem.key not in named]
