"""A linear kernel from a user's file: the choice, the memory plan and the doctor know it by what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from example_plugins import loaded
from memory_cases import parts, run
from random_models import save_random_model

from qarl.checks.check import RunInputs
from qarl.checks.memory import estimate
from qarl.checks.memory_parts import quantized_linears
from qarl.doctor.model import trainer_kernels
from qarl.kernels.base import LinearKernel
from qarl.kernels.registry import choose_linear_kernel, own_kernel, unregister
from qarl.quant import get_scheme, quantize
from qarl.schemes.base import INT4_BF16
from qarl.schemes.kernel_choice import KernelChoice

NAME = "exact_w4a16"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with loaded(own_kernel=lambda: unregister(NAME)):
        yield
    assert own_kernel(KernelChoice.QARL, INT4_BF16).name != NAME


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    folder = save_random_model(tmp_path_factory.mktemp("model"), "qwen3")
    config = run(model__path=str(folder), quant__kernels="qarl", quant__group_size=32)
    return RunInputs(config, plan=True)


def chosen(kernels: KernelChoice) -> type[LinearKernel]:
    return choose_linear_kernel(get_scheme("w4a16", 32), CPU, (33, 64), kernels=kernels).kernel


def test_only_its_option_chooses_it() -> None:
    assert chosen(KernelChoice.QARL).name == NAME
    assert NAME not in (chosen(KernelChoice.ENGINE).name, chosen(KernelChoice.DEQUANTIZED).name)


def test_its_products_are_rounded_once() -> None:
    torch.manual_seed(0)
    low_bit = quantize(torch.randn(33, 64).bfloat16(), get_scheme("w4a16", 32))
    x = torch.randn(5, 64).bfloat16()
    kernel = chosen(KernelChoice.QARL)
    y = kernel.linear(x, kernel.prepare(low_bit.tensors), None)
    assert torch.equal(y, (x.double() @ low_bit.dequantize().double().t()).bfloat16())


def test_the_plan_counts_what_both_sides_hold(inputs: RunInputs) -> None:
    """Of each weight, the trainer has the BF16 copy beside the published tensors, and the engine instead of them."""
    assert {kernel.name for kernel in inputs.trainer_kernels.values()} == {NAME}
    config = inputs.config
    shapes = quantized_linears(inputs.size, config).values()
    bf16 = sum(2 * n * k for n, k in shapes)
    wire = sum(inputs.scheme.wire_bytes(*shape) for shape in shapes)
    plan = parts(estimate(inputs.size, config, device="cpu", kernels=inputs.trainer_kernels))
    assert plan["low-bit tensors in the kernels' layout"] == bf16
    assert "dequantized weights for the backward, BF16" not in plan
    engines = config.model_copy(
        update={"quant": config.quant.model_copy(update={"kernels": KernelChoice.ENGINE})}
    )
    of_vllm = parts(estimate(inputs.size, engines, device="cpu"))
    assert plan["vLLM: weights"] - of_vllm["vLLM: weights"] == bf16 - wire


def test_the_doctor_names_it(inputs: RunInputs) -> None:
    (finding,) = trainer_kernels(
        inputs.config,
        inputs.scheme,
        inputs.machine,
        inputs.quantized,
        inputs.kernels,
        inputs.experts_kernel,
    )
    assert finding.status == "ok"
    assert finding.what.startswith(f"trainer: {NAME} multiplies 14 layers")
