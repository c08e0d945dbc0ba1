"""With which keys a repeated command resumes a run, for messages that promise it.

Usually these are the same keys. With `trainer.resume_mode=disable` the same command moves the run aside and starts
afresh, and in verl the same command with `resume_path` begins again from the checkpoint that it names
(`qarl.verl.resume`).
"""

from __future__ import annotations

from collections.abc import Sequence

from qarl.config import Config

MODE = "trainer.resume_mode"
ORIGIN = "trainer.resume_from_path"


def keys_that_resume(config: Config) -> str:
    """Return which keys to change, such as "with trainer.resume_mode=auto ", or "" if the same command resumes."""
    mode = config.trainer.resume_mode
    if mode == "disable":
        return f"with {MODE}=auto "
    if mode == "resume_path" and config.backend == "verl":
        return f"with {MODE}=auto and without {ORIGIN} "
    return ""


def arguments_that_resume(config: Config, argv: Sequence[str]) -> list[str]:
    """Return `argv`, the arguments of `qarl train` for this config, as they resume its run."""
    if not keys_that_resume(config):
        return [*argv]
    others = [argument for argument in argv if argument.partition("=")[0] not in (MODE, ORIGIN)]
    return [*others, f"{MODE}=auto"]
