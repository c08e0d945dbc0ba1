"""Publishes into a model of transformers' in the place of vLLM's: the model, the weights, the receiver; and what can
go wrong with a stream on its way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from qarl.quant import get_scheme, packed_state_dict
from qarl.rollout.publish.manifest import expected_manifest
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.remote.delta import Tally
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.records import UNIT, TransferFailed
from qarl.rollout.remote.wire import DeltaSender

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def config(family: str, *, tie: bool = False) -> Any:
    return CONFIGS[family](**SIZES, tie_word_embeddings=tie, head_dim=32)


class PackedHead:
    """As vLLM's method of unquantized layers on a CPU: the product is with a copy of the weight, made once."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.detach().clone()


def engine_model(family: str, *, tie: bool = False, seed: int = 1) -> Any:
    """transformers' model in the place of vLLM's: the same names, each parameter written as it is."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config(family, tie=tie), dtype=torch.bfloat16
    )
    model.model.rotary_emb = nn.Identity()  # its buffers have other names than vLLM's
    if tie:
        model.lm_head.quant_method = PackedHead()
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    return model


def runner_of(model: Any) -> Any:
    """A model runner of vLLM's with `model` in the place of its own."""
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=model.config), lora_config=None)
    return SimpleNamespace(vllm_config=config, get_model=lambda: model, kv_caches=[], device="cpu")


def engine_weights(model: Any, **options: Any) -> EngineWeights:
    expected = expected_manifest(model.config, get_scheme("bf16"), [])
    return EngineWeights(model, None, expected, kv_caches=lambda: (), **options)


def receiver(model: Any, *, clone: bool = False) -> StreamReceiver:
    return StreamReceiver(engine_weights(model), clone=clone)


def write_all(weights: EngineWeights, tensors: Any, version: Any) -> None:
    """A publish by a trainer in the engine's process."""
    with weights.replacing(version) as plan:
        plan.write_units(tensors)


def weights(family: str, *, tie: bool = False, seed: int = 2) -> list[tuple[str, torch.Tensor]]:
    return list(packed_state_dict(engine_model(family, tie=tie, seed=seed), scheme=None, ignore=()))


class Engine:
    """A receiver, its sender, and the transport between them."""

    def __init__(self, *, clone: bool = False) -> None:
        self.model = engine_model("llama")
        self.receiver, self.sender = receiver(self.model, clone=clone), DeltaSender()
        self.transport: Any = iter

    def publish(self, tensors: Any, version: int) -> Tally:
        """Return the sender's counts."""
        stream = self.sender.stream(tensors, version=version, receivers=[self.receiver.fingerprint])
        self.receiver.feed(self.transport(stream))
        if self.receiver.weights.version != version:
            raise TransferFailed("the publish ended before its last record")
        return self.sender.tally

    def has(self, tensors: Any) -> bool:
        state = self.model.state_dict()
        return all(
            torch.equal(state[name].view(torch.int16), tensor.view(torch.int16))
            for name, tensor in tensors
        )


def feed_in_buckets(receiver: StreamReceiver, stream: Any) -> None:
    """As verl's receiver hands tensors over: views of memory that the next bucket overwrites."""
    buffer = torch.empty(1 << 16, dtype=torch.uint8)
    for name, tensor in stream:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        view = buffer[: raw.numel()]
        view.copy_(raw)
        receiver.feed([(name, view.view(tensor.dtype).view(tensor.shape))])


def flip(name: str, at: int = -1) -> Any:
    """A transport that flips a bit of the byte `at` of the tensor `name`."""

    def transport(stream: Any) -> Any:
        for n, tensor in stream:
            if n == name:
                tensor = tensor.clone()
                tensor.view(torch.uint8).view(-1)[at] ^= 1
            yield n, tensor

    return transport


def lose(name: str) -> Any:
    return lambda stream: (item for item in stream if item[0] != name)


def twice(stream: Any) -> Any:
    """The second unit is sent again."""
    items = list(stream)
    unit = [i for i, (name, _) in enumerate(items) if name == UNIT]
    return iter(items[: unit[1] + 1] + items[unit[0] + 1 :])
