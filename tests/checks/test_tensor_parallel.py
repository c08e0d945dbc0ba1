"""Models that an engine of several workers would cut in the wrong place, refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from checkout import ROOT

from qarl.checks.run import checks_for
from qarl.checks.tensor_parallel import KEY, check_tensor_parallel, split_model
from qarl.config import Config, load_config
from qarl.errors import UserError

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 128,
    "intermediate_size": 512,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
DENSE, MOE, SHARED = transformers.Qwen3Config, transformers.Qwen3MoeConfig, transformers.Qwen2MoeConfig


def config(workers: int, group: int = 128, **changes: Any) -> Config:
    keys = {
        "quant.group_size": group,
        "trainer.n_gpus_per_node": 4,
        KEY: workers,
        "quant.ignore": '[lm_head, "re:.*gate$"]',
    }
    given = [f"{key}={value}" for key, value in {**keys, **changes}.items()]
    return load_config([f"config={ROOT / 'configs/quickstart.yaml'}", "backend=verl", *given])


ROWS = [
    # A matrix that is split along its inputs; the size that cuts a group of it; the layers that the error names.
    (DENSE, {"num_attention_heads": 6, "num_key_value_heads": 2}, "layers.0.self_attn.o_proj"),  # 192 / 2 = 96
    (DENSE, {"intermediate_size": 384}, "layers.0.mlp.down_proj"),  # 192 for each of two
    (MOE, EXPERTS | {"num_attention_heads": 6, "num_key_value_heads": 2}, "layers.0.self_attn.o_proj"),
    (MOE, EXPERTS | {"moe_intermediate_size": 384}, "layers.0.mlp.experts.*.down_proj"),
    (SHARED, EXPERTS | {"shared_expert_intermediate_size": 384}, "layers.0.mlp.shared_expert.down_proj"),
    (SHARED, EXPERTS | {"moe_intermediate_size": 384}, "layers.0.mlp.experts.*.down_proj"),
]


@pytest.mark.parametrize(("kind", "sizes", "layer"), ROWS)
def test_a_group_of_two_workers_is_refused_by_name(kind: Any, sizes: dict[str, Any], layer: str) -> None:
    model = kind(**{**SIZES, **sizes})
    group = 64 if "num_attention_heads" in sizes else 128
    with pytest.raises(UserError) as found:
        check_tensor_parallel(config(2, group), model)
    error = found.value
    assert "cannot be split along their inputs" in error.what and f"{KEY}=2" in error.what
    assert error.where == f"model.{layer}" and f"group_size={group}" in (error.why or "")
    assert "sizes that work here: 1; or choose quant.group_size below" in (error.fix or "")
    check_tensor_parallel(config(2, 32), model)
    check_tensor_parallel(config(1, group), model)
    for scheme in ("w8a8", "fp8", "bf16"):
        check_tensor_parallel(config(2, group, **{"quant.scheme": scheme}), model)


def test_ranks_that_do_not_split_into_engines_are_refused() -> None:
    """Also over several hosts, and before the model is looked at."""
    with pytest.raises(UserError, match="4 ranks cannot be divided into engines of 3 workers") as found:
        check_tensor_parallel(config(3, 32), None)
    assert found.value.where == "trainer.nnodes * trainer.n_gpus_per_node" and "divisor of 4" in (found.value.fix or "")
    with pytest.raises(UserError, match="12 ranks cannot be divided into engines of 8 workers"):
        check_tensor_parallel(config(8, 32, **{"trainer.nnodes": 3}), None)
    check_tensor_parallel(config(2, 32), DENSE(**SIZES))


@pytest.mark.parametrize(
    ("sizes", "workers", "words"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "9 attention heads do not split"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "3 key-value heads do not split"),
        ({"vocab_size": 100, "num_attention_heads": 6, "num_key_value_heads": 3}, 3, "a vocabulary of 100"),
        ({"intermediate_size": 514}, 4, "3 layers do not split evenly; the first has a width of 514"),
        ({"intermediate_size": 544}, 4, "does not support 2 of 6 layers"),  # 2 * 136 columns, not a multiple of 32
    ],
)
def test_other_sizes_are_refused(sizes: dict[str, Any], workers: int, words: str) -> None:
    ignore = '[lm_head, "re:.*down_proj"]' if "intermediate_size" in sizes else "[lm_head]"
    changes = {"quant.ignore": ignore, "trainer.n_gpus_per_node": 12}
    with pytest.raises(UserError) as found:
        check_tensor_parallel(config(workers, 32, **changes), DENSE(**{**SIZES, **sizes}))
    assert words in found.value.what and "sizes that work here: 1" in (found.value.fix or "")


def test_key_value_heads_that_are_repeated() -> None:
    """Each of two on two of four workers, which have a whole one."""
    model = split_model(config(4, 32), DENSE(**{**SIZES, "num_key_value_heads": 2}))
    assert model.problems(4) == []
    parts = model.parts(4)
    assert parts["model.layers.0.self_attn.k_proj"] == (32, 256)
    assert parts["model.layers.0.self_attn.q_proj"] == (64, 256)
    assert parts["model.layers.0.mlp.down_proj"] == (256, 128)


def test_runs_in_verl_make_this_check() -> None:
    """A local engine has one worker."""
    made = {backend: [check.name for check in checks_for(backend)] for backend in ("local", "verl")}
    assert "tensor parallelism" in made["verl"] and "tensor parallelism" not in made["local"]
    with pytest.raises(UserError, match=f"(?s){KEY}.*one process"):
        load_config([f"config={ROOT / 'configs/quickstart.yaml'}", f"{KEY}=2"])
