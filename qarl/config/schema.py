"""The typed configuration of a run: every key, with its meaning, unit, bounds and default.

A run is `python -m qarl.train config=NAME.yaml key=value ...`. Later wins: the defaults below, the YAML file, then the
overrides. Unknown keys are errors, and so is anything that would fail or mislead later; all errors come at once, before
any work. `load_config` is the way in; the text under each key below is also what an error about that key quotes.

Keys are named and counted as in verl where verl has them (https://verl.readthedocs.io/en/latest/examples/config.html):
batch sizes of `data` and `ppo_mini_batch_size` are in prompts, micro-batch sizes in responses. Departures: `actor` and
`rollout` are not nested under `actor_rollout_ref`, the optimizer is a separate section, and `trainer` counts steps
only, never epochs. Numbers called "the paper's" are those of arXiv 2604.07853, appendix B.

Importing this module imports neither torch, transformers, vLLM nor verl. Files are looked for where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from qarl.config.checks import check
from qarl.config.errors import ConfigError
from qarl.config.strict_yaml import dump
from qarl.config.types import (
    Above,
    Below,
    Dotted,
    Fraction,
    Pair,
    PathList,
    PathText,
    Patterns,
    RewardName,
    Text,
    Unit,
    as_list,
    held_integer,
)
from qarl.tbpo.config import MismatchOutsideCap, PositiveBand, TBPOConfig

_TBPO = TBPOConfig()
SchemeName = Literal["bf16", "w4a16", "w8a8", "fp8", "w4a8"]
SCHEMES: tuple[str, ...] = get_args(SchemeName)
ROLLOUT_SCHEMES = tuple(name for name in SCHEMES if name != "w4a8")
"""Those that vLLM computes: `qarl.rollout.engine.check_served` says why not the other."""


class Section(BaseModel):
    """Base of every section: unknown keys forbidden, no silent conversion of types, immutable, finite numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    _integers_fit = field_validator("*", mode="before")(held_integer)


class ModelConfig(Section):
    """The model to train."""

    path: PathText
    """Folder of a Hugging Face checkpoint (config, weights, tokenizer), or its name on the Hub."""

    trust_remote_code: bool = False
    """Run the Python code that a model's folder or Hub repository brings along. It has all your rights, so read it."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory for about a third more compute."""


class DataConfig(Section):
    """Prompts and batch sizes."""

    train_files: PathList = Field(min_length=1)
    """Parquet or JSON files (.parquet, .jsonl, .json) of training prompts: at least one, in verl's row layout. One name
    may be given without a list."""

    val_files: PathList = []
    """Files of evaluation prompts, same formats and layout. May be empty only if nothing is evaluated."""

    train_batch_size: Annotated[int, Unit("prompts")] = Field(ge=1)
    """Prompts per training step; each is answered rollout.n times."""

    max_prompt_length: Annotated[int, Unit("tokens")] = Field(ge=1)
    """Longest prompt, in tokens, chat template included."""

    max_response_length: Annotated[int, Unit("tokens")] = Field(ge=1)
    """Longest response, in tokens; generation stops there."""

    shuffle: bool = True
    """Shuffle the training prompts, by `seed`."""

    prompt_key: Text = "prompt"
    """Column that holds the prompt."""

    filter_overlong_prompts: bool = False
    """Leave out prompts longer than max_prompt_length; if false, such a prompt is an error."""


class RewardConfig(Section):
    """How a response is scored."""

    function: RewardName = "arithmetic"
    """`arithmetic`, `math_verify`, or your own function: `module:function` or `path/to/file.py:function`."""

    timeout_s: Annotated[float | None, Unit("seconds")] = Field(default=60.0, gt=0, le=86_400)
    """Time limit for scoring one response; exceeding it is an error. null means no limit."""


