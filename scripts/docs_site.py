"""Hooks of MkDocs for `make docs`: links that lead out of docs/, and the anchors of a Git host.

Pages link to figures, programs and CONTRIBUTING.md by their paths in the repository, so that the Markdown can be read
as it lies. MkDocs knows only what is under docs/. So every file that a page links to, and every file that such a file
links to, is added to the site under source/, and the links are rewritten. MkDocs then checks them like all others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = "source"
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!https?://|mailto:|#)([^)\s#]+)")


def on_config(config: Any) -> Any:
    """A heading has the anchor that a Git host gives it."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path in linked_outside():
        files.append(File.generated(config, site_path(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return rewritten(markdown, Path(page.file.abs_src_path))


def linked_outside() -> list[Path]:
    """The files outside of docs/ that pages link to, and those that these link to."""
    found: dict[Path, None] = {}
    waiting = sorted(DOCS.rglob("*.md"))
    while waiting:
        for target in targets(waiting.pop()):
            if target not in found and DOCS not in target.parents and target.is_file():
                found[target] = None
                if target.suffix == ".md":
                    waiting.append(target)
    return sorted(found)


def targets(page: Path) -> Iterator[Path]:
    """The files that a page links to by a relative path."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for match in _LINK.finditer(text):
        yield Path(os.path.normpath(page.parent / match[1]))


def site_path(path: Path) -> str:
    """The place of a file in the site's sources."""
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    return f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"


def rewritten(markdown: str, page: Path) -> str:
    """A page's Markdown with links between the places that files have in the site."""
    here = Path(site_path(page)).parent

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match[1]))
        return os.path.relpath(site_path(target), here)

    return _LINK.sub(link, markdown)
