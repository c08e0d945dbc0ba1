"""Writes `report.html`, one file with the page's frame, style, script and the contents of a run.

The contents are a block of JSON that the script reads. Sampled text cannot become markup: every `<` in the block is
escaped, and the script writes text only as text, never as HTML. The page's Content-Security-Policy allows only this
script and this style, by their hashes. It allows no requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from qarl.checkpoint.storage import write_text
from qarl.report.contents import contents

REPORT_FILE = "report.html"


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` of a run folder completely or not at all, and return its path.

    Raise UserError if the folder has no metrics file, and StorageError if writing fails."""
    path = Path(run_dir) / REPORT_FILE
    write_text(path, page(contents(run_dir)))
    return path


def page(found: dict[str, Any]) -> str:
    """Return the HTML of the report that shows `found`, the dict of `contents`."""
    style, script = (_packaged(f"page.{kind}") for kind in ("css", "js"))
    data = json.dumps(found, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; form-action 'none'"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(str(found["name"])),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": data,
    }
    # The frame is split at its marks before texts are inserted, so a mark inside a text stays text.
    before, *rest = _packaged("page.html").split("@@")
    return before + "".join(parts[piece] if place % 2 == 0 else piece for place, piece in enumerate(rest))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _packaged(name: str) -> str:
    return files("qarl.report").joinpath(name).read_text(encoding="utf-8")
