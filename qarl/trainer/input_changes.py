"""Compares what a run reads with what the run of its checkpoint read (`qarl.checks.inputs_record`).

A change that decides the policy or the data is refused, because the rest of the run would be a different experiment
than its beginning, and no metric would say so. A change of the reward's source, of a plugin's or of the validation
prompts is a note: people mend their code, of which a digest cannot say what it does, and a validation trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.checks.inputs_record import Record
from qarl.config.errors import show
from qarl.data.dated_template import fixed_date
from qarl.data.digests import COLUMNS
from qarl.errors import UserError

NOT_RECORDED = (
    "the checkpoint was written by an older version of QaRL, without a record of what its run read. Not compared: "
    "config.json, tokenizer, chat template and ends of responses of the model, the columns data_source and extra_info "
    "of the prompts, the reward's source, and the weights of a KL term's reference"
)
"""The note on a resume from a checkpoint without a record."""
_FRESH = "start fresh: a new name=..., or trainer.resume_mode=disable"
_MOST = 8
"""The most changes that an error names."""


@dataclass(frozen=True)
class Change:
    """A difference. `what`: with the old and the new value. `why`: its effect. `fix`: how to undo it."""

    what: str
    why: str
    fix: str
    refused: bool = True


@dataclass(frozen=True)
class Inputs:
    """What the run of a checkpoint read (`saved`; None if it has no record), and what this run reads (`now`)."""

    saved: Record | None
    now: Record

    def renamed(self, changed: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
        """Return those of the `changed` keys (old and new value) that name a file or folder with the same content, or
        one whose content `check` compares."""
        if self.saved is None:
            return {}
        return {
            key: values
            for key, values in changed.items()
            if key in _NAMES and _NAMES[key](self, *values)
        }

    def check(self, folder: Path) -> tuple[str, ...]:
        """Return notes about what differs from the run of the checkpoint in `folder`.

        Raise UserError if a difference decides what is trained."""
        return check_inputs(folder, self.saved, self.now)

    def _compared(self, old: str, new: str) -> bool:
        return True

    def _same_reward(self, old: str, new: str) -> bool:
        return self._same_function("reward", old, new)

    def _same_environment(self, old: str | None, new: str | None) -> bool:
        return self._same_function("environment", old or "", new or "")

    def _same_function(self, part: str, old: str, new: str) -> bool:
        """Return whether two values of a key name the same function of files with the same content. `part`: of the
        record, with the digests of the files."""
        assert self.saved is not None
        digest = self.saved.get(part)
        return (
            digest is not None
            and digest == self.now[part]
            and old.split(":")[-1] == new.split(":")[-1]
        )


_NAMES: Mapping[str, Callable[..., bool]] = {
    "model.path": Inputs._compared,
    "data.train_files": Inputs._compared,
    "reward.function": Inputs._same_reward,
    "rollout.environment": Inputs._same_environment,
}
"""Keys that name a file or a folder, and whether another name is the same input."""


def check_inputs(
    folder: Path, saved: Record | None, now: Record, *, fresh: str = _FRESH
) -> tuple[str, ...]:
    """Return notes about inputs that differ from those of the checkpoint in `folder`.

    `saved`: the checkpoint's record, or None if it has none. `fresh`: how to start a run without the checkpoint. Raises
    UserError if a difference decides what is trained."""
    if saved is None:
        return (NOT_RECORDED,)
    changes = list(changes_of(saved, now))
    if refused := [change for change in changes if change.refused]:
        more = [f"and {len(refused) - _MOST} more"] if len(refused) > _MOST else []
        if (
            saved.get("transformers") != now["transformers"]
        ):  # whose versions read the same files differently
            more.append(f"transformers was {saved.get('transformers')}, now {now['transformers']}")
        undo = list(dict.fromkeys(change.fix for change in refused))
        raise UserError(
            f"the run cannot resume from {folder}: what it reads has changed",
            where="; ".join([change.what for change in refused[:_MOST]] + more),
            why=refused[0].why,
            fix=f"{', and '.join(undo)}; or {fresh}",
        )
    return tuple(f"{change.what}: {change.why}" for change in changes)


def changes_of(saved: Record, now: Record) -> Iterator[Change]:
    """Yield every difference between two records."""
    for part, compare in _PARTS.items():
        if part in saved and saved[part] != now.get(part):
            yield from compare(saved, now)


def _config(saved: Record, now: Record) -> Iterator[Change]:
    before = saved["model"]
    after = now["model"]
    for key in sorted(before.keys() | after.keys()):
        old = before.get(key)
        new = after.get(key)
        if old == new:
            continue
        what = f"{key} of the model's config.json was {show(old)}, now {show(new)}"
        if saved["transformers"] != now["transformers"] and not (key in before and key in after):
            versions = f"transformers {saved['transformers']} and {now['transformers']}"
            yield Change(what, f"only one of {versions} has this key", "", refused=False)
            continue
        why = "from the same weights the model would compute something else than before"
        yield Change(what, why, "restore the config.json of the model")


def _ends(saved: Record, now: Record) -> Iterator[Change]:
    yield Change(
        f"responses ended at the token ids {saved['ends']}, now at {now['ends']}",
        "responses would end elsewhere than before",
        "restore eos_token in the model's tokenizer_config.json, and eos_token_id in its generation_config.json and "
        "config.json",
    )


def _tokenizer(saved: Record, now: Record) -> Iterator[Change]:
    why = "the reward would read another text for the same tokens"
    fix = "restore the tokenizer's files of the model"
    if saved["tokenizer"]["vocabulary"] != now["tokenizer"]["vocabulary"]:
        yield Change(
            f"the tokenizer's vocabulary {_digests(saved, now, 'tokenizer', 'vocabulary')}",
            why,
            fix,
        )
    elif saved["tokenizer"]["decoding"] != now["tokenizer"]["decoding"]:
        yield Change(
            f"the text that the tokenizer makes of tokens {_digests(saved, now, 'tokenizer', 'decoding')}",
            why,
            fix,
        )


def _template(saved: Record, now: Record) -> Iterator[Change]:
    """Yield a note if the prompts are the same nevertheless. If they are not, they say it themselves. TRL's are not
    recorded, so there another template is refused."""
    if "train" not in saved:
        why = "the same messages would be other prompts than before"
        yield Change("the chat template has changed", why, "restore the chat template of the model")
    elif saved["train"]["tokens"] == now["train"]["tokens"]:
        what = "the model's chat template has changed since the checkpoint"
        why = "the training prompts are the same, but later turns of an agent loop may not be"
        yield Change(what, why, "", refused=False)


def _train(saved: Record, now: Record) -> Iterator[Change]:
    before = saved["train"]
    after = now["train"]
    if _only_the_date(before, after):
        dates = ", ".join(before["dates"].values())
        yield Change(
            f"the training prompts differ because the chat template writes the date, which was {dates}, now "
            f"{', '.join(after['dates'].values())}",
            "the model would be trained on other prompts than before",
            f"give all steps the same date: {fixed_date(before['dates'])}",
        )
        return
    fix = "restore the files of data.train_files"
    if before["prompts"] != after["prompts"]:
        what = f"data.train_files had {before['prompts']} prompts, now {after['prompts']}"
        yield Change(what, "the run would draw other prompts than before", fix)
        return
    changed = [name for name in COLUMNS if before.get(name) != after.get(name)]
    if "tokens" in changed:
        template = saved["chat_template"] != now["chat_template"]
        fix = (
            "restore the chat template of the model"
            if template
            else f"{fix}, and the tokenizer's files of the model"
        )
    names = {"tokens": "the tokens of the prompts", "ground_truth": "reward_model.ground_truth"}
    for name in changed:
        what = f"{names.get(name, name)} in data.train_files {_digests(saved, now, 'train', name)}"
        why = "the rest of the run would be trained on other data than its beginning"
        yield Change(what, why, fix)


def _only_the_date(before: Record, after: Record) -> bool:
    same = all(
        before.get(name) == after.get(name) for name in ("prompts", *COLUMNS) if name != "tokens"
    )
    return same and "undated" in before and before["undated"] == after.get("undated")


def _val(saved: Record, now: Record) -> Iterator[Change]:
    if saved["val"] is None or now["val"] is None:
        return
    what = "the validation prompts (data.val_files) have changed since the checkpoint"
    yield Change(
        what, "figures of validations before and after it cannot be compared", "", refused=False
    )


def _reward(saved: Record, now: Record) -> Iterator[Change]:
    if saved["reward"] is None or now["reward"] is None:
        return
    what = f"the source of the reward function {_digests(saved, now, 'reward')}"
    yield Change(
        what, "rewards before and after the resume may not be comparable", "", refused=False
    )


def _scorer(saved: Record, now: Record) -> Iterator[Change]:
    if saved["scorer"] is None or now["scorer"] is None:
        return
    what = f"the rewards were those of {saved['scorer']}, now of {now['scorer']}"
    yield Change(what, "its scores may have changed, and its problems", "", refused=False)


def _environment(saved: Record, now: Record) -> Iterator[Change]:
    if saved["environment"] is None or now["environment"] is None:
        return
    what = f"the source of the environment {_digests(saved, now, 'environment')}"
    yield Change(
        what,
        "it may answer other than before the resume, and rewards may differ",
        "",
        refused=False,
    )


def _plugins(saved: Record, now: Record) -> Iterator[Change]:
    before = saved["plugins"]
    after = now["plugins"]
    why = "the steps before and after the resume may be trained in different ways"
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield Change(f"the plugin {name} is no longer loaded", why, "", refused=False)
        elif name not in before:
            yield Change(f"the plugin {name} was not loaded before", why, "", refused=False)
        elif None not in (before[name], after[name]) and before[name] != after[name]:
            what = f"the source of the plugin {name} {_digests(saved, now, 'plugins', name)}"
            yield Change(what, why, "", refused=False)


def _reference(saved: Record, now: Record) -> Iterator[Change]:
    if saved["reference"] is None or now["reference"] is None:
        what = "the weights of the KL term's reference cannot be compared"
        yield Change(what, "the Hub names no commit for one of them", "", refused=False)
        return
    yield Change(
        f"the weights in model.path {_digests(saved, now, 'reference')}",
        "they are the reference of the KL term, which would pull the policy elsewhere than before",
        "restore the weights in model.path",
    )


_PARTS: Mapping[str, Callable[[Record, Record], Iterator[Change]]] = {
    "model": _config,
    "ends": _ends,
    "tokenizer": _tokenizer,
    "chat_template": _template,
    "train": _train,
    "val": _val,
    "reward": _reward,
    "scorer": _scorer,
    "environment": _environment,
    "plugins": _plugins,
    "reference": _reference,
}
"""Every part of a record, and how its differences are told."""


def _digests(saved: Record, now: Record, *path: str) -> str:
    """Return the words for a digest that has changed."""
    old: Any = saved
    new: Any = now
    for name in path:
        old = old[name]
        new = new[name]
    return f"changed ({_short(old)}, now {_short(new)})"


def _short(digest: str) -> str:
    return digest if digest.startswith("commit ") else f"SHA-256 {digest[:8]}"
