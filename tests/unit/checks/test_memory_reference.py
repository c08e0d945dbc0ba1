"""The reference policy in the memory estimate: its size, on which device verl holds it, and the doctor's advice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from memory_cases import SMALL, parts, run
from random_models import save_random_model

from qarl.checks.memory import OFFLOAD, estimate
from qarl.checks.memory_parts import GIB
from qarl.checks.model_size import ModelSize
from qarl.quant.linear import QuantLinear
from qarl.quant.state_dict import low_bit_layers
from qarl.trainer.policy import Policy

REFERENCE = "reference policy: weights and low-bit tensors"


@pytest.mark.parametrize("scheme", ["bf16", pytest.param("w4a16", marks=needs_w4a16_cpu)])
def test_a_reference_policy_is_as_large_as_what_it_holds(scheme: str, tmp_path: Path) -> None:
    """After a forward: the storages of its parameters, published tensors and tensors in the kernel's layout."""
    folder = save_random_model(tmp_path)
    config = run(
        actor__use_kl_loss=True,
        model__path=str(folder),
        quant__scheme=scheme,
        quant__align="linears",
    )
    policy = Policy.load(config).freeze()
    with torch.no_grad():
        policy.model(input_ids=torch.zeros(1, 20, dtype=torch.long), use_cache=False)
    tensors = list(policy.model.parameters())
    for layer in low_bit_layers(policy.model).values():
        assert isinstance(layer, QuantLinear)
        prepared = (
            [layer.prepared] if isinstance(layer.prepared, torch.Tensor) else list(layer.prepared)
        )
        tensors += [*layer.quantized().tensors.values(), *prepared]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    size = ModelSize.from_config(policy.model.config)
    kernels = {
        tuple(layer.weight.shape): layer.kernel for layer in low_bit_layers(policy.model).values()
    }
    plain = estimate(
        size, config.model_copy(update={"actor": run().actor}), device="cpu", kernels=kernels
    )
    memory = estimate(size, config, device="cpu", kernels=kernels)
    assert parts(memory).keys() - parts(plain).keys() == {REFERENCE}
    assert parts(memory)[REFERENCE] == sum(storages.values())
    for phase in ("rollout", "old_log_prob", "update", "step"):
        assert memory.total(phase) - plain.total(phase) == parts(memory)[REFERENCE]


def test_verls_reference_policy() -> None:
    """One copy of the weights, sharded over the ranks; on GPUs in host memory, whatever is offloaded."""
    keys, name = {"actor_rollout_ref.actor.use_kl_loss": True}, "reference policy, FP32, sharded"
    dtype = {"actor_rollout_ref.ref.fsdp_config.model_dtype": "bf16"}
    for verl, expected in (
        ({}, {}),
        (keys, {name: 4 * 74560 // 2}),
        ({"+algorithm.use_kl_in_reward": True}, {name: 4 * 74560 // 2}),
        (keys | dtype, {"reference policy, 16 bits, sharded": 2 * 74560 // 2}),
    ):
        for offload in (False, True):
            config = run(
                backend="verl",
                trainer__n_gpus_per_node=2,
                verl=verl | dict.fromkeys(OFFLOAD, offload),
            )
            on_gpu = estimate(SMALL, config, device="cuda", gpu_memory_bytes=8 * GIB)
            host = {part.name: part.bytes for part in on_gpu.host if "reference" in part.name}
            assert host == expected and not [
                part for part in on_gpu.parts if "reference" in part.name
            ]
        on_cpu = estimate(SMALL, config, device="cpu")
        assert {
            part.name: part.bytes for part in on_cpu.parts if "reference" in part.name
        } == expected
        assert on_cpu.host == ()
