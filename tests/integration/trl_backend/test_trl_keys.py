"""Every key of `RUN_KEYS` is a field of `QaRLConfig`, and its value reaches QaRL's config or the loss."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from trl import GRPOConfig

from qarl.config.schema import default_values
from qarl.tbpo.config import KEYS, TBPOConfig
from qarl.trl import QaRLConfig
from qarl.trl.config import RUN_KEYS, run_config

OTHER: dict[str, Any] = {
    "model.trust_remote_code": True,
    "data.max_response_length": 9,
    "rollout.n": 4,
    "rollout.temperature": 0.5,
    "rollout.max_num_seqs": 7,
    "rollout.gpu_memory_utilization": 0.4,
    "rollout.cpu_kvcache_space_gib": 0.5,
    "rollout.enforce_eager": True,
    "rollout.enable_prefix_caching": True,
    "rollout.free_cache_engine": False,
    "quant.scheme": "w8a8",
    "quant.group_size": 32,
    "quant.ignore": ["lm_head", "re:.*down_proj"],
    "quant.kernels": "qarl",
    "quant.align": "linears",
    "quant.mismatch_limit": 0.5,
    "optim.lr": 1e-3,
    "optim.weight_decay": 0.5,
    "optim.master_dtype": "bf16",
    "reward.timeout_s": 5.0,
    "reward.workers": 3,
    "multi_turn.timeout_s": 3.0,
    "multi_turn.workers": 4,
    "multi_turn.max_turn_length": 8,
    "multi_turn.max_tool_response_length": 99,
    "multi_turn.tool_response_truncate_side": "left",
    "seed": 7,
    "actor.seq_clip_ratio_high": 0.1,
    "actor.seq_clip_ratio_low": 0.1,
    "actor.neg_seq_clip_ratio_low": 0.1,
    "actor.neg_seq_clip_ratio_high": 0.1,
    "actor.seq_tis_imp_ratio_cap": 3.0,
    "actor.mismatch_outside_cap": "drop",
    "actor.positive_band": "two_sided",
    "actor.band_scaling": "length",
    "actor.band_reference_length": 50,
}
"""Key -> a value that is not its default."""
ALSO = {
    "seq_clip_ratio_low": {"positive_band": "two_sided"},
    "band_reference_length": {"band_scaling": "length"},
}


def test_every_key_reaches_its_consumer(tmp_path: Path) -> None:
    assert set(OTHER) == set(RUN_KEYS)
    base = {"output_dir": str(tmp_path), "use_cpu": True, "max_completion_length": 8}
    for key, value in OTHER.items():
        name = RUN_KEYS[key]
        args = QaRLConfig(**base | ALSO.get(name, {}) | {name: value})
        turns = "file.py:answer" if key.startswith("multi_turn.") else None
        config = run_config(args, "model", 8, environment=turns).model_dump()
        section, _, leaf = key.rpartition(".")
        assert (config[section] if section else config)[leaf] == value, key
        if leaf in KEYS:
            assert getattr(TBPOConfig.of(args), leaf) == value, key


def test_its_own_fields_have_qarls_defaults() -> None:
    for key, name in RUN_KEYS.items():
        if name not in GRPOConfig.__dataclass_fields__:
            field = QaRLConfig.__dataclass_fields__[name]
            default = field.default if field.default_factory is MISSING else field.default_factory()
            assert default == default_values()[key], key
    args = {name: QaRLConfig.__dataclass_fields__[name].default for name in ("loss_type", "bf16")}
    assert args == {"loss_type": "tbpo", "bf16": False}
