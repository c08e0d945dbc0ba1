"""README, docs/ and the files around them: every link and every named file is there, every result is in the index."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from glossary import glossary_metrics

from benchmarks.proofs import index
from benchmarks.proofs.registry import proofs, results
from qarl.verl.followed_log import RENAMED

TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "benchmarks/results"
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_ROOTS = "qarl|tests|scripts|configs|docs|benchmarks|requirements|examples"
_PATH = re.compile(
    rf"(?<![\w/.-])(?:{_ROOTS})/[\w./*-]*\w/?|(?<![\w/.-])\.(?:ci|github)/\w[\w./-]*"
)
_TEST = re.compile(r"(?<![\w/])test_\w+\.py")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", _CODE.sub("", text_of(page)), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in _LINK.findall(_CODE.sub("", text_of(page))):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def missing_paths(page: Path) -> list[str]:
    """Files and folders of the repository that a page names, code blocks included, and that are not there."""
    named = {match.group().rstrip(".") for match in _PATH.finditer(text_of(page))}
    tests = set(_TEST.findall(text_of(page))) - {
        path.name for path in (ROOT / "tests").rglob("test_*.py")
    }
    return sorted({name for name in named if not any(ROOT.glob(name.rstrip("/")))} | tests)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_file_is_there(page: Path) -> None:
    assert missing_paths(page) == []


def test_every_metric_has_a_row_in_the_glossary() -> None:
    """Every name that the sources spell out; tests/integration/e2e/test_local_trainer.py looks at what a run logs."""
    rows = glossary_metrics()
    kinds = "|".join(sorted({name.partition("/")[0] for name in rows}))
    folders = [ROOT / "qarl" / name for name in ("metrics", "rollout", "tbpo", "trainer", "verl")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    spelled = {
        node.value
        for path in sources
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(rf"({kinds})/\w+(/\w+)*", node.value)
    }
    assert len(spelled) > 30 and spelled - rows - set(RENAMED) == {"critic/score"}
    assert {name.partition("/")[0] for name in rows} >= {
        "mismatch",
        "actor",
        "publish",
        "resume",
        "startup",
    }


def test_bare_names_in_the_layout_table_are_files() -> None:
    """`schema.py` in the row of `qarl/config/` is qarl/config/schema.py."""
    rows = re.findall(
        r"^\| `(qarl/\w+/)` \| (.*) \|$",
        text_of(ROOT / "docs/understand/architecture.md"),
        flags=re.MULTILINE,
    )
    assert len(rows) > 8
    named = {
        f"{folder}{name}"
        for folder, text in rows
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", text)
    }
    assert len(named) > 30
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_unconfirmed_claim_names_code_and_a_test_that_are_there() -> None:
    """docs/lookup/results/gpu.md: a test of tests/gpu, or parts of scripts/gpu_parts.py. Every other test of tests/gpu
    has passed on a device."""
    text = (ROOT / "docs/lookup/results/gpu.md").read_text(encoding="utf-8")
    table = text.split("<!-- unconfirmed -->")[1].split("<!-- /unconfirmed -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.strip().splitlines()[2:]
    ]
    sys.path.insert(0, str(ROOT / "scripts"))
    from gpu_parts import PARTS

    named = set()
    for claim, code, test in rows:
        assert claim and (ROOT / code.strip("`")).exists(), code
        place = test.strip("`")
        if place.startswith("--parts "):
            assert set(place.removeprefix("--parts ").split(",")) <= PARTS.keys(), test
        else:
            file, _, function = place.partition("::")
            assert f"\ndef {function}(" in (ROOT / file).read_text(encoding="utf-8"), test
            named.add(place)
    tests = {
        f"tests/gpu/{path.name}::{name}"
        for path in (ROOT / "tests/gpu").glob("test_*.py")
        for name in re.findall(
            r"^def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    }
    assert named <= tests
    document = json.loads((RESULTS / "gpu_check_2026-11-27.json").read_text(encoding="utf-8"))
    lines = [line for part in document["parts"].values() for line in part["output"]]
    passed = (
        re.search(r"(tests/gpu/\S+::test_\w+).*PASSED|PASSED.*(tests/gpu/\S+::test_\w+)", line)
        for line in lines
    )
    assert {match[1] or match[2] for match in passed if match} >= tests - named


def test_the_index_of_results_is_that_of_the_registry() -> None:
    """Every file is in the registry, with a date, a commit, and a page that cites its proof or the file."""
    assert text_of(index.PAGE) == index.page(), "run python -m benchmarks.proofs --index"
    assert sorted(result.file for result in results()) == sorted(
        path.name for path in RESULTS.iterdir()
    )
    for line in index.page().splitlines()[index.HEAD.count("\n") :]:
        *_, date, commit, page = line.strip(" |").split(" | ")
        assert (
            re.match(r"2\d{3}-\d{2}-\d{2}", date)
            and re.fullmatch(r"[0-9a-f]{7}\*?", commit)
            and page
        ), line
    for name, proof in proofs().items():
        page = next(result.page for result in results() if result.file == proof.file)
        text = text_of(ROOT / "docs" / page)
        assert (
            f"`{name}`" in text or f"proofs {name}" in text or proof.file.partition(".")[0] in text
        ), name
        assert proof.load().__doc__, name


def test_the_figure_is_that_of_the_result(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import alignment_figure

    alignment_figure.draw(
        alignment_figure.mean_deltas(json.loads(text_of(alignment_figure.RESULT))),
        tmp_path / "new.svg",
    )
    # Numbers and names: another matplotlib may draw the same with other paths.
    new, old = (
        re.findall(r"<text[^>]*>([^<]*)</text>", text_of(path))
        for path in (tmp_path / "new.svg", alignment_figure.FIGURE)
    )
    assert new == old and len(new) > 15
