"""A 0.9M-parameter Qwen3 that adds columns of digits, half trained, and its data: everything the quickstart needs.

`qarl demo` and `scripts/make_tiny_model.py` call `make_missing`, and so does `qarl warm-start` for a task of one's own
(`qarl.demo.own_task`). It writes an ordinary Hugging Face folder and `train.parquet` / `test.parquet` in verl's schema.
The warm start is supervised learning on the answers only, stopped when a check on separate problems reaches a greedy
accuracy, `target`, so that reinforcement learning starts with something to reward and something to learn. It takes
about a minute on one CPU core for the quickstart's model, and two to three for the others; a second call returns at
once. Three choices matter for what comes after:

- Every linear layer has K and N divisible by 32, which vLLM's int4 kernels on CPU need; use `group_size: 32`.
- The vocabulary is the 256 bytes and 32 special tokens, and `vocab_size == len(tokenizer)`: no text is unknown, and no
  padded tail of the vocabulary takes probability in one engine and not in the other.
- Weights are saved in BF16, and the check and the accuracies reported are those of the BF16 weights.

The warm start uses Muon for the matrices of the blocks: a third of AdamW's steps. Learning rates drop once the
model starts to get answers right, because accuracy then climbs from 10% to 90% within 50 steps and would be missed.
At the end the head is doubled. Greedy answers stay as they are; sampling at temperature 1 becomes what it was at 0.5,
and gets 30% right instead of 10%: with groups of 8 answers, far fewer groups teach nothing because all are wrong.
"""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from qarl.checkpoint.storage import check_place, whole_folder
from qarl.console import tell
from qarl.demo.tasks import TASKS, Problem, Task
from qarl.demo.worked import worked
from qarl.errors import UserError
from qarl.progress import live

RECORD = "made_with.json"
IGNORE_INDEX = -100
QUICKSTART = TASKS["column_addition"]
Model = Qwen3ForCausalLM | Qwen3MoeForCausalLM
BATCH_SIZE = 24
WARMUP_STEPS = 20
MUON_LR = 0.03
ADAMW_LR = 3e-3
CHECK_EVERY = 2
CHECK_BELOW_LOSS = 0.2
CHECK_SIZE = 256
SLOW_ABOVE_ACCURACY = 0.1
SLOW_FACTOR = 0.1
POSITIONS = 256
HEAD_SCALE = 2.0  # a power of two: exact in BF16

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]


OF_DATA = ("seed", "train_size", "test_size", "task", "source")
OF_MODEL = (*OF_DATA, "experts", "steps", "target")
"""The fields that decide what is made: first the data, which dense models and mixtures share, then the model. A folder
that was made with the same values is not made again."""


