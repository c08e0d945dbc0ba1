"""The router against vLLM's own rule; replay and record of the routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cpu_features import needs_engine_attention
from random_models import save_random_model

from qarl.align import align_model
from qarl.align.cpu import align_module
from qarl.align.router import (
    AlignedRouter,
    differing_tokens,
    engine_weights,
    recorded_routing,
    replayed_routing,
    transformers_weights,
)
from qarl.kernels.cpu import layer_ops
from qarl.quant import QuantExperts, packed_state_dict, quantize_model
from qarl.step.routing import RoutingReplay

LAYERS, EXPERTS, TOP_K = 2, 4, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("routing") / "model", "qwen3_moe")


def load(
    folder: Path, level: str = "off", scheme: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    if scheme is not None:
        quantize_model(model, scheme=scheme, group_size=32)
    align_model(model, level)
    return model


def tokens(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(0))


def make_router(experts: int, top_k: int, *, renormalize: bool) -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = transformers.Qwen3MoeConfig(
        hidden_size=64, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=renormalize
    )
    router: Any = Qwen3MoeTopKRouter(config).bfloat16()
    torch.nn.init.normal_(router.weight, std=0.3)
    return router


@needs_engine_attention
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (4, 1), (3, 3)])
def test_the_router_is_vllms_select_experts_in_bits_and_order(
    experts: int, top_k: int, renormalize: bool
) -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import select_experts

    torch.manual_seed(experts)
    router = make_router(experts, top_k, renormalize=renormalize)
    align_module(router, AlignedRouter)
    x = torch.randn(300, 64).bfloat16()
    x[:20] = x[:20].round()  # ties
    logits, weights, ids = router(x.view(3, 100, 64))
    theirs = select_experts(x, logits, top_k, False, renormalize)
    assert torch.equal(weights.float(), theirs[0]) and torch.equal(ids.int(), theirs[1])
    # Other tokens in the batch do not count.
    assert torch.equal(router(x[7:9])[2], ids[7:9])


@pytest.mark.parametrize("renormalize", [True, False])
def test_transformers_own_weights_are_computed_as_transformers_does(renormalize: bool) -> None:
    torch.manual_seed(0)
    router = make_router(16, 4, renormalize=renormalize)
    logits, weights, ids = router(torch.randn(200, 64).bfloat16())
    assert torch.equal(transformers_weights(logits, ids, renormalize=renormalize), weights)
    close = engine_weights(logits, ids, renormalize=renormalize)
    # Without norm_topk_prob: half a BF16 step of the logarithms of sum and weight, up to 8, is 1.6% each, and 0.8% for
    # the rounding of both results.
    torch.testing.assert_close(
        close.float(), weights.float(), rtol=0.02 if renormalize else 0.04, atol=1e-3
    )


CASES = [("off", None), ("linears", "w4a16"), ("model", "w4a16"), ("model", None)]


@pytest.mark.parametrize(("level", "scheme"), CASES)
def test_a_replay_of_the_own_choice_changes_no_bit_and_another_is_followed(
    folder: Path, level: str, scheme: str | None
) -> None:
    model, ids = load(folder, level, scheme), tokens()
    with torch.no_grad():
        with recorded_routing(model) as record:
            plain = model(input_ids=ids).logits
        own = record.experts()
        assert own.shape == (40, LAYERS, TOP_K) and own.dtype == torch.int64
        with replayed_routing(model, own.to(torch.uint8)):
            assert torch.equal(model(input_ids=ids).logits, plain)
        # Two rows unknown: they go their own way.
        other = torch.stack(
            [(own.min(-1).values + 1) % EXPERTS, (own.min(-1).values + 2) % EXPERTS], dim=-1
        )
        other[3], other[5] = 0, -1
        seen: dict[int, torch.Tensor] = {}
        handles = [
            layer.mlp.experts.register_forward_pre_hook(
                lambda _, inputs, i=i: seen.__setitem__(i, inputs[1])
            )
            for i, layer in enumerate(model.model.layers)
        ]
        with replayed_routing(model, other), recorded_routing(model) as record:
            changed = model(input_ids=ids).logits
        for handle in handles:
            handle.remove()
        used = torch.stack([seen[0], seen[1]], dim=1)
        known = [i for i in range(40) if i not in (3, 5)]
        assert torch.equal(used[known], other[known]) and torch.equal(
            used[[3, 5], 0], own[[3, 5], 0]
        )
        assert torch.equal(record.experts()[:, 0], own[:, 0]), (
            "the router's own choice is recorded, not the replay"
        )
        assert not torch.equal(changed, plain)
        assert torch.equal(model(input_ids=ids).logits, plain), "no hook is left behind"


def test_the_replayed_router_has_its_gradient_and_checkpointing_keeps_it(folder: Path) -> None:
    def gradients(*, checkpointing: bool, replay: bool) -> dict[str, torch.Tensor]:
        model = load(folder, "model", "w4a16")
        model.train(checkpointing)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        routing = (
            torch.tensor([[0, 3]]).expand(40, LAYERS, TOP_K)
            if replay
            else torch.zeros(40, LAYERS, TOP_K).long()
        )
        with replayed_routing(model, routing):
            model(input_ids=tokens(), use_cache=False).logits.float().logsumexp(-1).sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain = gradients(checkpointing=False, replay=True)
    recomputed = gradients(checkpointing=True, replay=True)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    gate = plain["model.layers.1.mlp.gate.weight"]
    assert gate[[0, 3]].any() and not gate[[1, 2]].any()
    native = gradients(checkpointing=False, replay=False)
    assert native["model.layers.1.mlp.gate.weight"].any(1).sum() > 2


def test_layers_without_experts_have_their_places(tmp_path: Path, folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.mlp_only_layers = [0]
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    align_model(model, "model")
    with torch.no_grad(), recorded_routing(model) as record:
        model(input_ids=tokens())
    own = record.experts()
    assert own.shape == (40, 2, TOP_K) and (own[:, 0] == -1).all() and (own[:, 1] >= 0).all()
    with torch.no_grad(), replayed_routing(model, own):
        model(input_ids=tokens())
    # An engine returns zeros for a dense layer, and nothing for its last token.
    engine = own.clamp(min=0)
    engine[-1] = 0
    replay = RoutingReplay()
    with torch.no_grad():
        replay.begin(model, engine)
        model(input_ids=tokens())
        compared = replay.end()
        replay.stop()
    assert compared is not None and not compared.other.any()
    assert compared.known.tolist() == [True] * 39 + [False]


def test_tokens_that_differ() -> None:
    own = torch.tensor(
        [
            [[0, 1], [2, 3]],
            [[0, 1], [2, 3]],
            [[0, 1], [2, 3]],
            [[-1, -1], [2, 3]],
            [[-1, -1], [2, 3]],
        ]
    )
    engine = torch.tensor(
        [[[1, 0], [2, 3]], [[0, 1], [2, 1]], [[0, 0], [3, 2]], [[0, 0], [3, 2]], [[0, 1], [0, 3]]]
    )
    assert differing_tokens(own, engine.to(torch.uint8)).tolist() == [
        False,
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("scheme", [None, "w4a16"])
def test_the_model_keeps_its_parameters_and_its_published_tensors(
    folder: Path, scheme: str | None
) -> None:
    plain = load(folder, "off", scheme)
    before = dict(packed_state_dict(plain))
    keys, pointers = list(plain.state_dict()), [p.data_ptr() for p in plain.parameters()]
    report = align_model(plain, "model")
    assert report.replaced["routers"] == LAYERS and report.replaced.get(
        "BF16 experts", 0
    ) == LAYERS * (scheme is None)
    assert (
        list(plain.state_dict()) == keys and [p.data_ptr() for p in plain.parameters()] == pointers
    )
    assert all(isinstance(layer.mlp.experts, QuantExperts) for layer in plain.model.layers)
    kernels = {layer.mlp.experts.kernel.name for layer in plain.model.layers}
    assert "reference" not in kernels or layer_ops.attention_unavailable("cpu", 32)
    after = dict(packed_state_dict(plain))
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