class RolloutConfig(Section):
    """Sampling, and the vLLM engine that does it."""

    n: Annotated[int, Unit("responses")] = Field(ge=2)
    """Responses per prompt, GRPO's group. At least 2: an advantage is relative to the other responses to the prompt."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature in training. Above 0: greedy responses to one prompt are all alike and teach nothing."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the probability mass kept. Below 1, backend=local needs quant.align=model or exact."""

    top_k: Annotated[int, Unit("tokens")] = Field(default=-1, ge=-1)
    """Sample from this many of the likeliest tokens; -1 or 0 means all. backend=local needs what it needs for top_p."""

    val_temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of evaluations; 0 is greedy. Above 0 only with backend=verl, whose data may ask for several
    responses per problem (scripts/prepare_math_eval.py)."""

    max_num_seqs: Annotated[int, Unit("sequences")] = Field(default=256, ge=1)
    """Maximum number of sequences that vLLM decodes at once."""

    max_num_batched_tokens: Annotated[int | None, Unit("tokens")] = Field(default=None, ge=1)
    """Maximum number of tokens in one vLLM step, at least max_num_seqs; null means vLLM's default."""

    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the GPU's memory that vLLM may take, weights included; the trainer needs the rest. CUDA only."""

    cpu_kvcache_space_gib: Annotated[float, Unit("GiB")] = Field(default=1.0, gt=0, le=2**20)
    """Size of vLLM's KV cache in GiB. CPU only."""

    enforce_eager: bool = True
    """Run vLLM without CUDA graphs and compilation: starts faster, decodes slower."""

    tensor_model_parallel_size: Annotated[int, Unit("GPUs")] = Field(default=1, ge=1)
    """Number of GPUs that one copy of the rollout model is split over. Must be 1 with backend=local."""

    router_replay: Literal["auto", "on", "off"] = "auto"
    """In a mixture of experts, send each token of the trainer's forward to the experts that it had in the rollout (R3,
    arXiv 2510.11370). `auto`: at quant.align=off and linears, where the trainer's own router chooses others. At `model`
    and `exact` it chooses the same, and metrics show it. Dense models have no router."""

    rebuild_on_failure: bool = False
    """If vLLM fails or dies, start another engine and continue. Local backend only: verl restarts nothing."""


class QuantConfig(Section):
    """Quantization, the same in the rollouts and in the trainer's forward."""

    scheme: SchemeName = "w4a16"
    """`w4a16`: symmetric int4 weights with one BF16 scale per group, BF16 activations. `w4a8`: the same weights, int8
    activations. `w8a8`: int8 weights and activations. `fp8`: e4m3 weights and activations. `bf16`: no quantization.
    8-bit weights have one scale per output channel, 8-bit activations one per token."""

    group_size: Annotated[int, Unit("weights")] = Field(default=128, ge=1)
    """Weights along the input dimension that share one scale: a multiple of 8. Used by w4a16 and w4a8."""

    ignore: Patterns = ["lm_head"]
    """Modules that stay BF16: exact names, or `re:` and a regular expression matched from the start of the name."""

    align: Literal["off", "linears", "model", "exact"] = "model"
    """How far the trainer's forward follows the engine. `off`: plain BF16, the baseline that shows the mismatch.
    `linears`: low-bit products on the very tensors that are published. `model`: also the engine's rounding in residual
    additions, norms, rotary embedding and attention. `exact`: also its own attention operator. bf16 has no low-bit
    products."""

    mismatch_limit: Annotated[float | None, Unit("nats per token")] = Field(default=None, ge=0)
    """Largest mean |δ| between trainer and engine, in nats per token (mismatch/abs_mean). Above it a run stops before
    its first update; later it only warns. null means the limit of the level: qarl/metrics/guard.py."""