@dataclass(frozen=True)
class Recipe:
    """The model and data to make for `task`. `output`: the model's folder. `data`: the folder of the parquet files.

    `steps`: most steps of the warm start. `target`: greedy accuracy at which it stops. `experts`: of a mixture; 0 for a
    dense model. `train_size`, `test_size`: rows. `source`: a digest of the file of a user's own task."""

    task: Task
    output: Path
    data: Path
    steps: int
    target: float
    seed: int = 0
    experts: int = 0
    train_size: int = 4000
    test_size: int = 512
    positions: int = POSITIONS
    source: str | None = None

    @classmethod
    def of(cls, task: Task, experts: int = 0) -> Recipe:
        """Return the recipe of a task of `TASKS`."""
        name = "" if task is QUICKSTART else f"-{task.name.replace('_', '-')}"
        output = Path("models") / f"tiny-qwen3{'-moe' if experts else ''}{name}"
        return cls(task, output, Path("data") / task.name, task.steps, task.target, experts=experts)

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what `made_with.json` records of `names`."""
        return {name: self.task.name if name == "task" else getattr(self, name) for name in names}


def make_tokenizer(positions: int = POSITIONS) -> PreTrainedTokenizerFast:
    """One token a byte and 32 special tokens, a chat template, `<|eos|>` and `<|pad|>`; 288 entries."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{i}|>" for i in range(32 - len(SPECIAL_TOKENS))]
    tokenizer.add_special_tokens(SPECIAL_TOKENS + reserved)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|eos|>",
        additional_special_tokens=SPECIAL_TOKENS[2:] + reserved,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=positions,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, experts: int = 0) -> Model:
    """A freshly initialized Qwen3, or Qwen3-MoE, in FP32, from torch's global generator."""
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "max_position_embeddings": tokenizer.model_max_length,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not experts:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    # The two experts of a token are together as wide as the dense model's MLP.
    sizes |= {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


def make_batch(
    tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], task: Task = QUICKSTART
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next-token labels, both int64 [len(problems), T], padded on the right; labels cover responses only.

    In a conversation they cover the model's turns."""
    conversations = worked(tokenizer, task, problems)
    width = max(len(conversation.token_ids) for conversation in conversations)
    tokens = torch.full((len(problems), width), tokenizer.pad_token_id)
    labels = torch.full((len(problems), width), IGNORE_INDEX)
    for i, conversation in enumerate(conversations):
        prompt = len(conversation.prompt_token_ids)
        response = torch.tensor(conversation.response_token_ids)
        end = prompt + len(response)
        tokens[i, :end] = torch.tensor(conversation.token_ids)
        labels[i, prompt:end] = response.masked_fill(~torch.tensor(conversation.mask), IGNORE_INDEX)
    return tokens[:, :-1], labels[:, 1:]


@torch.no_grad()
def check_accuracy(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Share of answers that greedy decoding would write to the letter, for the BF16 weights.

    One forward pass over the right answers tells: decoding follows an answer exactly as long as each of its tokens is
    the most likely one after those before it.
    """
    tokens, labels = batch
    published = copy.deepcopy(model).bfloat16()
    predicted = published(input_ids=tokens, use_cache=False).logits.argmax(-1)
    correct = (predicted == labels) | (labels == IGNORE_INDEX)
    return correct.all(dim=1).float().mean().item()


def warm_start(
    model: Model, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, exclude: set[Problem]
) -> int:
    """Trains `model` in place until the check reaches `recipe.target`; returns the steps taken."""
    rng = random.Random(recipe.seed)
    task = recipe.task
    checked = task.draw(CHECK_SIZE, rng, exclude)
    check = make_batch(tokenizer, checked, task)
    exclude = exclude | set(checked)
    in_blocks = {id(p) for p in model.model.layers.parameters() if p.ndim >= 2}
    matrices = [p for p in model.parameters() if id(p) in in_blocks]
    others = [p for p in model.parameters() if id(p) not in in_blocks]
    two_dimensional = [p for p in matrices if p.ndim == 2]
    muon = torch.optim.Muon(two_dimensional, lr=MUON_LR, weight_decay=0.0)
    betas = (0.9, 0.95)
    adamw = torch.optim.AdamW(others, lr=ADAMW_LR, betas=betas, weight_decay=0.0)
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (muon, MUON_LR),
        (adamw, ADAMW_LR),
    ]
    if stacks := [
        p for p in matrices if p.ndim == 3
    ]:  # of experts, which torch's Muon does not take
        from muon import SingleDeviceMuon

        optimizers.append((SingleDeviceMuon(stacks, lr=MUON_LR, weight_decay=0.0), MUON_LR))
    slow = 1.0
    accuracy = math.nan
    started = time.monotonic()
    for step in range(1, recipe.steps + 1):
        for optimizer, lr in optimizers:
            optimizer.param_groups[0]["lr"] = lr * slow * min(1.0, step / WARMUP_STEPS)
        tokens, labels = make_batch(tokenizer, task.draw(BATCH_SIZE, rng, exclude), task)
        logits = model(input_ids=tokens, use_cache=False).logits
        flat_logits = logits.flatten(0, 1)
        loss = F.cross_entropy(flat_logits, labels.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        model.zero_grad()
        live.advance()
        if loss.item() < CHECK_BELOW_LOSS and step % CHECK_EVERY == 0:
            accuracy = check_accuracy(model, check)
            if accuracy >= SLOW_ABOVE_ACCURACY:
                slow = SLOW_FACTOR
        if step % 10 == 0 or accuracy >= recipe.target:
            elapsed = time.monotonic() - started
            measured = "not yet measured" if math.isnan(accuracy) else f"{accuracy:.1%}"
            tell(f"step {step:4d}  loss {loss.item():.4f}  greedy {measured}  {elapsed:5.1f} s")
        if accuracy >= recipe.target:
            return step
    return recipe.steps


def write_data(folder: Path, task: Task, train: Sequence[Problem], test: Sequence[Problem]) -> None:
    from datasets import Dataset

    for split, problems in (("train", train), ("test", test)):
        rows = [task.to_row(problem, split, i) for i, problem in enumerate(problems)]
        Dataset.from_list(rows).to_parquet(str(folder / f"{split}.parquet"))


def is_up_to_date(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether `make` wrote `folder` with the same `settings`, and all its files are there."""
    recorded = _settings_in(folder)
    if any(recorded.get(name) != value for name, value in settings.items()):
        return False
    files = json.loads((folder / RECORD).read_text(encoding="utf-8")).get("files", [RECORD])
    return all((folder / name).exists() for name in files)


def make(recipe: Recipe) -> None:
    """Makes model and data, and puts both in place at the end."""
    torch.manual_seed(recipe.seed)
    task = recipe.task
    tokenizer = make_tokenizer(recipe.positions)
    model = make_model(tokenizer, recipe.experts)
    problems = task.draw(
        recipe.train_size + recipe.test_size, random.Random(f"data-{recipe.seed}"), set()
    )
    train = problems[: recipe.train_size]
    test = problems[recipe.train_size :]
    num_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"warm start: {num_parameters} parameters, to {recipe.target:.0%} in {recipe.steps} steps at most"
    )
    with live.phase("warm start", total=recipe.steps, unit="steps at most"):
        steps = warm_start(model, tokenizer, recipe, exclude=set(problems))

    model = model.bfloat16().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(HEAD_SCALE)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    greedy = check_accuracy(model, make_batch(tokenizer, test, task))
    print(
        f"greedy answers right to the letter, of {len(test)} test problems, BF16 weights: {greedy:.1%}"
    )
    record = {
        "settings": recipe.settings(OF_MODEL),
        "steps": steps,
        "num_parameters": num_parameters,
    }
    record |= {"greedy_accuracy": greedy}
    for target in (recipe.output, recipe.data):
        with whole_folder(target) as new:
            if target is recipe.output:
                model.save_pretrained(new)
                tokenizer.save_pretrained(new)
            else:
                write_data(new, task, train, test)
            files = sorted(path.name for path in new.iterdir())
            record["files"] = files
            (new / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def make_missing(recipe: Recipe, *, overwrite: bool = False, asks: str | None = None) -> None:
    """Make model and data, unless they were made of the same recipe.

    Raise UserError if a folder has other files, or was made of another recipe and `overwrite` is false. `asks`: the
    argument of the command that sets `overwrite`, for the error."""
    models = (recipe.output, recipe.settings(OF_MODEL))
    data = (recipe.data, recipe.settings(OF_DATA))
    if all(is_up_to_date(*each) for each in (models, data)):
        print(f"{recipe.output} and {recipe.data} are up to date")
        return
    for folder, settings in (models, data):
        check_place(folder)
        filled = folder.is_dir() and any(folder.iterdir())
        if filled and not (folder / RECORD).exists():
            what = f"will not replace {folder}, which this program did not write"
            raise UserError(
                what, why=f"it has no {RECORD}", fix="remove it yourself, or name another folder"
            )
        if filled and not overwrite:
            refuse_other_recipe(folder, settings, asks)
    make(recipe)
    print(f"wrote {recipe.output} and {recipe.data}")


def refuse_other_recipe(folder: Path, settings: Mapping[str, Any], asks: str | None) -> None:
    """Raise UserError if `folder` was made with other `settings`, which the error names."""
    before = _settings_in(folder)
    changes = [
        "its file is another" if name == "source" else f"{name}: {before.get(name)!r} -> {value!r}"
        for name, value in settings.items()
        if before.get(name) != value
    ]
    if not changes:
        return
    fix = f"move {folder} away"
    if asks:
        fix += f", or add {asks} to replace it"
    raise UserError(
        f"will not replace {folder}, which was made with other arguments",
        where=str(folder / RECORD),
        why="; ".join(changes) if before else "it is damaged, so nobody knows with which",
        fix=fix,
    )


def _settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings that the record in `folder` has, or {} if it is damaged."""
    try:
        settings = json.loads((folder / RECORD).read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return settings if isinstance(settings, dict) else {}
