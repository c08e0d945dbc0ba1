"""verl's FSDP engine with a quantized forward and the data that TBPO needs. It replaces verl's own engine.

Without `QuantFSDPEngineConfig` and without `loss_mode` tbpo or qarl every method but the first only calls verl's:

    _build_module          restores buffers, and swaps linears and blocks before FSDP wraps them; keys stay the same
    _build_fsdp_module     sets up FSDP2 so that it does not cast the FP32 residual stream between aligned blocks
    _build_optimizer       builds QaRL's optimizer if the config names it, and otherwise verl's
    initialize             lets verl's checkpoint manager see the adapters alone, if there are any
    prepare_model_inputs, prepare_model_outputs   the rows, routing and log-probs of `qarl.verl.forward`
    forward_backward_batch   quantizes the shards that have changed
    infer_batch            remembers that verl has asked for old log-probs
    train_batch, forward_step   give the loss the rollout log-probs and the number of non-empty responses, collect
                           statistics, and compare with the rollout engine before the first update
                           (`qarl.verl.training_steps`)
    lr_scheduler_step      does nothing if the step was dropped: its old log-probs turned out not to be the trainer's
    save_checkpoint, load_checkpoint   also write, and compare the loaded state with, a record of the state
    get_per_tensor_param   publishes the tensors that the next forward multiplies by, on CPU also of an unquantized
                           actor, because verl's receiver cannot load weights into vLLM's linears there

verl first looks for an engine that is registered for the device's vendor (verl/workers/engine/base.py). verl itself
registers no engine for NVIDIA, AMD or `cpu`, so QaRL registers this one for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import MixedPrecisionPolicy, apply_fsdp2, fsdp2_load_full_state_dict
from verl.workers.config.optimizer import build_optimizer as verls_optimizer
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from qarl.align import align_model
from qarl.align.cpu_attention import uses_engine_attention
from qarl.align.packed_attention import use_rows_attention
from qarl.align.router import replays
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.families import check_rows
from qarl.kernels.log_probs import within
from qarl.progress import live
from qarl.quant.convert import quantize_model
from qarl.quant.fsdp import quantize_before_sharding, quantize_shards, sharded_wire_tensors
from qarl.quant.meta_model import check_buffers, restore_buffers
from qarl.rollout.publish.manifest import NamedTensor
from qarl.rollout.remote.wire import DeltaSender
from qarl.schemes import UNQUANTIZED, get_scheme
from qarl.step.limit import StepLimit
from qarl.step.statistics import Counts
from qarl.step.updates import RunState
from qarl.verl import forward
from qarl.verl.adapters import ActorAdapters
from qarl.verl.ask_servers import Watch, refuse_dead_servers, servers_have_base
from qarl.verl.config_classes import QuantFSDPEngineConfig
from qarl.verl.engine_checks import check_engine_config
from qarl.verl.keys import LOSS_MODES
from qarl.verl.loss import MICRO_BATCH, MicroBatch, loss_mode, refuse_hidden_mismatch
from qarl.verl.optimizer import build_optimizer, chosen_optimizer
from qarl.verl.publication import encoded, publication, publish_timeout, reserved
from qarl.verl.state_record import check_before_loading, check_record, save_record
from qarl.verl.step_measurements import log_mini_batch, log_prob_rows, summed
from qarl.verl.training_steps import ActorSteps, TrainingStep, check_noise_once

_log = logging.getLogger("qarl.verl")
_log.setLevel(logging.INFO)

BF16_LIMIT = Level.LINEARS.tolerance.mismatch
"""The limit of an actor without `fsdp_config.quant`: both sides use the same BF16 weights."""
BF16_SOURCE = "that is allowed by default (+qarl=bf16 adds the key quant.mismatch_limit, which sets the limit)"


class QaRLFSDPEngine(FSDPEngineWithLMHead):
    """The engine. `quant`: its settings, or None without a section `quant`. `align`: the alignment level in use."""

    quant: Any = None
    scheme = UNQUANTIZED
    ignore: tuple[str, ...] = ()
    align = Level.OFF
    limit_level = Level.OFF
    """The level whose limit on the mismatch applies."""
    _head: forward.LogProbHead | None = None
    _outbox: DeltaSender | None = None
    adapters: ActorAdapters | None = None
    """The adapters, if they are what is trained."""
    version: int | None = None
    """The version of the last publish, or None if the scheduler's count of steps is it."""
    last_step: int | None = None
    """Number of the run's last training step, or None if it is the optimizer's number of updates."""
    sampled_step: int | None = None
    """The step of which samples were written last."""

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        if isinstance(engine_config, QuantFSDPEngineConfig):
            self.quant = engine_config.quant
            self.scheme = get_scheme(self.quant.scheme, group_size=self.quant.group_size)
            self.ignore = tuple(self.quant.ignore)
        if self.quant is not None or get_device_name() == "cpu":
            publish_timeout()  # raises for a bad value before the model is loaded
            check_engine_config(model_config, engine_config)
        self.routing = forward.RouterReplay()
        self.steps = ActorSteps()
        self._servers = Watch(only_servers=True)
        self._outbox = (
            DeltaSender() if self.quant is not None and self.quant.publish_delta == "auto" else None
        )
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
        options: dict[str, Any] = {"scheme": self.scheme, "ignore": self.ignore, "device": device}
        if self.quant.lora.r:
            report = quantize_model(module, kernels=self.quant.kernels, **options)
        elif self.scheme.quantized and self.quant.align.low_bit:
            report = quantize_before_sharding(module, kernels=self.quant.kernels, **options)
        engine: dict[str, Any] = {
            "workers": self.quant.tensor_model_parallel_size,
            "eager": self.quant.enforce_eager,
        }
        engine |= {"adapters": bool(self.quant.lora.r)}
        aligned = align_model(
            module, self.quant.align, device=device, dtype=torch.bfloat16, sharded=True, **engine
        )
        self.align = aligned.level
        self.limit_level = aligned.limit_level
        check_rows(module.config, packed=self.use_remove_padding)
        self._head = forward.replace_head(
            module, len(self.model_config.tokenizer), self.quant.head_dtype
        )
        if self.quant.lora.r:
            seed = self.engine_config.seed
            self.adapters = ActorAdapters(module, self.quant.lora, seed=seed, **options)
        if self.rank == 0:
            _log.info("%s\n%s\n%s", report, aligned, self.adapters or "")
        return module

    def _build_fsdp_module(self, module: Any) -> Any:
        if self.quant is None and get_device_name() != "cpu":
            return super()._build_fsdp_module(module)
        # verl's own, but a quantized actor's block inputs stay FP32. On CPU no memory is pinned and nothing offloaded.
        from verl.utils.torch_dtypes import PrecisionType

        precision = self.engine_config.mixed_precision or {}
        param_dtype = PrecisionType.to_dtype(precision.get("param_dtype", "bf16"))
        reduce_dtype = PrecisionType.to_dtype(precision.get("reduce_dtype", "fp32"))
        policy = MixedPrecisionPolicy(
            param_dtype, reduce_dtype, cast_forward_inputs=self.quant is None
        )
        fsdp_kwargs = {"mesh": self.device_mesh, "mp_policy": policy, "offload_policy": None}
        fsdp_kwargs["reshard_after_forward"] = self.engine_config.reshard_after_forward
        if self.adapters is not None:  # every rank has all weights already
            apply_fsdp2(
                module, fsdp_kwargs | {"ignored_params": self.adapters.frozen}, self.engine_config
            )
        else:
            full_state = module.state_dict()
            apply_fsdp2(module, fsdp_kwargs, self.engine_config)
            fsdp2_load_full_state_dict(module, full_state, self.device_mesh, None)
        check_buffers(module)
        # Parameters arrive in BF16, so autocast to BF16 would change only what alignment computes in FP32.
        self._autocast_dtype = param_dtype if self.quant is None else torch.float32
        self.scaler = None
        return module

    def _build_optimizer(self, module: Any) -> Any:
        chosen = chosen_optimizer(self.optimizer_config)
        if chosen is not None:
            return build_optimizer(module, self.optimizer_config, chosen)
        if self.adapters is not None:
            return verls_optimizer(
                [p for p in module.parameters() if p.requires_grad], self.optimizer_config
            )
        return super()._build_optimizer(module)

    def initialize(self) -> None:
        super().initialize()
        if self.adapters is not None:
            self.checkpoint_manager.model = self.adapters

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False
    ) -> Any:
        if self.quant is not None:
            quantize_shards(self.module, torch.device(get_device_name()))
        return super().forward_backward_batch(data, loss_function, forward_only)

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.quant is not None and micro_batch["position_ids"].dim() == 3:
            what = "QaRL's quantized actor does not support models for images (tokens with several positions, mrope)"
            raise UserError(
                what, where="actor_rollout_ref.model.path", fix="train a text-only model"
            )
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.quant is None:
            return inputs, output_args
        lengths = forward.RowLengths.of(micro_batch)
        inputs |= forward.row_inputs(
            inputs, micro_batch, lengths, exact=uses_engine_attention(self.module)
        )
        forward.request_log_probs(self._head, micro_batch, lengths, inputs, output_args)
        if replays(self.quant.router_replay, self.align):
            self.routing.begin(self.module, micro_batch, inputs["input_ids"])
        return inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        self.routing.end()
        outputs = forward.take_log_probs(self._head, output, micro_batch)
        if outputs is not None:
            return outputs
        chosen: dict[str, torch.Tensor] = {}
        if self.quant is not None:
            # verl divides by the temperature in the logits' own dtype.
            # verl masks columns in the rollout, too (monkey_patch_compute_logits in vllm_rollout/utils.py).
            logits = within(output.logits.float(), len(self.model_config.tokenizer))
            output.logits = logits
            if not tu.get_non_tensor_data(data=micro_batch, key="distillation_only", default=False):
                chosen["log_probs"] = forward.log_softmax_of_chosen(
                    logits, output_args, micro_batch, self._gather_and_unpad_packed
                )
                # verl then computes no log-probs.
                micro_batch = micro_batch.copy()
                tu.assign_non_tensor(micro_batch, distillation_only=True)
        verls = super().prepare_model_outputs(
            output, output_args, micro_batch, logits_processor_func
        )
        return verls | chosen

    def infer_batch(self, data: Any, loss_function: Callable[..., Any] | None = None) -> Any:
        self.steps.asked = True
        with forward.forwarding("log-probs", data, self.rank):
            return super().infer_batch(data, loss_function)

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """Update the weights by the mini-batch `data`, and return verl's outputs."""
        if self.quant is None and loss_mode(loss_function) not in LOSS_MODES:
            return super().train_batch(data, loss_function)
        tu.maybe_fix_3d_position_ids(data)
        step = self.steps.begin(data)
        with forward.forwarding("updating by a mini-batch", data, self.rank):
            outputs = self._train_mini_batch(step, data, loss_function)
        # In verl `update_lr_scheduler` is true only for the last mini-batch of a step.
        if tu.get(data, key="update_lr_scheduler", default=True):
            routing = self.routing.take()
            if not step.updates.dropped:
                metrics = self._metrics_of(step, routing)
                outputs["metrics"].update({name: [value] for name, value in metrics.items()})
            self.steps.finish(step)
        return outputs

    def _train_mini_batch(
        self, step: TrainingStep, data: Any, loss_function: Callable[..., Any]
    ) -> Any:
        """Make the update of one mini-batch, unless this mini-batch or an earlier one has dropped the step's."""
        if step.updates.dropped:
            return self._drop(step)
        self._check_mini_batch(step, data, loss_function)
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function)
        compared = step.updates.close(partial(summed, group=self.get_data_parallel_group()))
        if step.updates.dropped:
            return self._drop(step)
        if compared and not self.steps.trained:
            self._check_counts(step, step.updates.compared)
        self.steps.run = RunState.TRAINED
        norm = self.optimizer_step()  # verl makes no update if it is not finite
        outputs["metrics"]["grad_norm"] = norm
        step.updates.updated(norm)
        # With `rollout`, nobody knows δ of each token.
        if step.statistics.in_first and step.updates.relies != "rollout":
            log_mini_batch(self, data)
        return outputs

    def _drop(self, step: TrainingStep) -> dict[str, Any]:
        self.optimizer_zero_grad()
        return step.dropped_outputs()

    def _check_mini_batch(
        self, step: TrainingStep, data: Any, loss_function: Callable[..., Any]
    ) -> None:
        """Count a mini-batch, and raise UserError if its log-probs hide a mismatch or, before the first update, if they
        show one over its limit."""
        step.begin_mini_batch(data, self.get_data_parallel_group())
        counts = step.mini_batch
        relies = step.updates.relies
        all_equal = counts.tokens > 0 and counts.differing == 0
        refuse_hidden_mismatch(loss_function, relies, all_equal=all_equal, asked=self.steps.asked)
        if not self.steps.trained and not relies and "rollout_log_probs" in data:
            self._check_counts(step, counts)

    def _metrics_of(self, step: TrainingStep, routing: tuple[int, int]) -> dict[str, float]:
        """Return the metrics of a whole step. Only the first rank has those over all ranks."""
        metrics = step.statistics.metrics(self.get_data_parallel_group(), routing)
        # Of stale responses it is not δ: `qarl.verl.separate_trainer` has that.
        if "mismatch/abs_mean" in metrics and not (self.quant and self.quant.staleness):
            length = step.statistics.pairs.mean_length
            over = self._check_limit(step, metrics["mismatch/abs_mean"], length)
            metrics["mismatch/over_limit"] = float(over)
        metrics["skipped_steps"] = float(step.updates.skipped)
        chosen = chosen_optimizer(self.optimizer_config)
        for flag, key in chosen.peak_rates.items() if chosen else ():
            for group in self.optimizer.param_groups:
                if group.get(flag):
                    metrics[key] = group["lr"]
        sender = self.adapters or self._outbox
        return metrics | (sender.metrics() if sender else {})

    def _check_counts(self, step: TrainingStep, counts: Counts) -> None:
        self._check_limit(step, counts.mismatch, counts.response_length)

    def _check_limit(self, step: TrainingStep, abs_mean: float, response_length: float) -> bool:
        """Return whether the mismatch is over its limit, and warn if it is. Before the first update, raise instead.

        `abs_mean`: mean |trainer's - rollout's log-prob| per token."""
        if self.quant is None:
            limit = StepLimit(BF16_LIMIT, self.limit_level, BF16_SOURCE)
        else:
            limit = StepLimit(self.quant.mismatch_limit, self.limit_level)
        warning = limit.check(
            abs_mean,
            response_length=response_length,
            temperature=step.temperature,
            before_first_update=not self.steps.trained,
        )
        if warning is not None:
            _log.warning(warning)
        return warning is not None

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        outputs = self._forward_step(micro_batch, loss_function, forward_only)
        live.advance(len(micro_batch))
        return outputs

    def _forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        step = self.steps.open_step
        if step is None or forward_only:
            return super().forward_step(micro_batch, loss_function, forward_only)
        rows = log_prob_rows(micro_batch)
        rollout = rows.get("rollout_log_probs", None)
        check_noise_once(self, super().forward_step, micro_batch, rows)
        responses = int(max(step.mini_batch.responses, 1))
        tokens = int(max(step.mini_batch.tokens, 1))
        of_loss = MicroBatch(rollout, responses, tokens)
        token = MICRO_BATCH.set(of_loss)
        try:
            loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        finally:
            MICRO_BATCH.reset(token)
        if of_loss.statistics:
            step.statistics.add_objective(of_loss.statistics)
        step.statistics.add_text(micro_batch, vocabulary=len(self.model_config.tokenizer))
        if rollout is not None:
            step.see(output, rows, micro_batch)
        return loss, output

    def lr_scheduler_step(self) -> float:
        if self.steps.last_was_dropped:
            return float(self.lr_scheduler.get_last_lr()[0])
        return float(super().lr_scheduler_step())

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)
        if self.quant is not None:
            save_record(self, local_path)
            if self.adapters is not None:
                self.adapters.save_base(local_path)
            torch.distributed.barrier()

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        check_before_loading(self, local_path)
        if self.adapters is not None:
            self.adapters.check_base(local_path)
        super().load_checkpoint(local_path, *args, **kwargs)
        if self.quant is not None:
            _log.info("rank %d: %s", self.rank, check_record(self, local_path))
            if self.quant.staleness:  # the first responses may be from other versions than this one
                self.steps.run = RunState.TRAINED

    def get_per_tensor_param(
        self, layered_summon: Any = False, base_sync_done: Any = False, **kwargs: Any
    ) -> Any:
        if self.quant is None and (get_device_name() != "cpu" or self.model_config.lora_rank > 0):
            return super().get_per_tensor_param(layered_summon, base_sync_done, **kwargs)
        # The scheduler counts training steps, and a checkpoint restores its count.
        version = self.lr_scheduler.last_epoch if self.version is None else self.version
        if self.adapters is not None:
            return self._adapter_stream(version, base_sync_done), None
        tensors = self._wire_tensors()
        if not base_sync_done:  # the servers wait for the first rank's stream already
            return publication(tensors, version, self._outbox if self.rank == 0 else None), None
        # verl sets `base_sync_done` only if it publishes itself (checkpoint_engine.backend=naive), on the same devices.
        refuse_dead_servers(self._servers, is_first=self.rank == 0, seconds=publish_timeout())
        return reserved(encoded(tensors, version)), None

    def _adapter_stream(self, version: int, shares_devices: bool) -> Generator[NamedTensor]:
        assert self.adapters is not None
        if not shares_devices:
            raise UserError(
                "adapters cannot be published to separate rollout workers",
                where="actor_rollout_ref.rollout.checkpoint_engine.backend",
                why="the engines tell the actor's host whether they have the base",
                fix="set it to naive, with trainer.v1.trainer_mode=qarl_sync",
            )
        asked: dict[str, Any] = {"is_first": self.rank == 0, "seconds": publish_timeout()}
        refuse_dead_servers(self._servers, **asked)
        with_base = not servers_have_base(**asked)
        return reserved(self.adapters.stream(version, with_base=with_base))

    def _wire_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        here = torch.device(get_device_name())
        return sharded_wire_tensors(
            self.module, scheme=self.scheme, ignore=self.ignore, device=here
        )


def register() -> None:
    """Register the engine with verl for each device and vendor that has no engine yet."""
    for hardware in (
        {"device": "cpu"},
        {"device": "cuda", "vendor": "nvidia"},
        {"device": "cuda", "vendor": "amd"},
    ):
        for backend in ("fsdp", "fsdp2"):
            try:
                EngineRegistry.register("language_model", backend, **hardware)(QaRLFSDPEngine)
            except AssertionError as error:
                _log.warning(
                    "%s on %s keeps another package's engine, not QaRL's: %s",
                    backend,
                    hardware,
                    error,
                )


register()
