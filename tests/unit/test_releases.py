"""Which files of the sources name a release of vLLM: only those that must change when vLLM is upgraded.

The lock files and pyproject.toml pin the releases. Everything else cites a file or function of vLLM without a release,
so that no comment is wrong after an upgrade.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkout import ROOT

HOMES = {"qarl/align/config_keys_read.json", "qarl/vllm_versions.py"}
"""The file that scripts/config_keys.py writes, and the module that knows what differs between releases."""
SOURCES = ("qarl", "configs", "examples", "scripts")
SUFFIXES = (".py", ".json", ".yaml", ".md")
RELEASE = re.compile(
    r"vllm(?!_).{0,120}?(?<![\d.])0\.(?:2[4-9]|3\d)(?:\.\d+)?(?![\d%])", re.I | re.S
)
"""The name of the package, not of a key or kernel, and up to 120 characters behind it a release from 0.24 on."""


def names_a_release(text: str) -> bool:
    return RELEASE.search(text) is not None


def files_that_name_a_release() -> set[str]:
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*")]
    sources = [path for path in paths if path.suffix in SUFFIXES and path.is_file()]
    return {
        Path(path).relative_to(ROOT).as_posix()
        for path in sources
        if names_a_release(path.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("vLLM 0.24 has no such class", True),
        ("(`vllm/lora/ops/torch_ops`,\n0.29.0)", True),
        ('{"vllm": "0.31.0"}', True),
        ("vLLM stores the scale", False),
        ("vLLM and verl 0.9.1", False),
        ("vLLM's mean is 0.253, and 0.29% of it", False),
        ('"vllm_cpu_kvcache_space_gib": 0.25', False),
    ],
)
def test_a_release_is_recognized(text: str, named: bool) -> None:
    assert names_a_release(text) == named


def test_only_the_homes_of_the_fact_name_a_release() -> None:
    assert files_that_name_a_release() == HOMES
