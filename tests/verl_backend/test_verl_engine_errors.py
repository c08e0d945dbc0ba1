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

from qarl.errors import UserError
from qarl.kernels.cuda import layer_ops
from qarl.kernels.logprob import log_probs_of_logits
from qarl.verl.plugin import config as plugin_config
from qarl.verl.plugin import engine as plugin_engine
from qarl.verl.plugin.config import QuantFSDPEngineConfig
from qarl.verl.plugin.engine import QaRLFSDPEngine, check_engine_config, register
from qarl.verl.plugin.log_probs import RouterReplay, log_softmax_of_chosen
from qarl.verl.plugin.mismatch import TrainingStep
from qarl.verl.plugin.servers import refuse_dead

MODEL = {"lora_rank": 0, "use_fused_kernels": False, "use_liger": False, "enable_activation_offload": False}


def check(model: dict | None = None, **engine) -> None:
    settings = {"strategy": "fsdp2"} | engine
    check_engine_config(SimpleNamespace(**MODEL | (model or {})), QuantFSDPEngineConfig(**settings))


def quantized_engine() -> QaRLFSDPEngine:
    """One that was never built, for methods that use nothing of the model."""
    engine = object.__new__(QaRLFSDPEngine)
    engine.quant = QuantFSDPEngineConfig(strategy="fsdp2").quant
    engine.routing = RouterReplay()
    return engine


@pytest.mark.parametrize(("scheme", "capability"), [("fp8", (8, 0)), ("w8a8", (10, 0))])
def test_an_actor_refuses_a_gpu_that_cannot_compute_its_scheme(monkeypatch, scheme, capability):
    """Before it loads the model."""
    monkeypatch.setattr(plugin_config, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    settings = QuantFSDPEngineConfig(strategy="fsdp2", quant={"scheme": scheme})
    with pytest.raises(UserError, match="compute capability"):
        QaRLFSDPEngine(SimpleNamespace(**MODEL), settings, None, None)


def test_what_goes_with_the_quantized_forward():
    check()
    check(param_offload=True, optimizer_offload=True, mixed_precision={"param_dtype": "bf16", "reduce_dtype": "fp32"})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model": {"enable_activation_offload": True}}, "actor_rollout_ref.model.enable_activation_offload=False"),
        ({"offload_policy": True}, "fsdp_config.offload_policy=False"),
        ({"forward_only": True}, "actor_rollout_ref.ref.fsdp_config._target_"),
        ({"mixed_precision": {"param_dtype": "bf16", "cast": True}}, "mixed_precision"),
    ],
)
def test_settings_that_would_be_dropped_in_silence(settings, key):
    with pytest.raises(UserError) as caught:
        check(**settings)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("flash", "one", "dtype"),
    [(True, True, torch.bfloat16), (True, False, torch.float32), (False, True, torch.float32)],
)
def test_bf16_logits_reach_nothing_but_flash_attns_kernel(monkeypatch, flash, one, dtype):
    monkeypatch.setattr(plugin_engine.log_probs, "flash_cross_entropy", lambda: flash)
    monkeypatch.setattr(FSDPEngineWithLMHead, "prepare_model_outputs", lambda self, output, *rest: output)
    monkeypatch.setattr(QaRLFSDPEngine, "_outputs_by_log_softmax", lambda self, output, *rest: output)
    engine = quantized_engine()
    engine.model_config = SimpleNamespace(tokenizer=range(6))
    output = SimpleNamespace(logits=torch.zeros(1, 3, 8, dtype=torch.bfloat16))
    logits = engine.prepare_model_outputs(output, {"temperature_is_one": one}, None, None).logits
    assert logits.dtype == dtype
    assert (logits[..., :6] == 0).all() and (logits[..., 6:] < -1e29).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([1.0, 0.3, 1.7])])
