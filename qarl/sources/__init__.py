"""Sources of problems, and the command `qarl data`, which writes their problems as data files.

A source is one module: `read(words, seed)` returns a `qarl.sources.problems.Stream`, `describe(topics)` its help. It
stands in `SOURCES`. Everything else is the same for all: distinct prompts, the split, verl's schema, the files.
"""

from __future__ import annotations

SOURCES = {
    "reasoning_gym": ("qarl.sources.reasoning_gym", "endless problems of 106 tasks, with scorers"),
}
"""Name of a source -> (its module, a summary)."""
COMMON = ("size", "validation", "seed", "out", "instruction", "system", "format", "overwrite")
"""Keys of every source (`qarl.sources.__main__.DataRequest`)."""
