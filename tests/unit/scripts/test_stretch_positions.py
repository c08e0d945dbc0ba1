"""scripts/stretch_positions.py: the folder it writes, the rotations of both sides, and what it refuses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_engine_attention
from torch import Tensor

from qarl.align.rotary import EngineRotaryEmbedding, head_size_of, match_rotary
from qarl.bench.model import MODELS
from qarl.errors import UserError
from qarl.kernels.cpu import layer_ops

sys.path.insert(0, str(ROOT / "scripts"))
import stretch_positions
from stretch_positions import Stretching, hugging_face_config, stretch, stretched_config

POSITIONS = 18432
MATH = ("Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B")
UNIT = 2.0**-24
"""Relative error of one rounding to FP32."""


def public_config(name: str) -> dict[str, Any]:
    described = json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))
    return dict(described)


def model_folder(folder: Path, described: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def yarn(theta: float, size: int, original: int, factor: float) -> tuple[Tensor, float]:
    """Frequencies [size / 2] and scale of arXiv 2309.00071, sections 3.2 to 3.4, in float64.

    A dimension that turns more than 32 times in the original positions keeps its frequency, and that of one that turns
    less than once is divided by the factor. Between the two the paper's equation is linear in the number of turns. Its
    code (jquesnelle/yarn), which both sides follow, is linear in the dimension, between whole dimensions."""
    dimensions = torch.arange(size // 2, dtype=torch.float64)
    plain = theta ** (-2 * dimensions / size)

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), size - 1)
    divided = ((dimensions - first) / (last - first)).clamp(0, 1)
    return plain * (1 - divided) + plain / factor * divided, 0.1 * math.log(factor) + 1


def error_bound(angles: Tensor, factor: float, scale: float) -> Tensor:
    """Largest error of FP32 cosines and sines at these angles.

    Of a frequency: 4 units for the power (2 ulp), one each for factor * power, its inverse, both products with the
    shares, and their sum, and two for the shares themselves, which count up to `factor` times where the divided
    frequency is the smaller one; one more for the angle. Then a cosine has 2 units, and scaling rounds once."""
    return scale * (angles * (4 + 5 + 2 * factor + 1) + 3) * UNIT


@pytest.mark.parametrize("name", MATH)
def test_transformers_rotates_as_the_paper_says(name: str) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    config = hugging_face_config(stretched_config(public_config(name), POSITIONS))
    size = head_size_of(config)
    frequencies, scale = yarn(config.rope_parameters["rope_theta"], size, 4096, 4.5)
    positions = torch.arange(POSITIONS)
    angles = positions[:, None].double() * frequencies
    cosines, sines = Qwen2RotaryEmbedding(config)(torch.zeros(1), positions[None])
    bound = error_bound(angles, 4.5, scale).repeat(1, 2)
    for turns, exact in ((cosines, angles.cos()), (sines, angles.sin())):
        assert ((turns[0].double() - scale * exact.repeat(1, 2)).abs() <= bound).all()
    # The bound tells YaRN from no stretching, and from one without the scale.
    plain = positions[:, None].double() * config.rope_parameters["rope_theta"] ** (
        -torch.arange(0, size, 2, dtype=torch.float64) / size
    )
    for wrong in (plain.cos() * scale, angles.cos()):
        assert ((cosines[0].double() - wrong.repeat(1, 2)).abs() > bound).any()


@needs_engine_attention
@pytest.mark.parametrize("name", MATH)
def test_engine_and_trainer_rotate_to_the_same_bits(name: str) -> None:
    config = hugging_face_config(stretched_config(public_config(name), POSITIONS))
    match = match_rotary(config)
    assert match.equal and match.near and match.engine == "YaRNScalingRotaryEmbedding"
    embedding = EngineRotaryEmbedding()
    embedding.turns = match.turns
    assert all(len(part) == POSITIONS for part in match.turns)
    size = head_size_of(config)
    positions = torch.arange(POSITIONS)
    query = torch.randn(POSITIONS, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    engine = layer_ops.engine_rotary(config, size)
    cosines, sines = (part[0].float() for part in embedding(query, positions[None]))
    turned = query.float() * cosines
    first, second = query.float().chunk(2, dim=-1)
    turned += torch.cat((-second, first), dim=-1) * sines
    assert torch.equal(layer_ops.engine_turn(engine, positions, query), turned.bfloat16())
    frequencies, scale = yarn(config.rope_parameters["rope_theta"], size, 4096, 4.5)
    angles = positions[:, None].double() * frequencies
    # Rounding to BF16 adds at most half of 2^-7 of a number below 2: the scale is 1.15.
    bound = error_bound(angles, 4.5, scale).repeat(1, 2) + 2**-8
    assert ((cosines.double() - scale * angles.cos().repeat(1, 2)).abs() <= bound).all()


def test_only_positions_and_rotation_change() -> None:
    described = public_config(MATH[0])
    new = stretched_config(described, POSITIONS)
    assert new.pop("rope_parameters") == {
        "rope_type": "yarn",
        "rope_theta": 10000,
        "factor": 4.5,
        "original_max_position_embeddings": 4096,
    }
    assert new.pop("max_position_embeddings") == POSITIONS
    assert described == new | {"rope_theta": 10000, "max_position_embeddings": 4096}


@pytest.mark.parametrize("original", [4096, 1000])
def test_vllms_product_reaches_every_position(original: int) -> None:
    """vLLM refuses more tokens than original x factor. Where float64 makes less of it, another number is asked for."""
    described = public_config(MATH[0]) | {"max_position_embeddings": original}
    refused = 0
    for positions in range(original + 1, original + 400):
        try:
            parameters = stretched_config(described, positions)["rope_parameters"]
        except UserError as error:
            assert f"give positions={positions + 1}" in str(error)
            refused += 1
            continue
        assert original * parameters["factor"] >= positions
        assert parameters["factor"] == positions / original
    assert (refused == 0) == (original == 4096)


@pytest.mark.parametrize("files", ["link", "copy"])
def test_the_other_files_are_links_or_copies(tmp_path: Path, files: Any) -> None:
    source = model_folder(tmp_path / "model", public_config(MATH[0]))
    output = tmp_path / "new" / "stretched"
    report = stretch(Stretching(source, output, POSITIONS, files))
    assert "4096 positions stretched to 18432 by YaRN, factor 4.5; 2 files" in report
    assert {file.name for file in output.iterdir()} == {file.name for file in source.iterdir()}
    for name in ("model.safetensors", "tokenizer.json"):
        assert (output / name).read_bytes() == (source / name).read_bytes()
        assert (output / name).is_symlink() == (files == "link")
    written = json.loads((output / "config.json").read_text(encoding="utf-8"))
    assert written["max_position_embeddings"] == POSITIONS
    assert (source / "config.json").read_text() == json.dumps(public_config(MATH[0]))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "stretched already": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "cannot be stretched",
    ),
    "half of a head": ({"partial_rotary_factor": 0.5}, "cannot be stretched"),
    "several tables": (
        {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 128},
        "cannot be stretched",
    ),
    "a family that is not trained": (
        {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]},
        "models of the family olmo2 are refused",
    ),
    "a window": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "sliding_window=4096",
    ),
    "enough positions": ({"max_position_embeddings": POSITIONS}, "already has 18432 positions"),
    "no family": ({"model_type": "none_such"}, "transformers refuses the model's config"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_stretched_is_refused(tmp_path: Path, name: str) -> None:
    changes, words = OTHERS[name]
    source = model_folder(tmp_path / "model", public_config(MATH[0]) | changes)
    with pytest.raises(UserError, match=words):
        stretch(Stretching(source, tmp_path / "stretched", POSITIONS))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_folders_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_folder(tmp_path / "model", public_config(MATH[0]))
    with pytest.raises(UserError, match=r"hf download Qwen/Qwen2\.5-Math-1\.5B --local-dir"):
        stretch(Stretching(Path("Qwen/Qwen2.5-Math-1.5B"), tmp_path / "new", POSITIONS))
    with pytest.raises(UserError, match="is not empty"):
        stretch(Stretching(source, source, POSITIONS))
    (source / "config.json").unlink()
    with pytest.raises(UserError, match="cannot read the config"):
        stretch(Stretching(source, tmp_path / "new", POSITIONS))
    assert stretch_positions.main([str(source), "new"]) == 2
    assert "positions is missing" in capsys.readouterr().err
