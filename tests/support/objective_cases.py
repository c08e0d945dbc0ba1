"""Random batches, and the corrections and keys that `test_objectives.py` and its twin for verl compare."""

from __future__ import annotations

from typing import Any

import torch

from qarl.config import Config, build_config
from qarl.objectives.loss import correction_weights, objective_loss
from qarl.objectives.settings import objective_settings
from qarl.tbpo.reading import read

T = 9
LENGTHS = (9, 3, 5, 0, 7, 1, 9, 4, 0, 6, 8, 2) * 2
B = len(LENGTHS)


def random_rows(seed: int = 0) -> dict[str, torch.Tensor]:
    """A mini-batch of 24 responses, four of them empty, with ratios on both sides of every bound."""
    random = torch.Generator().manual_seed(seed)
    mask = torch.arange(T)[None, :] < torch.tensor(LENGTHS)[:, None]
    old = -3 * torch.rand(B, T, generator=random) - 0.05
    return {
        "log_prob": old + 0.3 * torch.randn(B, T, generator=random),
        "old_log_prob": old,
        "rollout_log_prob": old + 0.3 * torch.randn(B, T, generator=random),
        "advantages": torch.randn(B, generator=random),
        "response_mask": mask,
    }


WIDE = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}
LOSS_KEYS: dict[str, list[dict[str, Any]]] = {
    "tbpo": [
        {"seq_clip_ratio_high": 0.1, "neg_seq_clip_ratio_low": 0.1, "neg_seq_clip_ratio_high": 0.2}
    ],
    "grpo": [{}, WIDE, *({"loss_agg_mode": mode} for mode in ("seq-mean-token-sum", "token-mean"))],
    "dual_clip": [
        {"clip_ratio_c": 1.2},
        {"clip_ratio_c": 1.1, "loss_agg_mode": "seq-mean-token-sum-norm"},
    ],
    "gspo": [{}, WIDE],
    "mis_gspo": [{}, WIDE | {"mis_imp_ratio_cap": 1.1}],
    "positive_only": [{}, WIDE],
    "sapo": [{}, {"tau_pos": 0.7, "tau_neg": 2.0}],
    "reinforce": [{}, {"loss_agg_mode": "seq-mean-token-sum"}],
}
"""Keys of the section actor to compare each loss with."""

REJECTIONS = {
    "token_k1": 0.2, "token_k2": 0.03, "token_k3": 0.03,
    "seq_sum_k1": 0.2, "seq_sum_k2": 0.2, "seq_sum_k3": 0.2,
    "seq_mean_k1": 0.05, "seq_mean_k2": 0.04, "seq_mean_k3": 0.04,
    "seq_max_k2": 0.15, "seq_max_k3": 0.15,
}  # fmt: skip


def weighted(level: str, mode: str = "truncate", **more: Any) -> dict[str, Any]:
    return {"rollout_is": level, "rollout_is_mode": mode} | more


def rejected(*options: str, bound: float | list[float], **more: Any) -> dict[str, Any]:
    bounds = bound if isinstance(bound, list) else [bound]
    return {"rollout_rs": list(options), "rollout_rs_threshold": bounds} | more


SRS_CORR = rejected("seq_sum_k3", bound=0.2)
SRS_PPO = rejected("seq_sum_k3", bound=0.6, rollout_rs_ratio="ppo")
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "bypass": {"bypass_mode": True},
    **{
        f"weight_{level}_{mode}": weighted(level, mode, rollout_is_threshold=1.3)
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "clip", "mask", "icepop")
    },
    "weight_token_icepop_bounds": weighted(
        "token", "icepop", rollout_is_threshold=1.5, rollout_is_threshold_lower=0.9
    ),
    **{
        f"weight_{level}_{mode}_normalised": weighted(level, mode, rollout_is_batch_normalize=True)
        for level, modes in {
            "token": "truncate clip",
            "sequence": "truncate icepop",
            "geometric": "truncate",
        }.items()
        for mode in modes.split()
    },
    **{f"rs_{option}": rejected(option, bound=bound) for option, bound in REJECTIONS.items()},
    "rs_seq_mean_k1_two_sided": rejected(
        "seq_mean_k1", bound=0.1, rollout_rs_threshold_lower=-0.05
    ),
    "rs_seq_two": rejected("seq_mean_k1", "seq_max_k3", bound=[0.1, 0.15]),
    "rs_seq_one_bound_for_two": rejected("seq_mean_k2", "seq_max_k3", bound=0.15),
    "rs_seq_sum_k3_ppo": SRS_PPO,
    "veto": {"veto_threshold": 0.06},
    # arXiv 2605.14220, equations 8 to 11.
    "bypass_srs_k3_corr": SRS_CORR | {"bypass_mode": True},
    "bypass_srs_k3_ppo": SRS_PPO | {"bypass_mode": True},
    **{
        f"weight_tis_srs_{k}_corr": rejected(f"seq_sum_{k}", bound=0.2, rollout_is="token")
        for k in ("k1", "k3")
    },
}


def run_config(
    loss: str,
    correction: dict[str, Any],
    algorithm: dict[str, Any] | None = None,
    backend: str = "local",
    **actor: Any,
) -> Config:
    """The config of a run with these keys; `actor`: of the section actor."""
    batch = {
        "ppo_mini_batch_size": 6,
        "ppo_micro_batch_size_per_gpu": 1,
        "log_prob_micro_batch_size_per_gpu": 1,
    }
    lengths = {
        "max_prompt_length": 4,
        "max_response_length": T + 3,
    }  # the longest response of a batch may be shorter
    return build_config(
        {
            "name": "objectives",
            "backend": backend,
            "model": {"path": "model"},
            "data": {"train_files": "train.parquet", "train_batch_size": 6, **lengths},
            "rollout": {"n": 2},
            "actor": {"loss": loss, **batch, **actor},
            "algorithm": algorithm or {},
            "rollout_correction": correction,
            "trainer": {"total_training_steps": 1, "val_before_train": False},
        }
    )


def parts(count: int) -> list[torch.Tensor]:
    """The rows of a mini-batch in `count` micro-batches of unequal size; more than one in another order."""
    order = torch.randperm(B, generator=torch.Generator().manual_seed(count))
    return (
        [torch.arange(B)] if count == 1 else list(order.tensor_split([2, *range(4, 2 * count, 2)]))
    )


def call(
    rows: dict[str, torch.Tensor], config: Config, micro_batches: list[torch.Tensor]
) -> tuple[float, torch.Tensor, list[dict[str, float]]]:
    """Loss, gradient and statistics of a mini-batch, as the local backend sums them over its micro-batches."""
    settings = objective_settings(config)
    mask = rows["response_mask"]
    weight = correction_weights(
        rows["old_log_prob"], rows["rollout_log_prob"], mask, settings.correction
    )
    total, gradient, all_statistics = 0.0, torch.zeros(mask.shape), []
    for part in micro_batches:
        tensors: dict[str, Any] = {name: tensor[part] for name, tensor in rows.items()}
        log_prob = tensors.pop("log_prob").clone().requires_grad_()
        loss, statistics = objective_loss(
            log_prob,
            **tensors,
            settings=settings,
            weight=None if weight is None else weight[part],
            responses=int(mask.any(1).sum()),
            tokens=int(mask.sum()),
        )
        loss.backward()
        total += loss.item()
        assert log_prob.grad is not None
        gradient[part] = log_prob.grad
        all_statistics.append(statistics)
    return total, gradient, read(all_statistics)
