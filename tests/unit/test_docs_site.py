"""mkdocs.yml and its hooks, without MkDocs: every page is in the navigation, and links out of docs/ are rewritten.

tests/unit/test_docs.py looks at the links and anchors of all pages; `make docs` checks those of the site.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT

SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SHELVES = ("learn", "do", "lookup", "understand")
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r" *(?:[-*]|\d+\.) ")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("docs_site")


def in_navigation(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
        return
    for part in entry.values() if isinstance(entry, dict) else entry:
        yield from in_navigation(part)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(in_navigation(SITE["nav"]))
    assert sorted(listed) == [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]


def test_a_tab_has_the_pages_of_one_shelf() -> None:
    shelves = [{Path(page).parts[0] for page in in_navigation(tab)} for tab in SITE["nav"]]
    assert shelves == [{"index.md"}, *({shelf} for shelf in SHELVES)]


def test_the_start_and_the_readme_link_to_every_shelf() -> None:
    for name in ("docs/index.md", "README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)\s#]+)", text)
        named = {Path(link.removeprefix("docs/")).parts[0] for link in links}
        assert named >= set(SHELVES), name


def test_every_page_that_code_names_is_there() -> None:
    """Messages, docstrings, configs and programs name pages by their paths in the repository."""
    named = {}
    for folder in ("qarl", "configs", "examples", "scripts", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".toml") and "results" not in path.parts:
                text = path.read_text(encoding="utf-8")
                named |= dict.fromkeys(re.findall(r"(?<![\w/])docs/[a-z_/]+\.md", text), path.name)
    assert len(named) > 15
    assert {page: path for page, path in named.items() if not (ROOT / page).is_file()} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_and_tables_begin_after_an_empty_line(page: Path) -> None:
    """Python-Markdown takes them for a part of the paragraph otherwise, which a Git host does not."""
    lines = FENCED.sub("", page.read_text(encoding="utf-8")).splitlines()
    wrong = []
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        # Four spaces are a paragraph inside an item, after which an item needs an empty line, too.
        in_list = ITEM.match(before) or re.match(r" {1,3}\S", before)
        begins_list = ITEM.match(line) and not in_list
        begins_table = after.startswith("|-") and not before.startswith("<!--")
        if before.strip() and (begins_list or begins_table):
            wrong.append(line)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_stands_in_a_list_is_indented_by_four(page: Path) -> None:
    """Python-Markdown ends a list at a code block or paragraph with fewer spaces."""
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?<=\n\n) {1,3}\S.*", text) == []


def test_a_link_out_of_the_pages_leads_to_a_copy(site: Any) -> None:
    page = ROOT / "docs/learn/own_task.md"
    text = "[a](../../examples/own_task.py) [b](../do/lora.md#x) [c](https://a.b) [d](#e)"
    assert site.rewritten(text, page) == (
        "[a](../source/examples/own_task.py) [b](../do/lora.md#x) [c](https://a.b) [d](#e)"
    )
    text = "[docs](docs/do/lora.md) [code](examples/own_task.py)"
    assert site.rewritten(text, ROOT / "README.md") == (
        "[docs](../do/lora.md) [code](examples/own_task.py)"
    )


def test_copies_are_the_files_that_pages_link_to(site: Any) -> None:
    found = site.linked_outside()
    assert ROOT / "CONTRIBUTING.md" in found and ROOT / "examples/own_task.py" in found
    assert all(path.is_file() for path in found)
    linked = {path for page in PAGES for path in site.targets(page)}
    assert linked <= {*found, *(ROOT / "docs").rglob("*")}