class ActorConfig(Section):
    """The policy update: batch splits and the TBPO loss.

    The paper's bands suit responses of up to 16384 tokens. A sequence ratio is a geometric mean over tokens, whose
    spread shrinks as 1/sqrt(tokens): short responses need wider bands, or most of them fall outside and teach nothing.
    """

    ppo_mini_batch_size: Annotated[int, Unit("prompts")] = Field(ge=1)
    """Prompts per optimizer step, as in verl, with rollout.n responses each. Must divide data.train_batch_size."""

    ppo_micro_batch_size_per_gpu: Annotated[int, Unit("responses")] = Field(ge=1)
    """Responses per forward and backward: bounds memory, and changes the gradient by rounding only. Must
    divide a mini-batch, which is ppo_mini_batch_size * rollout.n responses."""

    log_prob_micro_batch_size_per_gpu: Annotated[int, Unit("responses")] = Field(ge=1)
    """Responses per forward when the old log-probs are computed. Bounds memory only."""

    ppo_epochs: Annotated[int, Unit("passes")] = Field(default=1, ge=1)
    """Passes over the responses of a step."""

    grad_clip: float = Field(default=1.0, gt=0)
    """Largest L2 norm of the whole gradient; above it the gradient is scaled down."""

    loss_agg_mode: Literal["seq-mean-token-mean"] = "seq-mean-token-mean"
    """How token losses are averaged. TBPO's ratio belongs to a whole sequence: other averages would not be TBPO."""

    seq_clip_ratio_high: Above = _TBPO.seq_clip_ratio_high
    """Positive advantage: a sequence ratio above 1 + this gives no gradient. The paper's value."""

    seq_clip_ratio_low: Below = _TBPO.seq_clip_ratio_low
    """Positive advantage, at positive_band=two_sided: a ratio below 1 - this gives no gradient. The paper's value."""

    neg_seq_clip_ratio_low: Below = _TBPO.neg_seq_clip_ratio_low
    """Negative advantage: a ratio below 1 - this gives no gradient. The paper's value."""

    neg_seq_clip_ratio_high: Above = _TBPO.neg_seq_clip_ratio_high
    """Negative advantage: a ratio above 1 + this gives no gradient. The paper's value."""

    seq_tis_imp_ratio_cap: float = Field(default=_TBPO.seq_tis_imp_ratio_cap, ge=1, le=1e6)
    """C: the trainer/rollout weight of a sequence is kept in [1/C, C]; at 1 every weight is 1. The paper's value."""

    mismatch_outside_cap: MismatchOutsideCap = _TBPO.mismatch_outside_cap
    """A sequence whose weight is outside [1/C, C]: `truncate` to the nearer end, or `drop` (zero loss, counted)."""

    positive_band: PositiveBand = _TBPO.positive_band
    """Band for positive advantages: `upper` bound only, as in the paper's text, or `two_sided`, as its table allows."""


class AlgorithmConfig(Section):
    """Advantages."""

    adv_estimator: Literal["grpo"] = "grpo"
    """Reward minus the mean reward of the responses to the same prompt."""

    norm_adv_by_std_in_grpo: bool = True
    """Also divide by the standard deviation of those rewards."""


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices inside the decoder blocks, AdamW for everything else. The paper uses Muon."""

    lr: float = Field(default=1e-6, ge=0)
    """AdamW's peak learning rate. The paper gives this value for Muon, without a unit (docs/configs.md)."""

    betas: Pair = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay, multiplied by the learning rate each step. The paper's value."""

    lr_warmup_steps: Annotated[int, Unit("steps")] = Field(default=0, ge=0)
    """Training steps of linear warm-up from 0 to the peak."""

    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """After the warm-up: `constant`, or `cosine` down to min_lr_ratio at the last training step."""

    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """End of the cosine, as a fraction of the peak."""

    muon_lr: float = Field(default=0.02, ge=0)
    """Muon's peak learning rate, in spectral norm per update: an element moves by about this / sqrt(input width). The
    default is the muon-optimizer package's, meant for pre-training; fine-tuning needs less."""

    muon_momentum: Fraction = 0.95
    """Muon's momentum."""

    master_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the weights that the optimizer updates. At bf16 updates are rounded stochastically: to nearest, steps of
    1e-6 would vanish."""


class TrainerConfig(Section):
    """Length of the run, evaluation and output."""

    nnodes: Annotated[int, Unit("machines")] = Field(default=1, ge=1)
    """Number of machines. Must be 1 with backend=local."""

    n_gpus_per_node: Annotated[int, Unit("GPUs")] = Field(default=1, ge=1)
    """GPUs per machine, or the number of trainer processes on a CPU. Must be 1 with backend=local."""

    total_training_steps: Annotated[int, Unit("steps")] = Field(ge=1)
    """Training steps; each is one rollout of data.train_batch_size prompts. The data is repeated as needed."""

    test_freq: Annotated[int, Unit("steps")] = Field(default=-1, ge=-1)
    """Evaluate after every this many steps; -1 means never."""

    val_before_train: bool = True
    """Also evaluate before the first step, as the number to compare training with."""

    val_max_prompts: Annotated[int | None, Unit("prompts")] = Field(default=None, ge=1)
    """Maximum number of prompts per evaluation: the first ones of val_files (verl: drawn by `seed` if data.shuffle is
    on, the same ones every time); null means all."""

    logger: Annotated[list[Literal["console", "tensorboard", "wandb"]], BeforeValidator(as_list)] = ["console"]
    """Where metrics go in addition to metrics.jsonl in the run folder, which is always written."""

    plots: bool = True
    """Draw the run's curves at the end, as PNG files in the run folder."""

    num_threads: Annotated[int | None, Unit("threads")] = Field(default=None, ge=1, le=4096)
    """CPU threads per process: backend=local runs trainer and engine in one process, verl one process per rank. null
    means OMP_NUM_THREADS or else all usable CPUs, which verl's ranks on a CPU share; on GPUs Ray decides."""

    save_final: bool = True
    """At the end write a checkpoint that vLLM loads (compressed-tensors format)."""

    save_freq: Annotated[int, Unit("steps")] = Field(default=-1, ge=-1)
    """Write a checkpoint to resume from after every this many steps and at the end; -1 means never."""

    max_ckpt_to_keep: Annotated[int | None, Unit("checkpoints")] = Field(default=None, ge=1)
    """How many of the newest checkpoints are kept; an older one is removed once a newer one is complete on disk. null
    keeps all. With backend=verl at least 2: verl removes the oldest before the new one is complete."""

    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """`auto`: an interrupted run of this name resumes from its last good checkpoint; a finished one is moved aside.
    `disable`: whatever has this name is moved aside. `resume_path`: resume from resume_from_path."""

    resume_from_path: PathText | None = None
    """With resume_mode=resume_path: a checkpoint folder, OUTPUT_DIR/NAME/checkpoints/step_N (verl:
    global_step_N), of this run or another."""

    @field_validator("test_freq", "save_freq")
    @classmethod
    def _not_zero(cls, steps: int) -> int:
        if steps == 0:
            raise PydanticCustomError("freq", "0 is not a number of steps", {"fix": "write -1 for never"})
        return steps


