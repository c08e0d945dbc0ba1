"""Settings and batches of verl's that the quantized engine refuses, and those it leaves to others."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers

pytest.importorskip("verl")

from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import logprobs_from_logits_v2
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from qarl.config.level import Level
from qarl.errors import UserError
from qarl.kernels.cuda import layer_ops
from qarl.kernels.log_probs import log_probs_of_logits
from qarl.step.updates import RunState
from qarl.verl import engine_checks as plugin_checks
from qarl.verl import fsdp_engine as plugin_engine
from qarl.verl.config_classes import QuantFSDPEngineConfig
from qarl.verl.forward import RouterReplay, log_softmax_of_chosen
from qarl.verl.fsdp_engine import QaRLFSDPEngine, register
from qarl.verl.training_steps import ActorSteps, TrainingStep

MODEL = {
    "lora_rank": 0,
    "use_fused_kernels": False,
    "use_liger": False,
    "enable_activation_offload": False,
}


def quantized_engine() -> QaRLFSDPEngine:
    """One that was never built, for methods that use nothing of the model."""
    engine = object.__new__(QaRLFSDPEngine)
    engine.quant = QuantFSDPEngineConfig(strategy="fsdp2").quant
    engine.routing = RouterReplay()
    engine.steps = ActorSteps()
    return engine


@pytest.mark.parametrize(("scheme", "capability"), [("fp8", (8, 0)), ("w8a8", (10, 0))])
def test_an_actor_refuses_a_gpu_that_cannot_compute_its_scheme(monkeypatch, scheme, capability):
    """Before it loads the model."""
    monkeypatch.setattr(plugin_checks, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    settings = QuantFSDPEngineConfig(strategy="fsdp2", quant={"scheme": scheme})
    with pytest.raises(UserError, match="compute capability"):
        QaRLFSDPEngine(SimpleNamespace(**MODEL), settings, None, None)


def test_logits_are_fp32_and_those_without_a_token_take_no_probability(monkeypatch):
    seen = []
    monkeypatch.setattr(plugin_engine.forward, "log_softmax_of_chosen", lambda *arguments: None)
    monkeypatch.setattr(
        FSDPEngineWithLMHead,
        "prepare_model_outputs",
        lambda *rest: seen.append(rest[1].logits) or {},
    )
    engine = quantized_engine()
    engine.model_config = SimpleNamespace(tokenizer=range(6))
    output = SimpleNamespace(logits=torch.zeros(1, 3, 8, dtype=torch.bfloat16))
    engine.prepare_model_outputs(output, {}, tu.get_tensordict({}, {}), None)
    (logits,) = seen
    assert logits.dtype == torch.float32
    assert (logits[..., :6] == 0).all() and (logits[..., 6:] < -1e29).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([1.0, 0.3, 1.7])])
@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_have_the_bits_of_the_local_backends(packed, temperature):
    """verl's, logits less logsumexp, have not."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 9, 2])
    total = int(lengths.sum())
    tokens, logits = (
        torch.randint(64, (total,), generator=random),
        5 * torch.randn(total, 64, generator=random),
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    micro_batch = tu.get_tensordict(
        {"input_ids": torch.nested.nested_tensor_from_jagged(tokens, offsets)}, {}
    )
    tu.assign_non_tensor(micro_batch, use_remove_padding=packed)
    each = temperature if isinstance(temperature, torch.Tensor) else torch.full((3,), temperature)
    output_args = {
        "input_ids_rmpad_rolled": tokens,
        "temperature": each,
        "temperature_is_one": bool((each == 1).all()),
    }
    if packed:
        verl_logits = torch.cat([logits, torch.zeros(3, 64)])[
            None
        ]  # three places that fill the packed row up
        output_args |= {
            "pad_size": 3,
            "temperature_rmpad": torch.cat([each.repeat_interleave(lengths), torch.ones(3)]),
        }
        output_args["input_ids_rmpad_rolled"] = torch.cat(
            [tokens, torch.zeros(3, dtype=torch.int64)]
        )
    else:
        verl_logits = torch.nested.nested_tensor_from_jagged(logits, offsets).to_padded_tensor(0.0)
    log_probs = log_softmax_of_chosen(
        verl_logits,
        output_args,
        micro_batch,
        lambda chosen, pad_size: chosen[: len(chosen) - pad_size],
    )
    expected, verls = [], []
    for row, labels, divisor in zip(
        logits.split(lengths.tolist()), tokens.split(lengths.tolist()), each, strict=True
    ):
        expected.append(log_probs_of_logits(row, labels, temperature=float(divisor))[0])
        verls.append(logprobs_from_logits_v2(row / divisor, labels))
    assert torch.equal(log_probs.offsets(), offsets) and torch.equal(
        log_probs.values(), torch.cat(expected)
    )
    assert not torch.equal(torch.cat(verls), torch.cat(expected))


@pytest.mark.parametrize(("eager", "limit"), [(False, "model"), (True, "linears")])
def test_an_engine_without_graphs_keeps_the_limit_of_linears(monkeypatch, eager, limit):
    """As in the local backend, also when GPUs have confirmed the level: such an engine may split a row's keys."""
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=128,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).bfloat16()
    monkeypatch.setattr(layer_ops, "CONTRACTS", dict.fromkeys(layer_ops.CONTRACTS, "gpu.json"))
    monkeypatch.setattr(FSDPEngineWithLMHead, "_build_module", lambda self: model)
    monkeypatch.setattr(plugin_engine, "get_device_name", lambda: "cuda")
    engine = quantized_engine()
    engine.quant = QuantFSDPEngineConfig(
        strategy="fsdp2", quant={"scheme": "bf16", "enforce_eager": eager}
    ).quant
    engine.model_config, engine.use_remove_padding, engine.rank = (
        SimpleNamespace(tokenizer=range(64)),
        True,
        0,
    )
    engine._build_module()
    assert (engine.align, engine.limit_level) == ("model", limit)


