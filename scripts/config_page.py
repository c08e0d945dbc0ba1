"""Write docs/lookup/config_reference.md: every key of a config, from the descriptions in `qarl.config.schema`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from qarl.config.help import Key, about_section, key_table

PAGE = Path(__file__).resolve().parents[1] / "docs/lookup/config_reference.md"
_HEAD = """\
# Configuration

<!-- Made by scripts/config_page.py from qarl/config/schema.py: change it there. -->

A run is `qarl train config=NAME.yaml KEY=VALUE ...`. Later wins: the defaults below, the YAML file, then the overrides.
Values are YAML 1.2. Unknown keys are errors, and all errors come at once, before any work. `qarl train --help SECTION`
prints the same as this page. Keys are named as in verl if verl has them: batch sizes of `data` and
`ppo_mini_batch_size` count prompts, micro-batch sizes count responses. "The paper" is
[arXiv 2604.07853](https://arxiv.org/abs/2604.07853). The paper's runs have
[a page](../do/paper_runs.md).
"""
_COLUMNS = ("key", "meaning", "values", "unit", "default")


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join(
        [_HEAD, *(line for name, keys in key_table().items() for line in _section(name, keys))]
    )


def _section(name: str, keys: Sequence[Key]) -> Iterator[str]:
    yield f"## `{name}`" if name else "## Top level"
    for paragraph in about_section(name) if name else ():
        yield f"\n{paragraph}"
    yield f"\n| {' | '.join(_COLUMNS)} |"
    yield f"|{'---|' * len(_COLUMNS)}"
    for key in keys:
        default = f"`{key.default}`" if key.default else "required"
        yield f"| `{key.name}` | {_cell(key.meaning)} | {_cell(key.values)} | {key.unit} | {_cell(default)} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
