"""Hostile input gives a plain error: random values for random keys, and damaged files, drawn from a seed.

The values are those that a slip, a script or somebody hostile would write. What is accepted must also read back equal.
A failure names the seed of its case.
"""

from __future__ import annotations

import json
import random
import typing
from pathlib import Path
from typing import Any

import pytest
from bad_runs import CONFIG, row
from key_reads import leaves

from qarl import train
from qarl.config import Config, build_config, load_config
from qarl.config.schema import sections
from qarl.config.strict_yaml import parse_value
from qarl.data.prompts import load_prompts
from qarl.errors import UserError

ANYTHING = (
    "", "null", "text", "true", "yes", "[]", "[[]]", "{}", "{a: 1}", "[1, 2, 3]", "[null]", ".nan", ".inf", "-.inf",
    "-1", "0", "1", "-0.0", "1e400", "1e308", "5e-324", "2147483648", "9223372036854775808", "9" * 40, "9" * 5000,
    "1_000", "0x10", "0123", "1:30", "+7", "1.", ".5", '"1"', '"\\0"', '"\\ud800"', '"\\x1b[31m"', "☃", "a" * 300,
    "a/" * 3000, "${oc.env:HOME}", "&a 1", "*a", "<<", "!!python/object/apply:os.getcwd []", "[1,", "'open", "a: b: c",
    "- 1", "|", "? x", "@x", "# x", "---", "[" * 2000, "{" * 500, "2024-01-01", "off", "/dev/null", "/proc/self/mem",
    "re:(", "[lm_head, 're:(?P<a>']", "[lm_head, 're:a{99999999999}']", "os:getcwd", ":f", "0.5", "3.7", "1e30",
)  # fmt: skip
BYTES = b"\x00\xff\n\t \"'{}[]:,#&*!|>%@`-\xe2\x98\x83"


def values_of(key: str, chosen: random.Random) -> str:
    """A hostile value, or one that the type of `key` allows, to get past the first refusal."""
    section, _, leaf = key.rpartition(".")
    kind = sections()[section].model_fields[leaf].annotation if section else Config.model_fields[leaf].annotation
    words = [str(word) for word in typing.get_args(kind) if isinstance(word, str)]
    return chosen.choice(ANYTHING if chosen.random() < 0.7 else (*words, "true", "false", "2", "0.25", "text.jsonl"))


def damaged(content: bytes, chosen: random.Random) -> bytes:
    """`content` with a few bytes changed, or a part missing or doubled."""
    changed = bytearray(content)
    for _ in range(chosen.randrange(1, 4)):
        start, length = chosen.randrange(len(changed)), chosen.randrange(1, 30)
        kind = chosen.randrange(4)
        if kind == 0:
            changed[start : start + 1] = bytes([chosen.choice(BYTES)])
        elif kind == 1:
            del changed[start : start + length]
        elif kind == 2:
            changed[start:start] = changed[start : start + length]
        else:
            del changed[start:]
        changed = changed or bytearray(b" ")
    return bytes(changed)


def accepted(argv: list[str], case: int) -> Config | None:
    """The config, or None if it is refused by an error with a reason and a fix."""
    try:
        return load_config(argv)
    except UserError as error:
        assert "fix:" in str(error), (case, str(error))
        return None
    except Exception as error:
        raise AssertionError(f"case {case}: {argv}") from error


def test_random_values_of_keys(startable_run: Path) -> None:
    kept = 0
    for case in range(400):
        chosen = random.Random(case)
        keys = chosen.sample(sorted(leaves()), chosen.choice((1, 1, 2, 3)))
        config = accepted(["config=run.yaml", *(f"{key}={values_of(key, chosen)}" for key in keys)], case)
        if config is not None:
            kept += 1
            assert build_config(parse_value(config.resolved_yaml())) == config, case
    assert 20 < kept < 380  # otherwise only one side is tested


def test_damaged_config_files(startable_run: Path) -> None:
    for case in range(300):
        Path("damaged.yaml").write_bytes(damaged(CONFIG.encode(), random.Random(case)))
        accepted(["config=damaged.yaml"], case)


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_damaged_data_files(startable_run: Path, suffix: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("model")
    rows = [row(f"t3 t{i}") for i in range(8)]
    whole = Path(f"whole.{suffix}")
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), whole)
    else:
        whole.write_text(json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows)))
    for case in range(15):
        Path(f"damaged.{suffix}").write_bytes(damaged(whole.read_bytes(), random.Random(case)))
        try:
            load_prompts(f"damaged.{suffix}", tokenizer=tokenizer, max_prompt_length=16)
        except UserError as error:
            assert f"damaged.{suffix}" in str(error), (case, str(error))


@pytest.mark.parametrize("key", ["data.train_files", "model.path", "reward.function", "output_dir"])
def test_a_path_that_is_too_long_is_a_plain_error(
    startable_run: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    ending: Any = {"data.train_files": ".jsonl", "reward.function": ".py:f"}
    assert train.main(["config=run.yaml", f"{key}={'x' * 300}{ending.get(key, '')}"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and "x" * 200 in error