def test_a_mismatch_after_the_first_update_is_a_warning(caplog):
    engine = quantized_engine()
    engine.limit_level = Level.MODEL
    engine.steps.run = RunState.TRAINED
    with caplog.at_level("WARNING", logger="qarl.verl"):
        assert not engine._check_limit(TrainingStep(), 1e-4, 50.0)
        assert engine._check_limit(TrainingStep(), 0.02, 50.0)
    assert "mean |δ| between trainer and engine is 0.02" in caplog.text
    engine.steps.run = RunState.PROBED
    with pytest.raises(UserError, match="disagree"):
        engine._check_limit(TrainingStep(), float("nan"), 50.0)


ULYSSES, STRATEGY = {"ulysses_sequence_parallel_size": 2}, {"strategy": "fsdp"}


@pytest.mark.parametrize(
    ("quantized", "device", "changes", "refused"),
    [
        (True, "cuda", ULYSSES, "ulysses_sequence_parallel_size=2"),
        (False, "cpu", ULYSSES, "ulysses_sequence_parallel_size=2"),
        (
            False,
            "cuda",
            ULYSSES,
            None,
        ),  # Ulysses exchanges heads only in Flash Attention, which this actor uses
        (False, "cpu", STRATEGY, "strategy=fsdp"),
        (False, "cuda", STRATEGY, None),
        (True, "cpu", {"forward_only": True}, "ref.fsdp_config._target_"),
        (
            True,
            "cpu",
            {"mixed_precision": {"param_dtype": "bf16", "cast": True}},
            "mixed_precision",
        ),
        (True, "cpu", {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}, None),
    ],
)
def test_settings_that_an_engine_refuses_before_it_loads_the_model(
    monkeypatch, quantized, device, changes, refused
):
    monkeypatch.setattr(plugin_engine, "get_device_name", lambda: device)
    monkeypatch.setattr(plugin_checks, "get_device_name", lambda: "cpu")
    monkeypatch.setattr(FSDPEngineWithLMHead, "__init__", lambda *_: None)
    kind = QuantFSDPEngineConfig if quantized else FSDPEngineConfig
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        QaRLFSDPEngine(
            SimpleNamespace(**MODEL), kind(**{"strategy": "fsdp2"} | changes), None, None
        )


def test_a_trainer_without_old_log_probs_is_told_what_it_lacks():
    """One that is not verl's own, and calls `train_batch` without asking for log-probs before."""
    mask = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(UserError, match="the batch has no old_log_probs"):
        TrainingStep().begin_mini_batch(
            tu.get_tensordict({"response_mask": mask, "rollout_log_probs": mask}, {}), None
        )


def test_positions_of_several_axes_are_refused():
    with pytest.raises(UserError, match="mrope"):
        quantized_engine().prepare_model_inputs({"position_ids": torch.zeros(2, 4, 5)})


def test_another_packages_engine_stays(monkeypatch, caplog):
    class Other(FSDPEngineWithLMHead):
        pass

    monkeypatch.setattr(EngineRegistry, "_engines", {})
    EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")(Other)
    register()
    engines = EngineRegistry._engines["language_model"]
    assert engines["fsdp2"][("cuda", "nvidia")] is Other
    assert engines["fsdp"][("cuda", "nvidia")] is engines["fsdp2"]["cpu"] is QaRLFSDPEngine
    (record,) = caplog.records
    assert "fsdp2" in record.message and "keeps another package's engine" in record.message


def test_a_bad_time_limit_is_refused_before_the_model_is_loaded(monkeypatch):
    """From verl's command line."""
    monkeypatch.setattr(plugin_engine, "get_device_name", lambda: "cpu")
    monkeypatch.setenv("QARL_PUBLISH_TIMEOUT", "soon")
    with pytest.raises(UserError, match="QARL_PUBLISH_TIMEOUT='soon'"):
        QaRLFSDPEngine(None, None, None, None)