@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_have_the_bits_of_the_local_backends(packed, temperature):
    """verl's, logits less logsumexp, have not."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 9, 2])
    total = int(lengths.sum())
    tokens, logits = torch.randint(64, (total,), generator=random), 5 * torch.randn(total, 64, generator=random)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    micro_batch = tu.get_tensordict({"input_ids": torch.nested.nested_tensor_from_jagged(tokens, offsets)}, {})
    tu.assign_non_tensor(micro_batch, use_remove_padding=packed)
    each = temperature if isinstance(temperature, torch.Tensor) else torch.full((3,), temperature)
    output_args = {"input_ids_rmpad_rolled": tokens, "temperature": each, "temperature_is_one": bool((each == 1).all())}
    if packed:
        given = torch.cat([logits, torch.zeros(3, 64)])[None]  # three places that fill the packed row up
        output_args |= {"pad_size": 3, "temperature_rmpad": torch.cat([each.repeat_interleave(lengths), torch.ones(3)])}
        output_args["input_ids_rmpad_rolled"] = torch.cat([tokens, torch.zeros(3, dtype=torch.int64)])
    else:
        given = torch.nested.nested_tensor_from_jagged(logits, offsets).to_padded_tensor(0.0)
    found = log_softmax_of_chosen(
        given, output_args, micro_batch, lambda chosen, pad_size: chosen[: len(chosen) - pad_size]
    )
    expected, verls = [], []
    for row, labels, one in zip(logits.split(lengths.tolist()), tokens.split(lengths.tolist()), each, strict=True):
        expected.append(log_probs_of_logits(row, labels, temperature=float(one))[0])
        verls.append(logprobs_from_logits_v2(row / one, labels))
    assert torch.equal(found.offsets(), offsets) and torch.equal(found.values(), torch.cat(expected))
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
    engine.quant = QuantFSDPEngineConfig(strategy="fsdp2", quant={"scheme": "bf16", "enforce_eager": eager}).quant
    engine.model_config, engine.use_remove_padding, engine.rank = SimpleNamespace(tokenizer=range(64)), True, 0
    engine._build_module()
    assert (engine.align, engine.limit_level) == ("model", limit)


def over_the_limit(engine: QaRLFSDPEngine, abs_mean: float, *, updated: bool = False) -> bool:
    engine._updated = updated
    return engine._check_limit(TrainingStep(), abs_mean, 50.0)


def test_a_mismatch_after_the_first_update_is_a_warning(caplog):
    engine = quantized_engine()
    engine.limit_level = "model"
    with caplog.at_level("WARNING", logger="qarl.verl.plugin"):
        assert not over_the_limit(engine, 1e-4, updated=True)
        assert over_the_limit(engine, 0.02, updated=True)
    assert "mean |δ| between trainer and engine is 0.02" in caplog.text
    with pytest.raises(UserError, match="disagree"):
        over_the_limit(engine, float("nan"))


def test_an_actor_without_quantization_has_a_limit(caplog):
    """Nothing promises it a level, but TBPO cannot repair another model."""
    engine = object.__new__(QaRLFSDPEngine)
    with caplog.at_level("WARNING", logger="qarl.verl.plugin"):
        assert not over_the_limit(engine, 0.14)
        assert over_the_limit(engine, 0.16, updated=True)
    assert "0.15 that is allowed by default" in caplog.text
    with pytest.raises(UserError, match=r"\+qarl=bf16"):
        over_the_limit(engine, 0.16)


@pytest.mark.parametrize(
    ("quantized", "device", "refused"), [(True, "cuda", True), (False, "cpu", True), (False, "cuda", False)]
)
def test_rows_that_ranks_share_are_refused_where_attention_is_qarls(monkeypatch, quantized, device, refused):
    """Ulysses exchanges heads only in Flash Attention, which an unquantized actor on a GPU uses."""
    monkeypatch.setattr(plugin_engine, "get_device_name", lambda: device)
    monkeypatch.setattr(FSDPEngineWithLMHead, "__init__", lambda *_: None)
    kind = QuantFSDPEngineConfig if quantized else FSDPEngineConfig
    engine_config = kind(strategy="fsdp2", ulysses_sequence_parallel_size=2)
    with pytest.raises(UserError, match="rows that are split over 2 ranks") if refused else nullcontext():
        QaRLFSDPEngine(SimpleNamespace(**MODEL), engine_config, None, None)


def test_servers_that_do_not_answer_are_not_published_to():
    refuse_dead({})
    with pytest.raises(UserError, match="have stopped and cannot be published to: vllm_server_0_0") as caught:
        refuse_dead({"vllm_server_0_0": "EngineDeadError: EngineCore encountered an issue"})
    assert "vllm_server_0_0: EngineDeadError" in caught.value.where


def test_fsdp1_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(plugin_engine, "get_device_name", lambda: "cpu")
    engine = object.__new__(QaRLFSDPEngine)
    engine.engine_config = SimpleNamespace(strategy="fsdp", mixed_precision=None)
    with pytest.raises(UserError, match="strategy=fsdp does not run without GPUs"):
        engine._build_fsdp_module(torch.nn.Linear(2, 2))


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


@pytest.mark.parametrize(
    ("data", "expected"),
    [({}, 1.0), ({"temperature": 0.5}, 0.5), ({"temperature": torch.tensor([1.0, 0.25])}, 0.25)],
)
def test_the_temperature_of_a_batch(data, expected):
    """A sharper distribution makes each rounding weigh more: the guard's limit follows it."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from qarl.verl.plugin.mismatch import temperature_of

    rows = TensorDict({"response_mask": torch.ones(2, 3)}, batch_size=2)
    for key, value in data.items():
        if isinstance(value, torch.Tensor):
            rows[key] = value
        else:
            tu.assign_non_tensor(rows, **{key: value})
    assert temperature_of(rows) == expected


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
def test_a_bad_time_limit_is_refused_before_the_model_is_loaded(monkeypatch, device, refused):
    """From verl's command line. An engine that publishes as verl does takes no notice."""
    monkeypatch.setattr(plugin_engine, "get_device_name", lambda: device)
    monkeypatch.setattr(FSDPEngineWithLMHead, "__init__", lambda *args: pytest.fail("loads") if refused else None)
    monkeypatch.setenv("QARL_PUBLISH_TIMEOUT", "soon")
    with pytest.raises(UserError, match="QARL_PUBLISH_TIMEOUT='soon'") if refused else nullcontext():
        QaRLFSDPEngine(None, None, None, None)
