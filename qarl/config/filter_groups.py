"""The section `filter_groups`: dynamic sampling of DAPO (arXiv 2503.14476), verl's `algorithm.filter_groups`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from qarl.config.types import Sane, Section, Unit


class FilterGroupsConfig(Section):
    """Dynamic sampling of DAPO: other prompts in place of those whose responses all have the same reward."""

    enable: bool = False
    """Leave out prompts whose responses all have the same reward, which teach nothing, and sample others. Needs
    backend=local; with backend=verl, `verl.algorithm.filter_groups.enable` is verl's own filter."""

    max_num_gen_batches: Annotated[int, Unit("batches"), Sane(2, 100)] = Field(default=10, ge=1)
    """Most batches of data.train_batch_size prompts that a step samples. If too few groups differ then, groups of
    equal rewards fill the step's batch."""
