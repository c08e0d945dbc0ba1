"""A phase of a long step: what it is called, how much of it is done, and since when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from qarl.progress import text


class Sampled:
    """Counts of responses that are sampled.

    done             responses that have ended
    tokens           tokens of all responses so far
    tokens_of_done   tokens of those that have ended
    """

    def __init__(self, done: int, tokens: int, tokens_of_done: int) -> None:
        self.done = done
        self.tokens = tokens
        self.tokens_of_done = tokens_of_done


Measure = Callable[[], Sampled]
"""A function that counts what is done. The thread that writes the line calls it, while the work goes on."""


class Shown(Protocol):
    """What a phase needs of `qarl.progress.screen.Display`, where the attributes are explained."""

    clock: Callable[[], float]
    tokens_before: dict[tuple[str, int | None], int]

    def open(self, phase: Phase) -> None: ...

    def close(self, phase: Phase) -> None: ...


class Phase:
    """A context in which something lasts. `Display.phase` makes it.

    name, unit   of the phase ("update"), and of what is counted in it ("micro-batches")
    total        number of units, or None if it is unknown
    done         number of units that are done
    quiet        whether it has no live line, because other programs write to the terminal meanwhile
    """

    def __init__(
        self,
        display: Shown,
        name: str,
        total: int | None,
        unit: str,
        measure: Measure | None,
        quiet: bool,
    ) -> None:
        self._display = display
        self._measure = measure
        self._counted = Sampled(0, 0, 0)
        self._begun = 0.0
        self.name = name
        self.total = total
        self.unit = unit
        self.quiet = quiet
        self.done = 0

    def __enter__(self) -> Phase:
        self._begun = self._display.clock()
        self._display.open(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.close(self)

    def advance(self, count: int = 1) -> None:
        """Count `count` units as done."""
        self.done += count

    def extend(self, count: int) -> None:
        """Add `count` units to the total, for work that is done again."""
        if self.total is not None:
            self.total += count

    def sampled(self, tokens: int) -> None:
        """Remember the tokens of all responses, which have ended, for the next phase with as many responses."""
        self._display.tokens_before[self._work] = tokens

    @property
    def _work(self) -> tuple[str, int | None]:
        """Identifies phases with the same amount of work."""
        return (self.name, self.total)

    def elapsed(self) -> float:
        return self._display.clock() - self._begun

    def measure(self) -> None:
        """Let `measure` count, if there is one."""
        if self._measure is not None:
            self._counted = self._measure()
            self.done = self._counted.done

    def figures(self) -> Sequence[str]:
        """Return what is done, how fast, and how long the rest takes, as far as they are known."""
        if not self.unit:
            return ()
        elapsed = self.elapsed()
        tokens = None if self._measure is None else self._counted.tokens
        shown = [text.amount(self.done, self.total, self.unit)]
        # Without tokens there is no speed yet: verl counts only those of responses that have ended.
        speed = text.rate(tokens, elapsed) if tokens else None
        if speed is not None:
            shown.append(f"{speed} tokens/s")
        left = self._seconds_left(elapsed, tokens)
        if left is not None:
            shown.append(f"about {text.duration(left)} left")
        return shown

    def _seconds_left(self, elapsed: float, tokens: int | None) -> float | None:
        if self.total is None:
            return None
        share = text.share_done(
            self.done,
            self.total,
            tokens=tokens,
            tokens_of_done=self._counted.tokens_of_done,
            tokens_before=self._display.tokens_before.get(self._work),
        )
        return text.seconds_left(share, elapsed)
