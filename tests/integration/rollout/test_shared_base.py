"""With adapters, trainer and engine in one process multiply by one copy of the base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import config, greedy
from random_models import save_random_model

from qarl.quant.state_dict import low_bit_layers
from qarl.rollout.engine import RolloutEngine
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import engine_config

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
EXPERTS = {"gate_up_proj", "down_proj"}
CASES = {
    "w4a16": ("qwen3", "w4a16", set()),
    "fp8": ("llama", "fp8", set()),
    "w8a8": ("qwen2", "w8a8", LINEARS),
    "bf16": ("qwen3", "bf16", LINEARS),
    "dequantized": ("qwen3", "w4a16", LINEARS),
    "experts-w4a16": ("qwen3_moe", "w4a16", {"gate"}),
    "experts-fp8": ("qwen3_moe", "fp8", {"gate", *EXPERTS}),
    "experts-bf16": (
        "qwen3_moe",
        "bf16",
        {"gate", "q_proj", "k_proj", "v_proj", "o_proj", "experts"},
    ),
}
"""Family, scheme, and the layers that are not shared, because vLLM packs them."""


def policy_of(tmp_path: Any, name: str) -> tuple[Policy, Any]:
    """Llama's lm_head is tied. vLLM pads the vocabulary of 100 tokens to 128."""
    family, scheme, _ = CASES[name]
    folder = save_random_model(tmp_path / "model", family, vocab_size=100, tie=family == "llama")
    kernels = "dequantized" if name == "dequantized" else "engine"
    ignore = '["lm_head","re:.*mlp[.]gate$"]'
    keys = (
        "lora.r=8",
        f"quant.scheme={scheme}",
        f"quant.ignore={ignore}",
        f"quant.kernels={kernels}",
    )
    settings = config(tmp_path, *keys, f"model.path={folder}", "model.use_remove_padding=false")
    policy = Policy.load(settings)
    assert policy.adapters is not None
    for layer in policy.adapters.layers.values():
        torch.nn.init.normal_(layer.lora_B)
    return policy, settings


def base_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Everything of the base that the trainer holds, by name."""
    held = {
        name: tensor for name, tensor in policy.model.named_parameters() if not tensor.requires_grad
    }
    for name, layer in low_bit_layers(policy.model).items():
        for weight, tensors in (layer.stored or {}).items():
            owner = name if weight == "weight" else f"{name}.{weight}"
            held |= {f"{owner}.{leaf}": tensor for leaf, tensor in tensors.items()}
    return {name: tensor for name, tensor in held.items() if not tensor.is_meta}


def not_shared(policy: Policy, engine: RolloutEngine) -> set[str]:
    """The layers of which a tensor other than a bias is not in the engine's memory."""
    assert engine.weights is not None
    theirs = {tensor.untyped_storage().data_ptr() for tensor in engine.weights.storage().values()}
    left = {
        name
        for name, tensor in base_of(policy).items()
        if tensor.untyped_storage().data_ptr() not in theirs
    }
    return {name.rsplit(".", 2)[1] for name in left if not name.endswith("bias")}


@pytest.mark.parametrize("name", CASES)
def test_trainer_and_engine_have_one_copy_of_the_base(name: str, tmp_path: Any) -> None:
    own = CASES[name][2]
    policy, settings = policy_of(tmp_path, name)
    tokens = torch.arange(3, 35)[None]

    def logits_and_gradient() -> torch.Tensor:
        x = policy.model.get_input_embeddings()(tokens).detach().requires_grad_()
        logits = policy.model(inputs_embeds=x, use_cache=False).logits
        (gradient,) = torch.autograd.grad(logits.float().square().sum(), x)
        return torch.cat([logits.detach(), gradient], -1)

    before, published = (
        logits_and_gradient(),
        {name: tensor.clone() for name, tensor in policy.published_tensors()},
    )

    def publish(engine: RolloutEngine, version: int) -> Any:
        policy.publish_base(engine, version=version)
        assert policy.adapters is not None
        engine.publish_adapter(policy.adapters.adapter(), version=version)
        return greedy(engine)

    with RolloutEngine(engine_config(settings, policy)) as engine:
        responses = publish(engine, 0)
        assert not_shared(policy, engine) == own
        assert publish(engine, 1) == responses, "published from the shared memory into itself"
        engine.rebuild()
        assert publish(engine, 2) == responses and not_shared(policy, engine) == own
    assert torch.equal(logits_and_gradient(), before), "the trainer's memory outlives the engine"
    again = dict(policy.published_tensors())
    assert again.keys() == published.keys() and all(
        torch.equal(again[name], published[name]) for name in again
    )


def test_an_engine_with_other_weights_is_not_shared(tmp_path: Any) -> None:
    policy, _ = policy_of(tmp_path, "w8a8")
    assert policy.adapters is not None
    base = base_of(policy)
    for name in ("model.norm.weight", "model.layers.1.self_attn.q_proj.weight"):
        with pytest.raises(RuntimeError, match="the engine has another"):
            policy.adapters.share(base | {name: base[name] + 1})
