"""Keys that another key switches off: an error, unless only the command line switches off what a file sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from qarl.config import ConfigError, load_config
from qarl.config.schema import default_values, flat_values
from qarl.config.unused_keys import unread

ROWS = [
    ("actor.loss=grpo", "actor.seq_clip_ratio_high=0.5"),
    ("actor.positive_band=upper", "actor.seq_clip_ratio_low=0.5"),
    ("actor.band_scaling=none", "actor.band_reference_length=100"),
    ("actor.loss=sapo", "actor.clip_ratio_low=0.5"),
    ("actor.loss=grpo", "actor.clip_ratio_c=2.5"),
    ("actor.loss=grpo", "actor.tau_pos=0.5"),
    ("actor.loss=grpo", "actor.mis_imp_ratio_cap=3.0"),
    ("actor.use_kl_loss=false", "actor.kl_loss_coef=0.5"),
    ("actor.old_log_probs=recompute", "actor.old_log_probs_sample=0.5"),
    ("actor.use_dynamic_bsz=false", "actor.ppo_max_token_len_per_gpu=9999"),
    ("optim.name=adamw", "optim.muon_lr=0.5"),
    ("optim.lr_scheduler_type=constant", "optim.min_lr_ratio=0.5"),
    ("rollout_correction.rollout_is=null", "rollout_correction.rollout_is_threshold=3.0"),
    ("rollout_correction.rollout_is=null", "rollout_correction.rollout_is_mode=mask"),
    ("rollout_correction.rollout_rs=[]", "rollout_correction.rollout_rs_ratio=ppo"),
    ("actor.loss=reinforce", "algorithm.adv_estimator=rloo"),
    ("algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"),
    ("trainer.resume_mode=auto", "trainer.resume_from_path=a"),
    ("rollout.val_temperature=0", "rollout.val_n=4"),
]
"""A decider with a value for which the key beside it is not read."""


@pytest.mark.parametrize(("off", "override"), ROWS)
def test_a_key_that_is_not_read(folder: Path, off: str, override: str) -> None:
    key, _, value = override.partition("=")
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError) as caught:
        load_config(["config=minimal.yaml", off, override])
    (problem,) = caught.value.problems
    assert problem.key == key and problem.source == "command line"
    assert problem.reason.startswith(f"it has no effect with {off.partition('=')[0]} = ")
    text = Path("minimal.yaml").read_text()
    line = f"  {name}: {value}\n"
    with_key = text.replace(f"{section}:\n", f"{section}:\n{line}")
    Path("run.yaml").write_text(with_key if with_key != text else f"{text}{section}:\n{line}")
    config = load_config(["config=run.yaml", off])
    assert flat_values(config.model_dump(), set())[key] == default_values()[key]
    assert list(unread(flat_values(config.model_dump(), set()), default_values())) == []
