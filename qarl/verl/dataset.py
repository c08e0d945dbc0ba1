"""verl's dataset of prompts, with the rows that QaRL reads (`data.custom_cls`).

verl reads JSON with the package `datasets`, which turns text that looks like a date into a date. It also refuses files
whose columns differ. This class reads each file as the local backend does (`qarl.data.rows`). Everything else is
verl's: the order, the choice of `val_max_samples` rows, the filter for long prompts and what a row gives to a rollout.

A column that only some files have is null in the rows of the others. `__rollout_n__` is 1 there, as in `qarl eval`,
because verl needs a number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from verl.utils.dataset.rl_dataset import RLHFDataset

from qarl.data.rows import read_rows

_SAMPLES = "__rollout_n__"


class Rows:
    """The rows of several files, one after another, with the methods of a `datasets.Dataset` that verl calls."""

    def __init__(
        self, files: Sequence[Sequence[Mapping[str, Any]]], locations: Sequence[tuple[int, int]]
    ) -> None:
        """`locations`: file and row of each row."""
        self._files = files
        self._locations = locations
        self._columns = list(dict.fromkeys(column for rows in files for column in rows[0]))

    @classmethod
    def read(cls, names: Sequence[str]) -> Rows:
        """Read files. Raise UserError if one cannot be read."""
        files = [read_rows(name) for name in names]
        locations = [(file, row) for file, rows in enumerate(files) for row in range(len(rows))]
        return cls(files, locations)

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a copy of a row, because verl changes the rows that it gets."""
        file, row = self._locations[index]
        values = copy.deepcopy(self._files[file][row])
        complete = {column: values.get(column) for column in self._columns}
        if complete.get(_SAMPLES, 1) is None:
            complete[_SAMPLES] = 1
        return complete

    def select(self, indices: Sequence[int]) -> Rows:
        return Rows(self._files, [self._locations[index] for index in indices])

    def filter(self, function: Callable[[dict[str, Any]], bool], **_: Any) -> Rows:
        """Return the rows for which `function` is true. verl's other arguments set processes and a progress bar."""
        return self.select([index for index in range(len(self)) if function(self[index])])


class QaRLDataset(RLHFDataset):
    """verl's dataset, but for the reading of files."""

    def _read_files_and_tokenize(self) -> None:
        """Set `dataframe`. The rows that `max_samples` leaves are those that verl chooses."""
        rows = Rows.read(self.data_files)
        if 0 < self.max_samples < len(rows):
            rows = rows.select(self._chosen(len(rows)))
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def _chosen(self, total: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.max_samples))
        draw = np.random.default_rng() if self.seed is None else np.random.default_rng(self.seed)
        chosen: list[int] = draw.choice(total, size=self.max_samples, replace=False).tolist()
        return chosen
