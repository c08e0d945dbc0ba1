"""verl's FSDP engine with a quantized forward and the data that TBPO needs. It replaces verl's own engine.

Without `QuantFSDPEngineConfig` and without `loss_mode` tbpo or qarl every method but the first only calls verl's:

    _build_module          restores buffers, and swaps linears and blocks before FSDP wraps them; keys stay the same
    _build_fsdp_module     sets up FSDP2 so that it does not cast the FP32 residual stream between aligned blocks
    _build_optimizer       builds QaRL's optimizer if the config names it, and otherwise verl's
    prepare_model_inputs   tells attention the rows of the forward, which verl packs or pads (`qarl.verl.plugin.rows`)
    prepare_model_outputs  computes log-probs over the tokenizer's vocabulary with log_softmax from FP32 logits: of
                           packed rows in blocks, of padded rows with flash-attn's kernel if verl has it
    infer_batch            counts its calls, so that train_batch notices if nobody computed the old log-probs
    train_batch, forward_step   give the loss the rollout log-probs and the number of non-empty responses, collect
                           statistics, and compare with the engine before the first update
    optimizer_step, lr_scheduler_step   do nothing if the first mini-batch shows that the old log-probs, which are the
                           rollout's, are not the trainer's (`qarl.verl.plugin.first_mini_batch`)
    forward_backward_batch   quantizes the shards that have changed
    save_checkpoint, load_checkpoint   also write, and compare the loaded state with, a record of the state
    get_per_tensor_param   publishes the tensors that the next forward multiplies by, on CPU also of an unquantized
                           actor, because verl's receiver cannot load weights into vLLM's linears there

verl first looks for an engine that is registered for the device's vendor (verl/workers/engine/base.py). verl itself
registers no engine for NVIDIA, AMD or `cpu`, so QaRL registers this one for them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import MixedPrecisionPolicy, apply_fsdp2, fsdp2_load_full_state_dict
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from qarl.align import align_model
from qarl.align.families import check_rows
from qarl.align.packed_attention import use_rows_attention
from qarl.align.router_replay import replays
from qarl.errors import UserError
from qarl.metrics.mismatch_limit import DEFAULT_LIMITS, check_mismatch
from qarl.quant.fsdp import quantize_before_sharding, quantize_shards, sharded_wire_tensors
from qarl.quant.meta_model import check_buffers, restore_buffers
from qarl.quant.scheme import get_scheme
from qarl.rollout.publish.send import DeltaSender
from qarl.verl.plugin.alive import Watch, refuse_dead
from qarl.verl.plugin.config import (
    PRECISION_KEYS,
    QuantFSDPEngineConfig,
    QuantSettings,
    check_engine_config,
    refuse_shared_rows,
)
from qarl.verl.plugin.first_mini_batch import DIFFERING, FirstMiniBatch, relies_on
from qarl.verl.plugin.guard import SOURCE, UNQUANTIZED, temperature_of
from qarl.verl.plugin.head import LogProbHead, ask, replace_head, take
from qarl.verl.plugin.held import all_hold
from qarl.verl.plugin.loss import MICRO_BATCH, OURS, MicroBatch
from qarl.verl.plugin.noise import check_first
from qarl.verl.plugin.optimizer import build_optimizer, is_ours, muon_metrics
from qarl.verl.plugin.outputs import chosen_log_probs
from qarl.verl.plugin.publishing import Publication, guarded, publish_timeout, run_identity
from qarl.verl.plugin.routing import RouterReplay
from qarl.verl.plugin.rows import row_inputs
from qarl.verl.plugin.samples import log_samples
from qarl.verl.plugin.state import check_files, check_record, save_record
from qarl.verl.plugin.statistics import StepStatistics, count_mini_batch
from qarl.verl.plugin.transport import encode

_log = logging.getLogger("qarl.verl.plugin")
_log.setLevel(logging.INFO)

_NO_LOGIT = -1e30
"""Replaces logits beyond the tokenizer's vocabulary. -inf would make the entropy NaN, because its probability is 0."""


