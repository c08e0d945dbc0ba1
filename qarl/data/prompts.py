"""Read, check and tokenize all prompts before training, and choose their order.

Files use verl's schema, so one file works with both backends: `data_source`, `prompt` (a list of `{role, content}`),
`reward_model.ground_truth`, and optionally `extra_info` (`qarl.data.rows`).

There are two differences from verl's `RLHFDataset`. First, an unusable row is an error that names the row. verl drops
such a row as if it were too long, because its filter catches every exception. Second, `filter_overlong_prompts` is off
by default, so no prompt is dropped unless the user asks for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from qarl.config import Config
from qarl.data.chat_variables import check_variables
from qarl.data.rows import read_rows
from qarl.errors import UserError, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens (`prompt_token_ids`) and the values that its reward needs."""

    index: int
    """Row number from 0, counted through all files. Filtering does not change it."""
    data_source: str
    messages: list[Message]
    prompt_token_ids: list[int]
    """The tokens of the rendered chat template, including the generation prompt at its end."""
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    samples: int | None = None
    """Number of responses in an evaluation: the file's column `__rollout_n__`, which verl reads too."""


class PromptDataset(list[Prompt]):
    """The prompts in file order. `num_filtered`: number of overlong prompts that were left out. `columns`: names of the
    columns of all files."""

    def __init__(
        self, prompts: Iterable[Prompt], *, num_filtered: int = 0, columns: Iterable[str] = ()
    ) -> None:
        super().__init__(prompts)
        self.num_filtered = num_filtered
        self.columns = frozenset(columns)


