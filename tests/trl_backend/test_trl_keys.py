"""Every key of `RUN_KEYS` is a field of `QaRLConfig`, and its value reaches QaRL's config or the loss."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from qarl.config.schema import default_values
from qarl.tbpo.config import KEYS
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
    "rollout.free_cache_engine": False,
    "quant.scheme": "w8a8",
    "quant.group_size": 32,
    "quant.ignore": ["lm_head", "re:.*down_proj"],
    "quant.kernels": "qarl",
    "quant.align": "linears",
    "quant.mismatch_limit": 0.5,
    "publish.delta": "auto",
    "optim.lr": 1e-3,
    "optim.weight_decay": 0.5,
    "optim.master_dtype": "bf16",
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
ALSO = {"seq_clip_ratio_low": {"positive_band": "two_sided"}, "band_reference_length": {"band_scaling": "length"}}


def test_every_key_reaches_its_consumer(tmp_path: Path) -> None:
    assert set(OTHER) == set(RUN_KEYS)
    given = {"output_dir": str(tmp_path), "use_cpu": True, "max_completion_length": 8}
    for key, value in OTHER.items():
        name = RUN_KEYS[key]
        args = QaRLConfig(**given | ALSO.get(name, {}) | {name: value})
        config = run_config(args, "model", 8).model_dump()
        section, _, leaf = key.rpartition(".")
        assert (config[section] if section else config)[leaf] == value, key
        if leaf in KEYS:
            assert getattr(args.tbpo(), leaf) == value, key


def test_defaults_are_qarls_or_trls() -> None:
    """TRL's own fields have TRL's defaults; a publish is within one process, and TRL's engine would not sleep."""
    defaults = {
        one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(QaRLConfig)
    }
    ours = {name: default_values()[key] for key, name in RUN_KEYS.items() if key in default_values()}
    trls = {"trust_remote_code", "max_completion_length", "num_generations", "temperature", "learning_rate"}
    trls |= {"weight_decay", "seed", "vllm_gpu_memory_utilization", "publish_delta"}
    assert {name: value for name, value in defaults.items() if name in set(ours) - trls} == {
        name: value for name, value in ours.items() if name not in trls
    }
    assert (defaults["publish_delta"], defaults["loss_type"], defaults["bf16"]) == ("off", "tbpo", False)
