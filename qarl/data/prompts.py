"""Read, check and tokenize all prompts before training, and choose their order.

Files use verl's schema, so one file works with both backends: `data_source`, `prompt` (a list of `{role, content}`),
`reward_model.ground_truth`, and optionally `extra_info`. The package `datasets` reads them into memory, without its
cache on disk.

There are two differences from verl's `RLHFDataset`. First, an unusable row is an error that names the row. verl drops
such a row as if it were too long, because its filter catches every exception. Second, `filter_overlong_prompts` is off
by default, so no prompt is dropped unless the user asks for it.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qarl.config.source import how_to_make
from qarl.errors import UserError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from qarl.config.schema import DataConfig

_MANY = 900
"""A JSON value with more opening brackets is checked for depth. The number is below Python's recursion limit."""
_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}

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


class PromptDataset(list[Prompt]):
    """The prompts in file order. `num_filtered`: number of overlong prompts that were left out."""

    def __init__(self, prompts: Iterable[Prompt], *, num_filtered: int = 0) -> None:
        super().__init__(prompts)
        self.num_filtered = num_filtered


def load_prompts(
    files: str | Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompt_key: str = "prompt",
    max_prompt_length: int,
    filter_overlong_prompts: bool = False,
    limit: int | None = None,
) -> PromptDataset:
    """Read `files` (.parquet, .jsonl, .json), check their rows, and tokenize their prompts.

    `max_prompt_length`: in tokens. `limit`: stop after this number of usable prompts and ignore later rows.

    Raises:
        UserError: a file, column or row is missing or invalid, the tokenizer has no chat template, a prompt is too long
            (unless `filter_overlong_prompts` is on), or all prompts are too long.
    """
    files = [files] if isinstance(files, str) else list(files)
    if not files:
        raise UserError("no data files", why="the list of files is empty", fix="give at least one .parquet or .jsonl")
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the tokenizer has no chat template",
            where=str(getattr(tokenizer, "name_or_path", "")) or None,
            why="prompts are lists of messages, and a chat template is needed to turn them into text",
            fix="use an instruction-tuned model, or put a chat_template.jinja into the model's folder",
        )
    prompts: list[Prompt] = []
    overlong: list[tuple[str, int]] = []
    offset = 0
    for file in files:
        rows = _read(file, prompt_key)
        for row_number, row in enumerate(_iterate(rows, file)):
            if limit is not None and len(prompts) >= limit:
                break
            where = f"{file}, row {row_number}"
            prompt = _to_prompt(row, offset + row_number, where, tokenizer, prompt_key)
            if len(prompt.prompt_token_ids) > max_prompt_length:
                overlong.append((where, len(prompt.prompt_token_ids)))
            else:
                prompts.append(prompt)
        offset += len(rows)
    if overlong and not filter_overlong_prompts:
        raise _overlong_error(overlong, len(prompts) + len(overlong), max_prompt_length)
    if not prompts:
        raise UserError(
            f"all {len(overlong)} prompts are too long",
            where=", ".join(files),
            why=f"they have more than max_prompt_length={max_prompt_length} tokens "
            f"(shortest: {min((length for _, length in overlong), default=0)})",
            fix="raise data.max_prompt_length",
        )
    return PromptDataset(prompts, num_filtered=len(overlong))


def check_data_files(data: DataConfig) -> None:
    """Raise UserError if a data file of the config is missing or of an unknown kind."""
    for file in (*data.train_files, *data.val_files):
        check_data_file(file)


def check_data_file(file: str) -> None:
    """Raise UserError if the data file is missing or of an unknown kind. The file is not read."""
    path = Path(file)
    if not path.is_file():
        why = "it is a folder" if path.is_dir() else f"looked in {path.absolute().parent}"
        fix = how_to_make(file) or "correct data.train_files / data.val_files"
        raise UserError(f"no such data file: {file}", why=why, fix=fix)
    if path.suffix not in _FORMATS:
        raise UserError(
            f"unknown kind of data file: {file}",
            why=f"the name must end in one of {', '.join(_FORMATS)}",
            fix="convert the file, or rename it if only its name is wrong",
        )


def _read(file: str, prompt_key: str) -> datasets.Dataset:
    check_data_file(file)
    rows = _read_rows(file)
    if not len(rows):
        raise _no_rows(file)
    needed = ["data_source", prompt_key, "reward_model"]
    missing = [column for column in needed if column not in rows.column_names]
    if missing:
        raise UserError(
            f"missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
            where=file,
            why=f"the file has: {', '.join(rows.column_names)}",
            fix="convert the file to verl's schema, or set data.prompt_key to the name of the column with the prompts",
        )
    return rows