def load_prompts(
    files: str | Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompt_key: str = "prompt",
    max_prompt_length: int,
    filter_overlong_prompts: bool = False,
    apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> PromptDataset:
    """Read `files` (.parquet, .jsonl, .json), check their rows, and tokenize their prompts.

    `max_prompt_length`: in tokens. `apply_chat_template_kwargs`: variables of the chat template. `limit`: stop after
    this number of usable prompts and ignore later rows.

    Raises:
        UserError: a file, column or row is missing or invalid, the chat template refuses a row or lacks a variable, a
            prompt is too long
            (unless `filter_overlong_prompts` is on), or all prompts are too long.
    """
    files = [files] if isinstance(files, str) else list(files)
    variables = apply_chat_template_kwargs or {}
    check_variables(tokenizer, variables)
    prompts: list[Prompt] = []
    overlong: list[tuple[str, int]] = []
    columns: set[str] = set()
    offset = 0
    for file in files:
        rows = _read(file, prompt_key)
        columns.update(rows[0])
        for row_number, row in enumerate(rows):
            if limit is not None and len(prompts) >= limit:
                break
            where = f"{file}, row {row_number}"
            prompt = _to_prompt(row, offset + row_number, where, tokenizer, prompt_key, variables)
            if len(prompt.prompt_token_ids) > max_prompt_length:
                overlong.append((where, len(prompt.prompt_token_ids)))
            else:
                prompts.append(prompt)
        offset += len(rows)
    if overlong and not (filter_overlong_prompts and prompts):
        raise _too_long(overlong, len(prompts), max_prompt_length, filter_overlong_prompts)
    return PromptDataset(prompts, num_filtered=len(overlong), columns=columns)


def _too_long(
    overlong: Sequence[tuple[str, int]], fitting: int, limit: int, filtered: bool
) -> UserError:
    """Return the error about prompts that are too long. `overlong`: place and tokens of each. `filtered`: whether such
    prompts are left out, so that no prompt remains."""
    longest = max(length for _, length in overlong)
    why = f"{len(overlong)} of {fitting + len(overlong)} prompts are too long, the longest has {longest} tokens"
    fix = f"set data.max_prompt_length={longest}"
    if filtered:
        shortest = min(length for _, length in overlong)
        what = f"no prompt is left: each has more than max_prompt_length={limit} tokens"
        why = f"data.filter_overlong_prompts=true leaves out all {len(overlong)}; the shortest has {shortest} tokens"
        return UserError(what, where=overlong[0][0], why=why, fix=f"{fix}, which fits all of them")
    what = f"a prompt has {overlong[0][1]} tokens, more than max_prompt_length={limit}"
    fix += ", or leave them out with data.filter_overlong_prompts=true"
    return UserError(what, where=overlong[0][0], why=why, fix=fix)


def _read(file: str, prompt_key: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a file. Raise UserError if it cannot be read, is empty or lacks a column."""
    rows = read_rows(file)
    columns = list(rows[0])
    missing = [
        column for column in ("data_source", prompt_key, "reward_model") if column not in columns
    ]
    if missing:
        fix = "convert the file to verl's schema"
        if prompt_key in missing:
            fix += ", or set data.prompt_key to the name of the column with the prompts"
        raise UserError(
            f"missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
            where=file,
            why=f"the file has: {', '.join(columns)}",
            fix=fix,
        )
    return rows


def _present(value: Any) -> Any:
    if value is None:
        raise ValueError("it is missing, but the reward compares answers with it")
    return value


class _Message(BaseModel):
    role: str
    content: str


class _RewardModel(BaseModel):
    ground_truth: Annotated[Any, AfterValidator(_present)]


class _Row(BaseModel):
    """A row in verl's schema."""

    data_source: str
    prompt: list[_Message] = Field(min_length=1)
    reward_model: _RewardModel
    extra_info: dict[str, Any] | None = None
    samples: int | None = Field(default=None, ge=1, alias="__rollout_n__")


def _to_prompt(
    row: Mapping[str, Any],
    index: int,
    where: str,
    tokenizer: PreTrainedTokenizerBase,
    prompt_key: str,
    variables: Mapping[str, Any],
) -> Prompt:
    try:
        checked = _Row.model_validate({**row, "prompt": row[prompt_key]})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{'.'.join(map(str, first['loc']))} of a row is {shortened(first['input'])}",
            where=where,
            why=first["msg"].removeprefix("Value error, "),
            fix='write rows like {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "..."}], '
            '"reward_model": {"style": "rule", "ground_truth": "42"}}',
        ) from error
    messages = [message.model_dump() for message in checked.prompt]
    if messages[-1]["role"] == "assistant":
        raise UserError(
            "the prompt ends with a message of the assistant",
            where=where,
            why="the model would be asked to answer an answer; rows for supervised fine-tuning look like this",
            fix="remove the answer from the prompt; reward_model.ground_truth has what the reward compares with",
        )
    try:
        token_ids: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **variables
        )
    except Exception as error:  # templates raise their own errors, for example for an unknown role
        if getattr(tokenizer, "chat_template", None) is None:
            raise UserError(
                "the tokenizer has no chat template, so prompts cannot be rendered",
                where=str(getattr(tokenizer, "name_or_path", "")) or where,
                why=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                fix="put a chat_template.jinja into the model's folder, for example that of the model's chat version",
            ) from error
        raise UserError(
            "the tokenizer's chat template refuses a prompt",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix="correct the row's messages (roles, order), or put another chat_template.jinja into the model's folder",
        ) from error
    if not len(token_ids):
        raise UserError(
            "a prompt has no tokens",
            where=where,
            why=f"the chat template renders {shortened(messages)} as text without a token; vLLM refuses such a prompt",
            fix="give the messages some content, or leave the row out",
        )
    truth = checked.reward_model.ground_truth
    extra = checked.extra_info or {}
    return Prompt(
        index, checked.data_source, messages, list(token_ids), truth, extra, checked.samples
    )