class QaRLFSDPEngine(FSDPEngineWithLMHead):
    """The engine. `quant`: its settings, or None without a section `quant`. `align`: the alignment level in use."""

    quant: QuantSettings | None = None
    scheme = get_scheme("bf16")
    ignore: tuple[str, ...] = ()
    align: str = "off"
    _limit_level: str = "off"
    _head: LogProbHead | None = None
    _outbox: DeltaSender | None = None
    _responses: int | None = None
    _tokens: int = 1
    _updated: bool = False
    """Whether this process has made an update, so that the weights are no longer the loaded ones."""
    _temperature: float = 1.0
    _keeps_lr: bool = False
    """Whether the next `lr_scheduler_step` does nothing, because the update was dropped."""
    _log_prob_passes: int = 0
    """Calls of `infer_batch` since the last training step."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if isinstance(engine_config, QuantFSDPEngineConfig):
            self.quant = engine_config.quant
            self.scheme = get_scheme(self.quant.scheme, group_size=self.quant.group_size)
            self.ignore = tuple(self.quant.ignore)
            check_engine_config(model_config, engine_config)
        if self.quant is not None or get_device_name() == "cpu":
            publish_timeout()  # raises for a bad value before the model is loaded
            refuse_shared_rows(engine_config)
        self._statistics = StepStatistics()
        self._routing = RouterReplay()
        self._first: FirstMiniBatch | None = None
        self._servers = Watch(only_servers=True)
        self._outbox = DeltaSender() if self.quant is not None and self.quant.publish_delta == "auto" else None
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_module(self) -> Any:
        module = super()._build_module()
        restore_buffers(module)  # verl has cast them to the masters' dtype
        if self.quant is None:
            if get_device_name() == "cpu":
                use_rows_attention(module)
            return module
        device = torch.device(get_device_name())
        report: Any = "linears: BF16 in the forward"
        if self.scheme.quantized and self.quant.align != "off":
            report = quantize_before_sharding(module, scheme=self.scheme, ignore=self.ignore, device=device)
        engine: dict[str, Any] = {"workers": self.quant.tensor_model_parallel_size, "eager": self.quant.enforce_eager}
        aligned = align_model(module, self.quant.align, device=device, dtype=torch.bfloat16, sharded=True, **engine)
        self.align, self._limit_level = aligned.level, aligned.limit_level
        check_rows(module.config, packed=self.use_remove_padding)
        self._head = replace_head(module, len(self.model_config.tokenizer), self.quant.head_dtype)
        if self.rank == 0:
            _log.info("%s\n%s", report, aligned)
        return module

    def _build_fsdp_module(self, module: Any) -> Any:
        if self.quant is None and get_device_name() != "cpu":
            return super()._build_fsdp_module(module)
        # verl's own, but a quantized actor's block inputs stay FP32. On CPU no memory is pinned and nothing offloaded.
        config = self.engine_config
        precision = config.mixed_precision or {}
        if get_device_name() == "cpu" and config.strategy != "fsdp2":
            raise UserError(
                f"strategy={config.strategy} does not run without GPUs",
                where="actor_rollout_ref.actor.strategy, critic.strategy",
                why="FSDP1 has no device `cpu`",
                fix="set actor_rollout_ref.actor.strategy=fsdp2 (the group +qarl_machine=cpu does)",
            )
        if config.strategy != "fsdp2" or set(precision) - PRECISION_KEYS:
            return super()._build_fsdp_module(module)
        from verl.utils.torch_dtypes import PrecisionType

        param_dtype = PrecisionType.to_dtype(precision.get("param_dtype", "bf16"))
        reduce_dtype = PrecisionType.to_dtype(precision.get("reduce_dtype", "fp32"))
        fsdp_kwargs = {
            "mesh": self.device_mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=self.quant is None
            ),
            "offload_policy": None,
            "reshard_after_forward": config.reshard_after_forward,
        }
        full_state = module.state_dict()
        apply_fsdp2(module, fsdp_kwargs, config)
        fsdp2_load_full_state_dict(module, full_state, self.device_mesh, None)
        check_buffers(module)
        # Parameters arrive in BF16, so autocast to BF16 would change only what alignment computes in FP32.
        self._autocast_dtype = param_dtype if self.quant is None else torch.float32
        self.scaler = None
        return module

    def _build_optimizer(self, module: Any) -> Any:
        if is_ours(self.optimizer_config):
            return build_optimizer(module, self.optimizer_config)
        return super()._build_optimizer(module)

    def optimizer_step(self) -> float:
        if self._first is not None and self._first.close(self.get_data_parallel_group()):
            if self._first.dropped:
                self.optimizer_zero_grad()
                return 0.0
            if not self._updated:
                self._check_mismatch(self._first.mismatch, self._first.response_length, before_first_update=True)
        self._updated = True
        return float(super().optimizer_step())

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)
        if self.quant is not None:
            save_record(self, local_path)
            torch.distributed.barrier()

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        if self.quant is not None:
            check_files(self, local_path)
        super().load_checkpoint(local_path, *args, **kwargs)
        if self.quant is not None:
            _log.info("rank %d: %s", self.rank, check_record(self, local_path))

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if self.quant is not None:
            quantize_shards(self.module, torch.device(get_device_name()))
        return super().forward_backward_batch(data, loss_function, forward_only)

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.quant is not None and micro_batch["position_ids"].dim() == 3:
            raise UserError(
                "QaRL's quantized actor takes one position per token, but this batch has several per token",
                where="actor_rollout_ref.model.path",
                why="models for images have positions along three axes (mrope), and QaRL does not support their layers",
                fix="train a text-only model",
            )
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.quant is not None:
            inputs |= row_inputs(inputs, micro_batch, exact=self.align == "exact")
        ask(self._head, micro_batch, output_args)
        if self.quant is not None and replays(self.quant.router_replay, self.align):
            self._routing.begin(self.module, micro_batch, inputs["input_ids"])
        return inputs, output_args

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        self._routing.end()
        found = take(self._head, output, micro_batch, output_args, self._gather_and_unpad_packed)
        if found is not None:
            return found
        if self.quant is not None and getattr(output, "logits", None) is not None:
            # verl divides by the temperature, if it is not 1, in the logits' own dtype.
            in_fp32 = flash_cross_entropy() and output_args.get("temperature_is_one", False)
            logits = output.logits if in_fp32 else output.logits.float()
            # verl masks these logits in the rollout, too (monkey_patch_compute_logits in vllm_rollout/utils.py).
            logits[..., len(self.model_config.tokenizer) :] = _NO_LOGIT
            output.logits = logits
            if not flash_cross_entropy():
                return self._outputs_by_log_softmax(output, output_args, micro_batch, logits_processor_func)
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)

    def _outputs_by_log_softmax(self, output: Any, output_args: Any, micro_batch: Any, processor: Any) -> Any:
        """Return verl's outputs, but with log-probs from `chosen_log_probs`."""
        if tu.get_non_tensor_data(data=micro_batch, key="distillation_only", default=False):
            return super().prepare_model_outputs(output, output_args, micro_batch, processor)
        log_probs = chosen_log_probs(output.logits, output_args, micro_batch, self._gather_and_unpad_packed)
        # With `distillation_only` verl does not compute log-probs.
        others = micro_batch.copy()
        tu.assign_non_tensor(others, distillation_only=True)
        found = super().prepare_model_outputs(output, output_args, others, processor)
        return found | {"log_probs": log_probs}

    def infer_batch(self, data: Any, loss_function: Callable[..., Any] | None = None) -> Any:
        self._log_prob_passes += 1
        return super().infer_batch(data, loss_function)

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        if self.quant is None and loss_mode(loss_function) not in OURS:
            return super().train_batch(data, loss_function)
        # In verl `update_lr_scheduler` is true only for the last mini-batch of a step.
        last = tu.get(data, key="update_lr_scheduler", default=True)
        if self._first is None:
            self._first = FirstMiniBatch(relies_on(data))
        elif self._first.dropped:
            return self._dropped(last)
        counts = count_mini_batch(_tokens_of(data), self.get_data_parallel_group())
        self._temperature = temperature_of(data)
        self._responses, self._tokens = max(counts.responses, 1), max(counts.tokens, 1)
        passes = self._log_prob_passes or self._first.relies
        if self._first.relies == "rollout" and weights_mismatch(loss_function):
            raise UserError(
                "the objective weights the mismatch, but old_log_probs=rollout hides it",
                where="actor_rollout_ref.actor.fsdp_config.quant.old_log_probs",
                why="the weight of every response would be 1",
                fix="set it to auto or recompute, or choose an objective without such a weight",
            )
        if loss_mode(loss_function) == "tbpo" and counts.all_equal and not passes:
            raise UserError(
                "loss_mode=tbpo was given the rollout's log-probs as old_log_probs",
                where="algorithm.rollout_correction.bypass_mode",
                why="the two are equal on every token, and verl has not asked this engine for its own log-probs since "
                "the last step; TBPO's weight for the mismatch would always be 1",
                fix="set algorithm.rollout_correction.bypass_mode=False",
            )
        if not self._updated and not self._first.relies:
            self._check_mismatch(counts.mismatch, counts.response_length, before_first_update=True)
        is_first = self._statistics.begin_mini_batch() == 1
        try:
            outputs = super().train_batch(data, loss_function)
        finally:
            self._responses = None
        if self._first.dropped:
            return self._dropped(last)
        if is_first and self._first.relies != "rollout":  # with `rollout`, nobody knows δ of each token
            log_samples(self, data)
        if last:
            self._first = None
            lengths = self._statistics.mean_length
            self._statistics.routing = self._routing.take()
            found, self._statistics = self._statistics.metrics(self.get_data_parallel_group()), StepStatistics()
            if "mismatch/abs_mean" in found:
                over = self._check_mismatch(found["mismatch/abs_mean"], lengths)
                found["mismatch/over_limit"] = float(over)
            found |= muon_metrics(self.optimizer)
            if self._outbox:
                found |= self._outbox.metrics()
            outputs["metrics"].update({name: [value] for name, value in found.items()})
            self._log_prob_passes = 0
        return outputs

    def _dropped(self, last: bool) -> Any:
        """Return the outputs of a mini-batch of a dropped update. `last`: whether this is its last mini-batch."""
        assert self._first is not None
        outputs = {"model_output": {}, "loss": [0.0], "metrics": {DIFFERING: [float(self._first.differing)]}}
        if last:
            self._routing.take()
            self._statistics, self._first, self._keeps_lr = StepStatistics(), None, True
        return outputs

    def lr_scheduler_step(self) -> float:
        if self._keeps_lr:
            self._keeps_lr = False
            return float(self.lr_scheduler.get_last_lr()[0])
        return float(super().lr_scheduler_step())

    def _check_mismatch(self, abs_mean: float | None, length: float, *, before_first_update: bool = False) -> bool:
        """Return whether the mismatch is over its limit, and warn if it is. Before the first update, raise instead.

        `abs_mean`: mean |trainer's - rollout's log-prob| per token. `length`: mean number of tokens per response.
        """
        if abs_mean is None:
            return False
        warning = check_mismatch(
            abs_mean,
            limit=DEFAULT_LIMITS[UNQUANTIZED] if self.quant is None else self.quant.mismatch_limit,
            level=self._limit_level,
            before_first_update=before_first_update,
            response_length=length,
            temperature=self._temperature,
            source=SOURCE if self.quant is None else None,
        )
        if warning is not None:
            _log.warning(warning)
        return warning is not None

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        if self._responses is None or forward_only:
            return super().forward_step(micro_batch, loss_function, forward_only)
        rows = _tokens_of(micro_batch)
        rollout = rows.get("rollout_log_probs", None)
        if not self._updated:
            check_first(self, super().forward_step, micro_batch, rows)
        mine = MicroBatch(rollout, self._responses, self._tokens)
        token = MICRO_BATCH.set(mine)
        try:
            loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        finally:
            MICRO_BATCH.reset(token)
        self._statistics.add(mine.statistics)
        self._statistics.add_text(_text_of(micro_batch), vocabulary=len(self.model_config.tokenizer))
        if rollout is not None and self._first is not None:
            old = self._first.see(output, rows, micro_batch)
            if old is not None:
                self._statistics.add_tokens(old, rollout.to(old.device), rows["response_mask"].to(old.device))
        return loss, output

    def get_per_tensor_param(self, layered_summon: Any = False, base_sync_done: Any = False, **kwargs: Any) -> Any:
        if self.quant is None and (get_device_name() != "cpu" or self.model_config.lora_rank > 0):
            return super().get_per_tensor_param(layered_summon, base_sync_done, **kwargs)
        # verl sets `base_sync_done` only if it publishes itself (checkpoint_engine.backend=naive), on the same devices:
        # a copy within a GPU is faster than a delta. Else the servers wait for the first rank's stream already.
        held = [self._ask_servers()] if base_sync_done else []
        outbox = self._outbox if (get_device_name() == "cpu" if base_sync_done else self.rank == 0) else None
        # The scheduler counts training steps, and a checkpoint restores its count.
        version = self.lr_scheduler.last_epoch
        stream = encode(self._wire_tensors(), version=version, run=run_identity(), outbox=outbox, held=held)
        return guarded(stream) if base_sync_done else Publication(stream, ExitStack(), held), None

    def _ask_servers(self) -> str | None:
        """Return the fingerprint of the published tensors that all engines hold, or None if any does not hold those
        that the first rank sent last. Raise UserError on all ranks if a rollout server is dead.

        Only the first rank asks the servers, and the others wait for the result. If one published early, it would wait
        for the first rank, because all ranks gather each tensor together, and the first rank for that rank's engine,
        which waits for tensors and does not answer.
        """
        found: list[Any] = [{}, None]
        if self.rank == 0:
            self._servers.ask()
            found[0] = self._servers.dead(publish_timeout())
            mine = self._outbox.cache.fingerprint if self._outbox else None  # None if nothing was sent through it
            found[1] = mine if mine and not found[0] and all_hold(mine, publish_timeout()) else None
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(found, src=0)
        refuse_dead(found[0])
        held: str | None = found[1]
        return held

    def _wire_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        def gather(entry: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                entry = entry.detach().to(get_device_id(), non_blocking=True)
                if entry.is_floating_point():
                    entry = entry.to(torch.bfloat16)
                return entry.full_tensor() if isinstance(entry, DTensor) else entry

        here = torch.device(get_device_name())
        return sharded_wire_tensors(self.module, gather, scheme=self.scheme, ignore=self.ignore, device=here)


def _tokens_of(batch: Any) -> Any:
    """Return `response_mask`, `rollout_log_probs` and `old_log_probs`, if `batch` has them, each padded to [B, T]."""
    names = [name for name in ("rollout_log_probs", "old_log_probs", "response_mask") if name in batch]
    return batch.select(*names).to_padded_tensor()


def _text_of(batch: Any) -> Any:
    """Return the tokens of the responses and what describes them, each padded to [B, T], or None if one is missing."""
    names = ("responses", "rollout_log_probs", "advantages", "response_mask")
    return batch.select(*names).to_padded_tensor() if all(name in batch for name in names) else None


def flash_cross_entropy() -> bool:
    """Return whether verl uses flash-attn's kernel for log-probs. It computes in FP32 for logits of any dtype."""
    available = getattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    return bool(available) and os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") != "1"


def loss_mode(loss_function: Any) -> str | None:
    """Return the `policy_loss.loss_mode` that verl has bound to its PPO loss, or None."""
    config = getattr(loss_function, "keywords", {}).get("config")
    return getattr(getattr(config, "policy_loss", None), "loss_mode", None)


def weights_mismatch(loss_function: Any) -> bool:
    """Return whether the objective weights each response by its mismatch."""
    config = getattr(loss_function, "keywords", {}).get("config")
    objective = getattr(getattr(config, "policy_loss", None), "objective", None)
    mode = loss_mode(loss_function)
    return mode == "tbpo" or (mode == "qarl" and objective == "mis_gspo")


def register() -> None:
    """Register the engine with verl for each device and vendor that has no engine yet."""
    for place in ({"device": "cpu"}, {"device": "cuda", "vendor": "nvidia"}, {"device": "cuda", "vendor": "amd"}):
        for backend in ("fsdp", "fsdp2"):
            try:
                EngineRegistry.register("language_model", backend, **place)(QaRLFSDPEngine)
            except AssertionError as error:
                _log.warning("%s on %s keeps another package's engine, not QaRL's: %s", backend, place, error)


register()