def _read_rows(file: str) -> datasets.Dataset:
    import datasets
    import pyarrow.parquet

    try:
        if _FORMATS[Path(file).suffix] == "json":
            _check_json(Path(file))
        elif not pyarrow.parquet.ParquetFile(file).metadata.num_rows:
            raise StopIteration
        # A temporary cache, because the user's cache would keep a copy of every version of every file.
        with tempfile.TemporaryDirectory() as cache_dir:
            return datasets.load_dataset(
                _FORMATS[Path(file).suffix], data_files=file, split="train", cache_dir=cache_dir, keep_in_memory=True
            )
    except Exception as error:  # which exception `datasets` raises depends on the format and its reader
        if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
            raise _no_rows(file) from error
        raise _unreadable(file, error) from error


def _check_json(path: Path) -> None:
    """Raise ValueError if the file does not begin with an object or a list, and RecursionError if it is deeply nested.

    pyarrow's reader would crash the process if the first value is null or the nesting is deep."""
    first = b""
    with path.open("rb") as file:
        for line in file:
            first = first or line.strip()[:1]
            _try_deep(line)
    if first and first not in b"[{":
        raise ValueError(f"a row must be a JSON object, {{...}}, but the file begins with {first!r}")
    if path.suffix == ".json":  # the file holds one JSON value, which may span all lines
        _try_deep(path.read_bytes())


def _try_deep(value: bytes) -> None:
    if value.count(b"[") + value.count(b"{") > _MANY:
        with suppress(ValueError):  # pyarrow's reader will report all other problems
            json.loads(value)


def _iterate(rows: datasets.Dataset, file: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows. Raise UserError for a damaged row."""
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise _unreadable(file, error) from error
        yield row


def _no_rows(file: str) -> UserError:
    return UserError("the data file has no rows", where=file, fix="write at least one prompt to it")


def _unreadable(file: str, error: Exception) -> UserError:
    cause = error.__cause__ or error
    return UserError(
        f"cannot read the data file {file}",
        why=f"{type(cause).__name__}: {shortened((str(cause).splitlines() or [''])[0])}",
        fix="write it again; it may be truncated, or its name may have the wrong ending",
    )


def _to_prompt(
    row: Mapping[str, Any], index: int, where: str, tokenizer: PreTrainedTokenizerBase, prompt_key: str
) -> Prompt:
    messages = _to_messages(row[prompt_key], f"{where}, {prompt_key}")
    data_source = row["data_source"]
    if not isinstance(data_source, str):
        raise UserError(
            f"data_source is {shortened(data_source)}",
            where=where,
            why="it must be a string",
            fix='name where the row comes from, for example "data_source": "gsm8k"',
        )
    reward_model = row["reward_model"]
    ground_truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if ground_truth is None:
        raise UserError(
            "missing reward_model.ground_truth",
            where=where,
            why=f"reward_model is {shortened(reward_model)}, but the reward compares answers with its ground_truth",
            fix='give each row a reward_model like {"style": "rule", "ground_truth": "42"}',
        )
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, Mapping):
        raise UserError(
            f"extra_info is {shortened(extra_info)}",
            where=where,
            why=f"it is a {type(extra_info).__name__}, but the reward function needs a dict",
            fix='write extra_info as {"key": value}, or leave the column out',
        )
    try:
        token_ids: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # templates raise their own errors, for example for an unknown role
        raise UserError(
            "the tokenizer's chat template refuses a prompt",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix="correct the row's messages (roles, order), or use a different chat template",
        ) from error
    if not len(token_ids):
        raise UserError(
            "a prompt has no tokens",
            where=where,
            why=f"the chat template renders {shortened(messages)} as text without a token; vLLM refuses such a prompt",
            fix="give the messages some content, or leave the row out",
        )
    return Prompt(index, data_source, messages, list(token_ids), ground_truth, dict(extra_info or {}))


def _to_messages(value: Any, where: str) -> list[Message]:
    fix = 'write prompts as [{"role": "user", "content": "..."}]'
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else type(value).__name__
        raise UserError(f"the prompt is {kind}, not a list of messages", where=where, fix=fix)
    for message in value:
        role, content = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(
                "role and content of every message must be text",
                where=where,
                why=shortened(message),
                fix=fix,
            )
    if value[-1]["role"] == "assistant":
        raise UserError(
            "the prompt ends with a message of the assistant",
            where=where,
            why="the model would be asked to answer an answer; rows for supervised fine-tuning look like this",
            fix="remove the answer from the prompt; reward_model.ground_truth has what the reward compares with",
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def shortened(value: Any, length: int = 200) -> str:
    """Return the start of `repr(value)`, or the type's name if a user's `__repr__` raises."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= length else text[:length] + "..."


def _overlong_error(overlong: Sequence[tuple[str, int]], total: int, max_prompt_length: int) -> UserError:
    where, length = overlong[0]
    longest = max(length for _, length in overlong)
    return UserError(
        f"a prompt has {length} tokens, more than max_prompt_length={max_prompt_length}",
        where=where,
        why=f"{len(overlong)} of {total} prompts are too long, the longest has {longest} tokens; "
        "cutting a prompt would change its question",
        fix=f"set data.max_prompt_length={longest}, or data.filter_overlong_prompts=true to leave them out",
    )


def check_disjoint(train: Sequence[Prompt], val: Sequence[Prompt]) -> int:
    """Return the number of prompts of `val` whose tokens equal a prompt of `train`."""
    seen = {tuple(prompt.prompt_token_ids) for prompt in train}
    return sum(tuple(prompt.prompt_token_ids) in seen for prompt in val)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, max_unused: int = 0) -> int:
    """Return the number of extra token ids: those that the model has but the tokenizer lacks.

    `vocab_size`: number of the model's ids. verl masks extra ids in vLLM but not in its trainer. So the more
    probability the model gives them, the more the log-probs of rollout and trainer differ. With 64 logits for 48 tokens
    and an untrained model, the difference is ln(64/48). A trained model gives extra ids almost no probability.

    Raises UserError if there are more than `max_unused` extra ids, or if the tokenizer has more ids than the model.
    """
    unused = vocab_size - len(tokenizer)
    if 0 <= unused <= max_unused:
        return unused
    sizes = f"the tokenizer has {len(tokenizer)} entries, the model's vocab_size is {vocab_size}"
    if unused < 0:
        raise UserError(
            sizes,
            why="the model has no embedding for the last ids of the tokenizer",
            fix="use the tokenizer that belongs to the model, or resize the model's embeddings to it",
        )
    raise UserError(
        sizes,
        why=f"the {unused} additional ids are masked in the rollout but not in the trainer; this shifts the trainer's "
        "log-probs and looks like a mismatch caused by quantization",
        fix="resize the model's embeddings to the tokenizer, or add tokens to the tokenizer until both agree",
    )


