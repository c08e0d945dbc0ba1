"""How a scheme becomes a value of quant.scheme, without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from qarl.config.help import key_table
from qarl.config.quant import QuantConfig
from qarl.errors import UserError
from qarl.schemes import Scheme, get_scheme, register, scheme_names, unregister


class Third(Scheme):
    name = "third"


@pytest.fixture
def third() -> Iterator[None]:
    register(Third)
    yield
    unregister("third")


@pytest.mark.usefixtures("third")
def test_a_registered_scheme_is_a_value_of_the_config() -> None:
    assert QuantConfig(scheme="third").scheme == "third"
    assert get_scheme("third") == Third()
    assert scheme_names()[-1] == "third"
    (key,) = (key for key in key_table()["quant"] if key.name == "quant.scheme")
    assert key.values.endswith("w4a8, third")


@pytest.mark.usefixtures("third")
def test_a_name_belongs_to_one_class() -> None:
    register(Third)  # the same file, imported again

    class Other(Scheme):
        name = "third"

    with pytest.raises(UserError, match="there already is a scheme 'third'"):
        register(Other)


@pytest.mark.parametrize("value", ["third", "W4A16", 4, None, ["w4a16"]])
def test_other_values_are_refused_as_a_literal_is(value: object) -> None:
    message = "Input should be 'bf16', 'w4a16', 'w8a8', 'fp8' or 'w4a8'"
    with pytest.raises(ValueError, match=message):
        QuantConfig.model_validate({"scheme": value})


def test_schemes_need_neither_torch_nor_compressed_tensors() -> None:
    code = "import sys, qarl.schemes; print({'torch', 'compressed_tensors'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == "set()"
