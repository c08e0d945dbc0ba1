"""Family x key: every row was measured through `qarl train`, and no row that is accepted is a different model."""

from __future__ import annotations

import sys

from checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import family_tables

from benchmarks.proofs.families import ALL, results, rows

BY_NAME = (
    " is refused",
    "are refused",
    "would compute different rotary embeddings from this config",
    "the engine would run MistralForCausalLM, but the trainer would run MinistralForCausalLM",
    "config or tokenizer cannot be loaded",  # transformers' own class cannot take the value
)


def test_every_row_was_measured_or_refused_by_name() -> None:
    found = family_tables.by_family()
    for family in ALL:
        assert set(found[family]) == set(rows(family)), family
    for family, name, row in results():
        assert "failed" not in row, (family, name, row)
        assert "w4a16" in row or any(words in row["refused"] for words in BY_NAME), (family, name, row)


def test_no_accepted_row_is_a_different_model() -> None:
    """At most a tenth of the mismatch at `off`, and nothing at `exact`."""
    accepted = [(family, name, row) for family, name, row in results() if "w4a16" in row]
    assert len(accepted) > 200
    for family, name, row in accepted:
        assert family_tables.agrees(row), (family, name, row)
        exact = [of_scheme["exact"] for of_scheme in row.values() if "exact" in of_scheme]
        assert not any(exact) and (len(exact) == 2) == (family in ALL[:4]), (family, name, row)


def test_the_page_shows_the_results() -> None:
    assert family_tables.page() == family_tables.PAGE.read_text(encoding="utf-8")
