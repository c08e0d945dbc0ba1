"""Warns of values that are allowed but almost certainly a mistake."""

from __future__ import annotations

from qarl.config.bounds import unusual_values
from qarl.doctor.context import Context
from qarl.doctor.findings import Topic


def check_values(context: Context, topic: Topic) -> None:
    """Whether every number is within sane bounds."""
    found = unusual_values(context.config)
    for unusual in found:
        topic.warning(unusual.what, where=unusual.key, why=unusual.why, fix=unusual.fix)
    if not found:
        topic.ok("every number is within sane bounds")


CHECKS = (check_values,)