class PromptSampler(Iterator[list[int]]):
    """Yield batches of `batch_size` distinct row numbers below `num_prompts`, without end.

    Every epoch has a new order, which depends only on `seed` and the epoch, so a resumed run gets the same batches.
    Without `shuffle`, every epoch is in file order. As in verl, an epoch's last incomplete batch is dropped. Raises
    UserError if `batch_size` is below 1 or above `num_prompts`.
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        if not 1 <= batch_size <= num_prompts:
            raise UserError(
                f"cannot draw batches of {batch_size} from {num_prompts} prompts",
                where="data.train_batch_size",
                why="a batch must have at least one prompt, and its prompts must be distinct",
                fix=f"set data.train_batch_size between 1 and {num_prompts}, or give more prompts",
            )
        self.num_prompts, self.batch_size, self.seed, self.shuffle = num_prompts, batch_size, seed, shuffle
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

    def state_dict(self) -> dict[str, int | bool]:
        settings: dict[str, int | bool] = {key: getattr(self, key) for key in self._SETTINGS}
        return settings | {"batches_drawn": self.batches_drawn}

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue from the position in `state`.

        Raise UserError if `state` was saved with a different number of prompts, batch size, seed or `shuffle`, or if
        its `batches_drawn` is not an integer of 0 or more.
        """
        for key in self._SETTINGS:
            if state.get(key) != getattr(self, key):
                raise UserError(
                    f"the checkpoint was written with {key}={state.get(key)}, but this run has "
                    f"{key}={getattr(self, key)}",
                    why="the prompts would not continue in the same order",
                    fix="resume with the same data, data.train_batch_size, data.shuffle and seed, or start a new run",
                )
        drawn = state.get("batches_drawn")
        if not isinstance(drawn, int) or isinstance(drawn, bool) or drawn < 0:
            raise UserError(
                f"the checkpoint's position in the data, batches_drawn={drawn!r}, is not a count of batches",
                fix="use a different checkpoint",
            )
        self.batches_drawn = drawn

    _SETTINGS = ("num_prompts", "batch_size", "seed", "shuffle")
