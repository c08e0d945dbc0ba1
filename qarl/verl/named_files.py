"""Files and groups that verl's own command line names, and that are not there.

verl opens the data in Ray's workers, so a path with a typing error ends in a traceback after most of a minute. A group
of QaRL's without `hydra.searchpath` is worse: Hydra takes `+qarl=w4a16` for a text under the new key `qarl`, and verl
trains without quantization. Nothing of QaRL is in that config, so the words of the command line are looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from qarl.errors import UserError

SEARCHPATH = "hydra.searchpath=[pkg://qarl.verl]"
_GROUP = re.compile(r"\+{1,2}qarl(_loss|_machine)?=.+")
_OWN_CONFIG = re.compile(r"--config-(dir|path|name)(=.*)?|-c[dpn].*")
"""Options of Hydra with which a user's own config may set the search path."""


def refuse_unread_groups(words: Sequence[str]) -> None:
    """Raise UserError if `words`, the command line of a process, starts one of verl's programs with a group of QaRL's
    and without QaRL's search path."""
    of_verl = any(word.startswith("verl.") or "verl/trainer/" in word for word in words[:6])
    groups = [word for word in words if _GROUP.fullmatch(word)]
    can_be_found = any(
        "pkg://qarl.verl" in word or "qarl/verl" in word or _OWN_CONFIG.fullmatch(word)
        for word in words
    )
    if of_verl and groups and not can_be_found:
        raise UserError(
            f"{groups[0]} would have no effect",
            where="verl's command line",
            why="without hydra.searchpath Hydra does not find QaRL's groups, and takes the word for a key of that name",
            fix=f"add '{SEARCHPATH}' before it",
        )


def missing_files(composed: Any) -> Iterator[UserError]:
    """Yield an error for each file or folder of verl's config `composed` that is named by a local path and missing."""
    data = composed.data
    reward = composed.reward.custom_reward_function
    model = composed.actor_rollout_ref.model
    named = [("actor_rollout_ref.model.path", model.path)]
    if str(data.custom_cls.path or "pkg://qarl.").startswith("pkg://qarl."):
        named += [("data.train_files", file) for file in _listed(data.train_files)]
        named += [("data.val_files", file) for file in _listed(data.val_files)]
    named.append(("reward.custom_reward_function.path", reward.path))
    for key, path in named:
        if not _is_missing(key, path):
            continue
        looked = os.path.abspath(os.path.expanduser(path.removeprefix("file://")))
        yield UserError(
            f"{key}={path} does not exist",
            where=key,
            why=f"looked for {looked}",
            fix="correct the path; a relative one starts in the folder of the command",
        )


def _listed(files: Any) -> list[Any]:
    if files is None:
        return []
    return [files] if isinstance(files, str) else list(files)


def _is_missing(key: str, path: Any) -> bool:
    """Return whether `path` is on this machine's disks and not there. A model may be a name of the Hub."""
    if not isinstance(path, str) or not path:
        return False
    plain = path.removeprefix("file://")
    if "://" in plain or (key.endswith("model.path") and not plain.startswith(("/", "~", "."))):
        return False
    return not os.path.exists(os.path.expanduser(plain))
