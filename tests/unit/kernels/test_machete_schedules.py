"""Machete's schedules with whole sums: the rule against CUTLASS's, and the call of every layer of the recipes."""

from __future__ import annotations

import pytest
import yaml
from checkout import ROOT

from qarl.bench.model import MODELS, find_model
from qarl.kernels.cuda.machete_schedules import (
    BLOCK,
    CHANNELS,
    PROCESSORS,
    SCHEDULES,
    Schedule,
    plan,
    tiles,
    whole,
)

BY_NAME = {schedule.name: schedule for schedule in SCHEDULES}
ROWS = (1, 2, 8, 15, 16, 17, 32, 33, 64, 65, 128, 200, 256, 257, 512, 1000, 4096, 16384, 22528)
GROUPS = (64, 128)


def by_cutlass(name: str) -> list[list[int]]:
    """The lines of a file that CUTLASS's header computed (machete_modes.cpp)."""
    lines = (ROOT / "tests" / "data" / name).read_text().splitlines()
    return [list(map(int, line.split())) for line in lines if not line.startswith("#")]


def test_the_rule_is_cutlass_s() -> None:
    """420 products of random sizes, of which 168 are split."""
    cases = by_cutlass("machete_whole.txt")
    assert len(cases) == 420 and sum(case[-1] for case in cases) == 252
    for n, k, m, *schedule, expected in cases:
        assert whole(n, k, m, Schedule(*schedule)) == bool(expected), (n, k, m, schedule)


def layers() -> dict[str, tuple[int, int]]:
    """Every dense quantized linear of the models of the shipped recipes, the engine's fused ones, and the part of each
    that one of its workers has: [N, K]."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        name = config["model"]["path"].rpartition("/")[2].removesuffix("-Base")
        if (MODELS / name).is_dir() and config["quant"].get("group_size") in GROUPS:
            linears = find_model(name).size.block_linears(0)
            dense = {
                linear.rpartition(".")[2]: shape
                for linear, shape in linears.items()
                if ".experts." not in linear
            }
            for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
                if all(leaf in dense for leaf in fused):
                    n = sum(dense[leaf][0] for leaf in fused)
                    dense["+".join(fused)] = n, dense[fused[0]][1]
            found |= {f"{name} {leaf}": shape for leaf, shape in dense.items()}
            workers = config["rollout"].get("tensor_model_parallel_size", 1)
            if workers > 1:
                found |= {
                    f"{name} {leaf} / {workers}": part(leaf, shape, workers)
                    for leaf, shape in dense.items()
                }
    return found


def part(leaf: str, shape: tuple[int, int], workers: int) -> tuple[int, int]:
    """What one of `workers` workers has: vLLM cuts o and down along K, the others along N."""
    n, k = shape
    return (n, k // workers) if leaf in ("o_proj", "down_proj") else (n // workers, k)


LAYERS = layers()


def test_the_recipes_have_these_models() -> None:
    models = {name.partition(" ")[0] for name in LAYERS}
    expected = {"Qwen2.5-0.5B", "Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B", "Qwen3-8B", "Qwen3-30B-A3B"}
    assert models == expected and len(LAYERS) == 4 * 9 + 2 * 5


def test_no_recipe_is_left_out() -> None:
    """Every W4A16 recipe is above, or has groups of 32, which Machete does not multiply."""
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        if config["quant"]["scheme"] == "w4a16" and config["quant"]["group_size"] in GROUPS:
            name = config["model"]["path"].rpartition("/")[2].removesuffix("-Base")
            assert any(layer.startswith(f"{name} ") for layer in LAYERS), path.name


def test_cutlass_keeps_the_sums_of_every_layer_of_the_recipes_whole() -> None:
    """Its own header was asked for each call that `plan` answers."""
    cases = by_cutlass("machete_layers.txt")
    answers = {tuple(case[:-1]): case[-1] for case in cases}
    calls = {
        (n, k, call.rows, *BY_NAME[call.schedule])
        for n, k in LAYERS.values()
        for call in (plan(n, k, m) for m in ROWS)
    }
    assert set(answers) == calls, "ask CUTLASS again: tests/support/machete_modes.cpp"
    assert set(answers.values()) == {1}


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_of_the_recipes_has_whole_sums(layer: str) -> None:
    n, k = LAYERS[layer]
    assert n % CHANNELS == 0 and k % BLOCK == 0
    for m in ROWS:
        call = plan(n, k, m)
        schedule = BY_NAME[call.schedule]
        assert call.rows >= m and whole(n, k, call.rows, schedule), (m, call)
        assert n % schedule.channels == 0
        if m >= 4096:
            assert call.rows <= 1.07 * m, "padding costs time here"


def test_tiles_and_waves_by_hand() -> None:
    """o of Qwen3-8B has 32 tiles of 128 channels. One row of tiles fills less than half of 132 multiprocessors, so
    CUTLASS would split; three rows of them (48 rows) are 96 tiles. `down` of Qwen2.5-Math-1.5B has 12: 6 rows of
    tiles are 72. gate of Qwen3-8B has 96 with few rows, and with 512 rows 384 of 128 by 128: two waves and 120."""
    few, square = BY_NAME["128x16_1x1x1_TmaMI__TmaCoop_streamK"], Schedule(128, 128, 2)
    assert PROCESSORS == 132 and tiles(4096, 16, few) == 32 and not whole(4096, 4096, 16, few)
    assert plan(4096, 4096, 1) == (few.name, 48) == plan(4096, 4096, 16)
    assert plan(1536, 8960, 16) == (few.name, 96)
    assert plan(12288, 4096, 16) == (few.name, 16)
    assert tiles(12288, 512, square) == 384 and plan(12288, 4096, 512) == (square.name, 512)
    assert plan(24576, 4096, 4096) == ("128x256_2x1x1_TmaMI__TmaCoop_streamK", 4352)


def test_a_cluster_rounds_up_and_short_sums_are_never_split() -> None:
    assert tiles(384, 32, Schedule(128, 32, 2)) == 4
    assert whole(128, 512, 1, SCHEDULES[0]) and not whole(128, 576, 1, SCHEDULES[0])