def check_disjoint(train: Sequence[Prompt], val: Sequence[Prompt]) -> int:
    """Return the number of prompts of `val` whose tokens equal a prompt of `train`."""
    seen = {tuple(prompt.prompt_token_ids) for prompt in train}
    return sum(tuple(prompt.prompt_token_ids) in seen for prompt in val)


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, max_unused: int = 0
) -> int:
    """Return the number of extra token ids: those that the model has but the tokenizer lacks.

    `vocab_size`: number of the model's ids. verl masks extra ids in vLLM but not in its trainer. So the more
    probability the model gives them, the more the log-probs of rollout and trainer differ. With 64 logits for 48 tokens
    and an untrained model, the difference is ln(64/48). A trained model gives extra ids almost no probability.

    Raises UserError if there are more than `max_unused` extra ids, or if the tokenizer has more ids than the model.
    """
    unused = vocab_size - len(tokenizer)
    if 0 <= unused <= max_unused:
        return unused
    why = f"{unused} additional ids are masked in the rollout but not in the trainer, which shifts its log-probs"
    if unused < 0:
        why = "the model has no embedding for the last ids of the tokenizer"
    raise UserError(
        f"the tokenizer has {len(tokenizer)} entries, the model's vocab_size is {vocab_size}",
        why=why,
        fix="use the tokenizer that belongs to the model, or resize the model's embeddings to the tokenizer",
    )


class PromptSampler(Iterator[list[int]]):
    """Yield batches of `batch_size` distinct row numbers below `num_prompts`, without end.

    Every epoch has a new order, which depends only on `seed` and the epoch, so a resumed run gets the same batches.
    Without `shuffle`, every epoch is in file order. As in verl, an epoch's last incomplete batch is dropped. Raises
    UserError if `batch_size` is below 1 or above `num_prompts`.
    """

    def __init__(
        self, num_prompts: int, batch_size: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        if not 1 <= batch_size <= num_prompts:
            raise UserError(
                f"cannot draw batches of {batch_size} from {num_prompts} prompts",
                where="data.train_batch_size",
                why="a batch must have at least one prompt, and its prompts must be distinct",
                fix=f"set data.train_batch_size between 1 and {num_prompts}, or give more prompts",
            )
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.batches_drawn = 0
        self._epoch, self._order = -1, list[int]()

    @property
    def batches_per_epoch(self) -> int:
        return self.num_prompts // self.batch_size

    def __next__(self) -> list[int]:
        epoch, batch = divmod(self.batches_drawn, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.num_prompts))
            if self.shuffle:
                random.Random(f"{self.seed}-{epoch}").shuffle(self._order)
        self.batches_drawn += 1
        return self._order[batch * self.batch_size : (batch + 1) * self.batch_size]

    def state_dict(self) -> dict[str, int]:
        return {"batches_drawn": self.batches_drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the position in `state`, which is of a sampler with the same arguments."""
        self.batches_drawn = state["batches_drawn"]


def load_val_prompts(config: Config, tokenizer: Any) -> PromptDataset | list[Any]:
    """Load the held-out prompts, or return [] if the run never evaluates.

    backend=verl always loads them, because verl always reads their files.
    """
    files = config.data.val_files
    limit = config.trainer.val_max_prompts
    if config.backend == "verl":
        return load_prompts(files, **prompt_options(config, tokenizer)) if files else []
    if not (config.trainer.val_before_train or config.trainer.test_freq > 0):
        return []
    return load_prompts(files, limit=limit, **prompt_options(config, tokenizer))


def with_samples(prompts: Sequence[Prompt], usual: int) -> list[Prompt]:
    """Return the prompts with the number of their responses in an evaluation: that of the column `__rollout_n__`, or
    `usual` if no row has one. Beside rows that have one, a row without it gets one response, as in verl."""
    if any(prompt.samples for prompt in prompts):
        usual = 1
    return [replace(prompt, samples=prompt.samples or usual) for prompt in prompts]


def prompt_options(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of `load_prompts` that training and evaluation share."""
    names = (
        "prompt_key",
        "max_prompt_length",
        "filter_overlong_prompts",
        "apply_chat_template_kwargs",
    )
    return {"tokenizer": tokenizer, **{name: getattr(config.data, name) for name in names}}