class Config(Section):
    """A run. Built by `load_config` (command line) or `build_config` (a dict); `Config(...)` itself raises pydantic's
    `ValidationError` for a bad key and `ConfigError` for keys that do not fit together."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    """Name of the run and of its folder: letters, digits, dot, dash, underscore, 200 at most."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of data order, sampling and initialisation, 32 bits."""

    backend: Literal["local", "verl"] = "local"
    """`local`: one process with vLLM inside, on a CPU or one GPU. `verl`: verl's PPO trainer, several GPUs or nodes."""

    output_dir: PathText = "runs"
    """Folder of all runs; this one writes to output_dir/name."""

    dry_run: bool = False
    """Resolve and check the config, print it, write it to dry_run.yaml in the run folder, and stop."""

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig
    quant: QuantConfig = QuantConfig()
    actor: ActorConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    trainer: TrainerConfig

    verl: Dotted = {}
    """Keys of verl's own config, dotted or nested, set after everything that is made from the sections above:
    `verl.trainer.rollout_data_dir=samples`. A `+` before a key of the YAML mapping adds one that verl does not have,
    as on verl's command line. Only with backend=verl."""

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        if problems := check(flat_values(self.model_dump(), bad_keys=set())):
            raise ConfigError(problems)
        return self

    @property
    def run_dir(self) -> Path:
        """Folder of this run: output_dir/name."""
        return Path(self.output_dir) / self.name

    def resolved_yaml(self) -> str:
        """Every key with its value, defaults included, as YAML. Loading it gives an equal config."""
        return dump(self.model_dump(mode="json"))


def sections() -> dict[str, type[Section]]:
    """The sections of a config by name, in order."""
    types = {name: info.annotation for name, info in Config.model_fields.items()}
    return {name: kind for name, kind in types.items() if isinstance(kind, type) and issubclass(kind, Section)}


def flat_values(values: Mapping[str, Any], bad_keys: set[str]) -> dict[str, Any]:
    """Dotted keys and values, with defaults for those not given, without those in `bad_keys`."""
    fields = Config.model_fields.items()
    flat = {name: values.get(name, info.default) for name, info in fields if name not in sections()}
    for name, section in sections().items():
        given = values[name]
        if isinstance(given, Mapping):
            for child, info in section.model_fields.items():
                flat[f"{name}.{child}"] = given.get(child, info.default)
    return {key: value for key, value in flat.items() if key not in bad_keys}
