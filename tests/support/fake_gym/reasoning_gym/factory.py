from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Optional

import numpy


@dataclass
class SumsConfig:
    low: int = 0
    high: int = 99
    signs: tuple[str, ...] = ("+",)
    scale: float = 1.0
    words: bool = False
    limit: Optional[int] = None  # noqa: UP045  # as the library writes it
    seed: Optional[int] = None  # noqa: UP045  # as the library writes it
    size: int = 500

    def validate(self) -> None:
        assert self.low <= self.high, "high must be at least low"


class Sums:
    """Sums of two numbers. The answer `boom` makes the scorer raise, and `forever` never lets it end. `tolerant`,
    `stubborn` and `deaf` do not either, and the scorer catches whatever ends them."""

    def __init__(self, config: SumsConfig) -> None:
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.config.size:
            raise IndexError(index)
        rng = random.Random((self.config.seed or 0) + index)
        a = rng.randint(self.config.low, self.config.high)
        b = rng.randint(self.config.low, self.config.high)
        metadata = {
            "source_dataset": "sums",
            "pair": (a, b),
            "by_number": {a: "first"},
            "huge": 2**80 + a,
            "scalar": numpy.float64(a / 3),
            "hashed": sorted({"x", "y", "z"}, key=hash),
        }
        return {"question": f"What is {a} + {b}?", "answer": str(a + b), "metadata": metadata}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        if answer == "boom":
            raise ValueError("cannot be read")
        while answer == "forever":
            pass
        if answer in ("tolerant", "stubborn"):
            try:
                while True:
                    sum(range(1000))
            except:  # noqa: E722  as some scorers do
                while answer == "stubborn":
                    pass
                return 1.0
        while answer == "deaf":
            try:
                while True:
                    sum(range(1000))
            except:  # noqa: E722  as above
                pass
        a, b = entry["metadata"]["pair"]
        assert isinstance(entry["metadata"]["pair"], tuple)
        return self.config.scale if answer == str(a + b) else 0.0


@dataclass
class OpenConfig(SumsConfig):
    pass


class Open(Sums):
    """A task whose problems have no single right answer."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = super().__getitem__(index)
        return {**entry, "answer": None}


DATASETS = {"sums": (Sums, SumsConfig), "open_sums": (Open, OpenConfig)}
