"""Thresholds for the quickstart's mismatch in W4A16 and W8A8, as `qarl diagnose calibrate` finds them."""

from __future__ import annotations

import tempfile

from benchmarks.proofs.harness import QUIET, Record, Row, run_config, timed
from qarl.diagnose.arguments import CalibrateRequest
from qarl.diagnose.calibrate import REFERENCE
from qarl.diagnose.calibrate import run as calibrate


def thresholds(
    record: Record,
    *,
    schemes: tuple[str, ...] = ("w4a16", "w8a8"),
    batches: int = 16,
    share: float = 0.05,
) -> None:
    """At `exact`, δ is 0 and no threshold is proposed; elsewhere none loses more than `share`, and `exact` loses none.

    The levels are `off`, `linears`, `model` and `exact`, on the same responses from the model that the quickstart
    starts with."""
    for scheme in schemes:
        if not record.wants(scheme):
            continue
        row: Row = {"share": share}
        with tempfile.TemporaryDirectory() as folder, timed(row):
            config = run_config(
                "quickstart.yaml", QUIET | {"output_dir": folder, "quant.scheme": scheme}
            )
            row |= calibrate(config, CalibrateRequest(batches=batches, share=share))
        record.add(scheme, row, ok=_holds(row, share))


def _holds(report: Row, share: float) -> bool:
    levels = report["levels"]
    proposed = [row for level in levels.values() for row in level["thresholds"] if "keys" in row]
    lossless = all(row["reference_loses"] == 0 and row["loses"] <= share for row in proposed)
    reference = levels[REFERENCE]
    exact = reference["mismatch"]["abs_max"] == 0 and all(
        "none" in row for row in reference["thresholds"]
    )
    return bool(proposed) and lossless and exact
