"""Values that a reward may get, as a file has them: name -> one value a row.

`TABLE` has those that both formats can hold, `JSON` those that only JSON can hold.
The second entry of a `TABLE` row is what a reward must get, if a table changes the values: keys that other rows have
are null, and whole numbers beside decimals are floats.
"""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

TEXT: dict[str, list[Any]] = {
    "dates": ["2024-01-01", "2024-12-31"],
    "dates and times": ["2024-01-01 12:30:00", "2024-01-01T12:30:00Z"],
    "times": ["12:30", "12:30:59"],
    "years": ["2024", "1999"],
    "leading zeros": ["007", "042"],
    "numbers": ["72", "72.0"],
    "exponents": ["1e3", "1E-3"],
    "thousands": ["1,000", "1 000"],
    "words of truth": ["true", "False"],
    "words of nothing": ["null", "None"],
    "NaN as text": ["NaN", "-Infinity"],
    "Unicode": ["naïve λ 数 😀", "e\u0301\u2028x"],
    "spaces": [" 5", "5 \n"],
    "empty text": ["", "x"],
    "quotes and braces": ['{"a": 1}', "[1, 2]"],
    "backslashes": ["\\frac{1}{2}", "\\n\\u0041"],
    "hex and binary": ["0x10", "0b10"],
    "IP and version": ["10.0.0.1", "1.10"],
}
TABLE: dict[str, tuple[list[Any], list[Any]]] = {
    **{name: (values, values) for name, values in TEXT.items()},
    "whole numbers": ([1, -2], [1, -2]),
    "64 bits": ([2**63 - 1, 2**53 + 1], [2**63 - 1, 2**53 + 1]),
    "decimals": ([0.1, 1e300], [0.1, 1e300]),
    "whole numbers and decimals": ([1, 2.5], [1.0, 2.5]),
    "truth values": ([True, False], [True, False]),
    "NaN": ([math.nan, 1.0], [math.nan, 1.0]),
    "lists of dates": ([["2024-01-01"], ["2024-01-02", "2024-01-03"]],) * 2,
    "nested lists": ([[["a"], []], [[]]],) * 2,
    "empty list": ([[], ["a"]], [[], ["a"]]),
    "null in a list": ([["a", None], [None]],) * 2,
    "dicts": ([{"a": "1", "b": ["2024-01-01"]}, {"a": "x", "b": []}],) * 2,
    "a null entry": ([{"a": None, "b": 1}, {"a": "x", "b": 2}],) * 2,
    "missing keys": (
        [{"a": "1"}, {"b": {"c": 1}}],
        [{"a": "1", "b": None}, {"a": None, "b": {"c": 1}}],
    ),
    "missing keys deep in a list": (
        [[{"in": "1", "out": "2"}, {"in": "3"}], []],
        [[{"in": "1", "out": "2"}, {"in": "3", "out": None}], []],
    ),
}
JSON: dict[str, list[Any]] = {
    "beyond 64 bits": [2**70, -(10**40)],
    "beyond 64 bits beside decimals": [2**70, 0.5],
    "text beside numbers": ["1", 1],
    "text beside truth values": [True, "true"],
    "text in a list of numbers": [["a", 1], [2.0]],
    "an empty dict": [{}, {}],
    "a map": [{f"file {i}": "2024-01-01"} for i in range(300)],
}


def rows_of(values: list[Any]) -> list[dict[str, Any]]:
    """Rows in verl's schema. Each value is the ground truth, and in `extra_info` alone and in a list."""
    return [
        {
            "data_source": "values",
            "prompt": [{"role": "user", "content": "one"}],
            "reward_model": {"style": "rule", "ground_truth": value},
            "extra_info": {"index": i, "value": value, "list": [value]},
        }
        for i, value in enumerate(values)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write the rows with the plainest writers that there are."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
