"""What one layer of a publish costs, by count: dispatched kernels (views are free), and waits for the device.

The engine's model is vLLM's own on a CPU. A GPU's launches are those of the same code, except that vLLM packs there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from random_moe import IGNORE, save_checkpoint, save_random_moe, wire_tensors
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("vllm")

from worker_models import distributed_vllm, worker_model

from qarl.kernels.cpu.vllm_linears import to_tiles
from qarl.process import configure_vllm_process
from qarl.quant import get_scheme
from qarl.quant.experts import stacked
from qarl.rollout.publish.manifest import expected_manifest, unit_of
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.remote.delta import PublishedCache
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.records import BEGIN, COMMIT, UNIT, read_record
from qarl.rollout.remote.wire import encode_publish

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]
LIMIT = 40
WAITS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
}


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    configure_vllm_process()
    with distributed_vllm():
        yield


class Kernels(TorchDispatchMode):
    """Operators that read or write memory, by name. Those whose results only alias their arguments are views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = bool(returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in returns
        )
        if not is_view and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **kwargs or {})


class Waits(TorchFunctionMode):
    """Methods of tensors that wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in WAITS:
            self.names.append(func.__name__)
        return func(*args, **kwargs or {})


def counts(
    folder: Path, scheme_name: str, experts: int, changed: str | None = None
) -> tuple[list[str], list[str], list[str]]:
    """Kernels of the sender and of the receiver, and the waits of both, for the middle layer of the second publish.

    `changed`: the beginning of the names of the tensors in which a word changes, if the second publish is a delta."""
    scheme = get_scheme(scheme_name, 32)
    like = save_random_moe(folder / "like", num_experts=experts)
    tensors = wire_tensors(like, scheme)
    model, config = worker_model(save_checkpoint(folder / "model", like, scheme, tensors), 0, 1)
    expected = expected_manifest(config.model_config.hf_config, scheme, IGNORE)
    receiver = StreamReceiver(EngineWeights(model, config, expected, kv_caches=list))
    published = list(stacked(tensors.items()))
    cache = None if changed is None else PublishedCache()
    receiver.feed(encode_publish(published, version=1, cache=cache))
    if changed is not None:
        published = [
            (name, other_word(tensor) if name.startswith(changed) else tensor)
            for name, tensor in published
        ]
    stream = encode_publish(published, version=2, cache=cache, is_delta=cache is not None)
    bucket, units = list[Any](), 0
    while True:
        with Kernels() as sent, Waits() as waits:
            unit = []
            for item in stream:
                unit.append(item)
                if item[0] in (UNIT, BEGIN, COMMIT):
                    break
        bucket, units = unit, units + 1
        if _unit(bucket) == "model.layers.1":
            with Kernels() as received, waits:
                receiver.feed(bucket)
            return sent.names, received.names, waits.names
        receiver.feed(bucket)


def _unit(bucket: list[Any]) -> str | None:
    """The decoder layer of a unit, which may have no tensors if it is a delta."""
    name, tensor = bucket[-1]
    if name != UNIT:
        return None
    return (
        unit_of(bucket[0][0])
        if tensor.dtype == torch.int64
        else str(read_record(name, tensor)["unit"])
    )


def other_word(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(torch.uint8).view(-1)[0] ^= 1
    return tensor


def conversions_to_tiles() -> int:
    """Kernels that bring q/k/v, o and the two stacks of a layer into the layout of vLLM's int4 kernel on a CPU."""
    with Kernels() as kernels:
        to_tiles(torch.zeros(16, 4, dtype=torch.int32))
    return 4 * (len(kernels.names) - kernels.names.count("aten.zeros.default"))


@pytest.mark.parametrize(
    ("scheme", "changed"),
    [
        *(("w4a16", None), ("fp8", None), ("bf16", None)),
        *(("w4a16", "none"), ("bf16", "none"), ("w4a16", "model.layers.1.mlp.experts.")),
    ],
)
def test_a_layer_costs_the_same_with_any_number_of_experts(
    scheme: str, changed: str | None, tmp_path: Path
) -> None:
    """W8A8 on a CPU is left out: oneDNN has one object per matrix. In BF16, vLLM reads the address of such an object
    when it frees that of a dense layer. If nothing has changed, each side reads one result of the layer."""
    few, many = (counts(tmp_path / str(experts), scheme, experts, changed) for experts in (4, 16))
    assert few == many
    sent, received, waits = many
    freed = sum("release_dnnl" in name for name in received)
    if changed == "none":
        waits = [name for name in waits if name not in ("cpu", "numpy")]  # those read records
        assert waits[:2] == ["tolist"] * 2 and len(waits) - 2 == freed
    if changed is not None:
        return
    assert waits == ["item"] * freed and not any("local_scalar" in name for name in sent)
    packing = conversions_to_tiles() if scheme == "w4a16" else 0
    assert len(sent) <= LIMIT and len(received) - packing <= LIMIT, (
        len(sent),
        len(received),
        packing,
    )
