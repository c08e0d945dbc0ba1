"""The optimizer against torch.optim.AdamW, the muon package and verl's schedules, on the same gradients."""

from __future__ import annotations

import io
import math

import pytest
import torch
from muon import SingleDeviceMuonWithAuxAdam
from same_bytes import same_bytes

from qarl.config import OptimConfig
from qarl.trainer.master_optimizer import MasterOptimizer

SHAPES = {
    "model.embed_tokens.weight": (20, 16),
    "model.layers.0.self_attn.q_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
    "model.layers.0.mlp.experts.down_proj": (3, 16, 24),
    "model.layers.0.input_layernorm.weight": (16,),
    "lm_head.weight": (20, 16),
}
MUON_NAMES = {name for name, shape in SHAPES.items() if "layers" in name and len(shape) > 1}
EVERY_KIND = pytest.mark.parametrize(
    ("name", "master_dtype"),
    [("adamw", "fp32"), ("adamw", "bf16"), ("muon", "fp32"), ("muon", "bf16")],
)


def make_config(**changes: object) -> OptimConfig:
    settings = {
        "lr": 1e-2,
        "betas": (0.9, 0.99),
        "weight_decay": 0.1,
        "muon_lr": 0.02,
        "muon_momentum": 0.9,
    }
    return OptimConfig(**{**settings, **changes})


def make_parameters(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        n: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype))
        for n, s in SHAPES.items()
    }


def make_gradients(step: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def make_optimizer(
    parameters: dict[str, torch.nn.Parameter],
    *,
    seed: int = 0,
    total_training_steps: int = 10,
    **changes: object,
) -> MasterOptimizer:
    return MasterOptimizer(
        parameters.items(),
        make_config(**changes),
        seed=seed,
        total_training_steps=total_training_steps,
    )


def give_gradients(
    parameters: dict[str, torch.nn.Parameter], gradients: dict[str, torch.Tensor]
) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone()


def train(
    optimizer: MasterOptimizer, parameters: dict[str, torch.nn.Parameter], steps: range
) -> None:
    for step in steps:
        give_gradients(parameters, make_gradients(step))
        optimizer.accumulate()
        optimizer.step()
        optimizer.scheduler_step()


@pytest.mark.parametrize(("name", "steps"), [("adamw", 5), ("muon", 4)])
def test_masters_are_those_of_torchs_adamw_and_of_the_muon_package(name: str, steps: int) -> None:
    parameters = make_parameters()
    reference = {n: torch.nn.Parameter(p.detach().float()) for n, p in parameters.items()}
    config = make_config(name=name)
    adam = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    muon = {
        "lr": config.muon_lr,
        "momentum": config.muon_momentum,
        "weight_decay": config.weight_decay,
    }
    expected: torch.optim.Optimizer = torch.optim.AdamW(reference.values(), **adam, fused=True)
    if name == "muon":
        hidden = [p for n, p in reference.items() if n in MUON_NAMES]
        others = [p for n, p in reference.items() if n not in MUON_NAMES]
        groups = [
            {"params": hidden, "use_muon": True, **muon},
            {"params": others, "use_muon": False, **adam},
        ]
        expected = SingleDeviceMuonWithAuxAdam(groups)
    optimizer = make_optimizer(parameters, name=name)
    for step in range(steps):
        train(optimizer, parameters, range(step, step + 1))
        for parameter_name, gradient in make_gradients(step).items():
            reference[parameter_name].grad = gradient.float()
        expected.step()
    masters = optimizer.state_dict()["masters"]
    for parameter_name, parameter in parameters.items():
        assert torch.equal(masters[parameter_name], reference[parameter_name])
        assert torch.equal(parameter, reference[parameter_name].bfloat16())


def test_micro_batches_are_summed_in_fp32() -> None:
    """256 gradients of 2**-9 on top of 1: in BF16 each addition would be lost, in FP32 the sum is exactly 1.5."""
    parameter = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    optimizer = make_optimizer({"w": parameter})
    for value in [1.0] + [2.0**-9] * 256:
        parameter.grad = torch.full_like(parameter, value)
        optimizer.accumulate()
        assert parameter.grad is None
    assert optimizer.clip_grad_norm(math.inf) == 1.5 * 4


def test_clip_grad_norm_is_torchs() -> None:
    parameters = make_parameters(torch.float32)
    reference = {n: torch.nn.Parameter(p.detach().clone()) for n, p in parameters.items()}
    config = make_config()
    adamw = torch.optim.AdamW(
        reference.values(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    optimizer = make_optimizer(parameters)
    for step in range(2):
        give_gradients(parameters, make_gradients(step, torch.float32))
        give_gradients(reference, make_gradients(step, torch.float32))
        optimizer.accumulate()
        expected = torch.nn.utils.clip_grad_norm_(reference.values(), 0.5).item()
        assert optimizer.clip_grad_norm(0.5) == expected > 0.5
        optimizer.step()
        adamw.step()
    for name, parameter in parameters.items():
        assert torch.allclose(parameter, reference[name], rtol=1e-6, atol=1e-7)


@EVERY_KIND
def test_learning_rate_zero_changes_no_byte(name: str, master_dtype: str) -> None:
    parameters = make_parameters()
    for parameter in parameters.values():
        parameter.data.view(-1)[0] = -0.0
    before = {n: p.detach().clone() for n, p in parameters.items()}
    optimizer = make_optimizer(
        parameters, name=name, master_dtype=master_dtype, lr=0.0, muon_lr=0.0
    )
    train(optimizer, parameters, range(3))
    assert all(same_bytes(parameters[n], before[n]) for n in SHAPES)


@EVERY_KIND
def test_state_dict_continues_bitwise(name: str, master_dtype: str) -> None:
    changes = {
        "name": name,
        "master_dtype": master_dtype,
        "lr_scheduler_type": "cosine",
        "lr_warmup_steps": 2,
    }
    parameters = make_parameters()
    optimizer = make_optimizer(parameters, **changes)
    train(optimizer, parameters, range(3))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": parameters}, file)
    train(optimizer, parameters, range(3, 6))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make_parameters()
    for parameter_name, parameter in resumed.items():
        parameter.data.copy_(saved["model"][parameter_name])
    continued = make_optimizer(resumed, seed=99, **changes)
    continued.load_state_dict(saved["optimizer"])
    assert continued.training_step == 3
    train(continued, resumed, range(3, 6))
    assert all(same_bytes(resumed[n], parameters[n]) for n in SHAPES)
    assert continued.lr == optimizer.lr
