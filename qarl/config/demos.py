"""The shipped configs whose model and data `qarl demo` makes: their names, folders and commands. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Demo:
    """A shipped config that runs on a CPU. `model`: its model folder. `made_by`: what makes only the model and data, in
    a checkout. `task`, `experts`: which model and data (`qarl.demo.tiny_model`)."""

    config: str
    model: str
    made_by: str
    task: str = "column_addition"
    experts: int = 0


DEFAULT = "quickstart"
DEMOS = {
    DEFAULT: Demo("quickstart.yaml", "models/tiny-qwen3", "make quickstart"),
    "moe": Demo("quickstart_moe.yaml", "models/tiny-qwen3-moe", "make model-moe", experts=8),
    "verl": Demo("quickstart_verl.yaml", "models/tiny-qwen3", "make quickstart"),
    **{
        task: Demo(
            f"{task}.yaml",
            f"models/tiny-qwen3-{task.replace('_', '-')}",
            f"python scripts/make_tiny_model.py --task {task}",
            task=task,
        )
        for task in ("addition_chain", "letter_sorting")
    },
}
"""Name of a demo -> what it runs."""


def how_to_make(path: str) -> str | None:
    """Return the commands that make `path`, a model folder or data file of shipped configs; None if no command does."""
    names = [name for name, demo in DEMOS.items() if Path(path) == Path(demo.model)]
    names = names or [name for name, demo in DEMOS.items() if Path(path).parent == Path("data") / demo.task]
    if not names:
        return None
    commands = " or ".join(f"`qarl demo{'' if name == DEFAULT else f' {name}'}`" for name in names)
    return f"{commands} makes it here and trains; in a checkout, `{DEMOS[names[0]].made_by}` makes it, too"
