"""The config reader: what it accepts, what it refuses and with which words, and that nothing heavy is imported."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import SHIPPED
from config_problems import MINIMAL

from qarl.config import (
    Config,
    ConfigError,
    build_config,
    describe_keys,
    load_config,
    read_config,
    write_resolved,
)
from qarl.config.read_config import find_config, shipped_folder


def test_defaults_file_and_overrides_in_that_order(folder: Path) -> None:
    Path("three.yaml").write_text(MINIMAL + "optim: {lr: 2e-4, weight_decay: 0.5}\n")
    config = load_config(["optim.lr=3e-4", "config=three.yaml"])
    assert (config.optim.eps, config.optim.weight_decay, config.optim.lr) == (1e-8, 0.5, 3e-4)


def test_defaults_are_the_papers_and_verls(folder: Path) -> None:
    config = load_config(["config=minimal.yaml"])
    actor = config.actor
    assert (actor.seq_clip_ratio_high, actor.seq_clip_ratio_low) == (4e-4, 3e-4)
    assert (
        actor.neg_seq_clip_ratio_low,
        actor.neg_seq_clip_ratio_high,
        actor.seq_tis_imp_ratio_cap,
    ) == (3e-4, 7e-4, 2)
    assert (config.backend, config.quant.scheme, config.quant.align) == ("local", "w4a16", "model")
    assert (config.quant.ignore, config.quant.group_size) == (["lm_head"], 128)
    assert (config.optim.betas, config.optim.lr, config.trainer.test_freq) == (
        (0.9, 0.999),
        1e-6,
        -1,
    )
    assert config.data.train_files == ["train.parquet"]
    assert config.run_dir == Path("runs/minimal")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("0123", 123),
        ("off", "off"),
        ("", None),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("'1e-4'", "1e-4"),
        (".inf", math.inf),
        ("[a, 1, 1e2]", ["a", 1, 100.0]),
        ("re:.*mlp.gate$", "re:.*mlp.gate$"),
    ],
)
def test_yaml_values_follow_yaml_1_2(text: str, value: Any) -> None:
    parsed = read_config.parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "text", ["off", "1e-4", "true", "~", "", "2024-01-01", "- a", "a: b", "'", "x # y", "é", "1."]
)
def test_text_survives_a_written_config(text: str) -> None:
    assert read_config.parse_value(read_config.dump({"key": text})) == {"key": text}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_parse(path: Path) -> None:
    assert load_config([f"config={path}"]).name == path.stem


def test_resolved_config_reads_back_equal(folder: Path) -> None:
    config = load_config(
        [
            "config=minimal.yaml",
            "optim.lr=1e-5",
            "name='1e5'",
            "quant.ignore=[lm_head, 're:.*gate$']",
        ]
    )
    write_resolved(config, folder / "new" / "config.yaml")
    assert load_config(["config=new/config.yaml"]) == config
    written = yaml.safe_load((folder / "new" / "config.yaml").read_text())
    leaves = {
        f"{section}.{key}"
        for section, keys in written.items()
        if isinstance(keys, dict)
        for key in keys
    }
    assert {*written, *leaves} == set(describe_keys())


def test_lookup_order(folder: Path) -> None:
    (folder / "configs").mkdir()
    assert find_config("quickstart.yaml")[0] == shipped_folder("configs") / "quickstart.yaml"  # type: ignore[operator]  # it exists
    (folder / "configs" / "quickstart.yaml").write_text(MINIMAL)
    assert find_config("quickstart.yaml")[0] == Path("configs/quickstart.yaml")
    (folder / "quickstart.yaml").write_text(MINIMAL)
    assert find_config("quickstart.yaml")[0] == Path("quickstart.yaml")
    absolute = folder / "minimal.yaml"
    assert find_config(str(absolute))[0] == absolute


def test_built_in_python() -> None:
    values = yaml.safe_load(MINIMAL)
    assert build_config(values) == Config(**values)
    values["data"]["train_batch_size"] = 7
    with pytest.raises(ConfigError, match="whole mini-batches"):
        Config(**values)
    with pytest.raises(ConfigError, match=r"rollout\.n: \(not given\)"):
        build_config({**values, "rollout": {}})
