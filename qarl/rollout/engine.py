"""vLLM inside the trainer's process. It takes prompts and returns responses, their log-probs and the weight version.

Trainer and engine share one process. So both use the same OpenMP pool (two pools on two cores are 30 times slower),
and a publish passes tensors without copying them through a pipe. The engine starts with dummy weights and is `stale`,
so it refuses to generate until a publish is complete. If a later publish fails half way, the engine refuses again.

Log-probs are vLLM's `processed_logprobs`, as in verl: they are computed after temperature and top-p are applied, that
is, from the distribution that tokens are sampled from. Every request has its own seed, so a response does not depend on
the other requests in the batch, or on whether the run was resumed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from qarl.console import note
from qarl.errors import UserError, in_one_line
from qarl.lora.adapter import Adapter
from qarl.process import configure_vllm_process
from qarl.progress import live
from qarl.quant.experts import is_of_expert, stacked
from qarl.quant.meta_model import TORCH_DTYPES, default_dtype_kept
from qarl.rollout import engine_config, open_engines
from qarl.rollout.adapter_spec import servable
from qarl.rollout.chosen_kernel import own_kernels
from qarl.rollout.completions import (
    first_not_finite,
    routed_experts,
    sampled_log_probs,
    top_tokens,
)
from qarl.rollout.engine_checks import check_operators, check_plugin
from qarl.rollout.engine_config import EngineConfig, SamplingConfig, eager
from qarl.rollout.kernel_request import kernel_request
from qarl.rollout.live_counts import LiveCounts
from qarl.rollout.publish.adapters import PROBE, EngineAdapter, takes_no_adapter
from qarl.rollout.publish.manifest import (
    Manifest,
    NamedTensor,
    PublishReport,
    check_complete,
    check_same_layers,
    expected_manifest,
)
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.publish.version import checked_version
from qarl.rollout.publish.writers import ReloadFailed
from qarl.rollout.requests import RolloutBatch, check_requests
from qarl.rollout.seeded_sampling import draw_only_used_noise
from qarl.rollout.sessions import Run, whole_requests
from qarl.vllm_versions import (
    check_head_dtype,
    check_release,
    is_refusal,
    loaded_model,
    release_engine_memory,
)


class EngineFailed(ReloadFailed):
    """vLLM failed, or could not be started. The only remedy is `RolloutEngine.rebuild`."""


class WeightSource(Protocol):
    """Publishes what it has to an engine, for example `Policy.publish`."""

    def __call__(self, engine: RolloutEngine, *, version: int) -> PublishReport: ...


class RolloutEngine:
    """An in-process vLLM whose weights come from `publish`. `rebuilds`: how often vLLM was replaced because it was lost
    (`qarl.rollout.recovery`)."""

    rebuilds = 0

    def __init__(self, config: EngineConfig) -> None:
        from transformers import AutoConfig

        configure_vllm_process()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "0"  # a publish cannot reach an engine in another process
        )
        engine_config.check_not_batch_invariant()
        refusal = config.scheme.engine_refusal(config.kernels)
        if refusal is not None:
            raise refusal
        check_head_dtype(config.head_dtype)
        check_release()
        hf_config = AutoConfig.from_pretrained(
            config.model, trust_remote_code=config.trust_remote_code
        )
        check_plugin(config, hf_config)
        self.config = config
        self._counts_preemptions = engine_config.may_preempt(config, hf_config)
        self.weights: EngineWeights | None = None
        self.adapter: EngineAdapter | None = None
        self._start()

    def _start(self) -> None:
        import torch._dynamo
        from vllm import LLM

        open_engines.add(self)
        self._dynamo_was_disabled: bool | None = None
        self._asleep = False
        if torch.cuda.is_available():
            engine_config.before_start(self.config.gpu_memory_utilization)
        elif eager(self.config.enforce_eager):
            # Even in eager mode, vLLM compiles two sampling helpers. This takes half a minute at the first request.
            self._dynamo_was_disabled = torch._dynamo.config.disable
            torch._dynamo.config.disable = True
        try:
            kernels = own_kernels(kernel_request(self.config.kernels, self.config.scheme.name))
            with (
                default_dtype_kept(),
                kernels,
                servable(self.config.adapters, self.config.scheme),
            ):
                self.llm = LLM(
                    **engine_config.llm_arguments(self.config, statistics=self._counts_preemptions)
                )
            if not torch.cuda.is_available():
                self.llm.collective_rpc(draw_only_used_noise)
            self._prepare_publish()
        except BaseException as error:
            self.close()
            engine_config.explain(error, self.config.gpu_memory_utilization)
            raise

    def _prepare_publish(self) -> None:
        config = self.config
        dtype = TORCH_DTYPES[self.config.dtype]
        self.expected: Manifest = expected_manifest(
            self.hf_config,
            config.scheme,
            config.ignore,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
        )
        check_same_layers(self.model(), self.expected)
        check_operators(config, self.model())
        if self.config.adapters is not None:
            self.adapter = EngineAdapter(self.llm.llm_engine, self.model(), self.config.adapters)
        (self.weights,) = self.llm.collective_rpc(
            _engine_weights, args=(self.expected, self.config.direct_writes)
        )

    def rebuild(self) -> None:
        """Close vLLM and start a new one with dummy weights. This is the only remedy after `ReloadFailed`. Raise
        EngineFailed if the new engine does not start, or UserError if the error of vLLM says why."""
        self.close()
        try:
            self._start()
        except UserError:
            raise
        except Exception as error:
            reason = f"vLLM failed to start: {type(error).__name__}: {error}"
            raise EngineFailed(
                "the rollout engine is lost, and a new one could not be started", why=reason
            ) from error

    @property
    def hf_config(self) -> Any:
        return self.llm.llm_engine.model_config.hf_config

    @property
    def weight_version(self) -> int | None:
        """The version of the last complete publish; None while the engine is stale. With adapters, it is that of the
        adapter."""
        if self.adapter is not None and self.has_weights:
            return self.adapter.version
        return self.weights.version if self.weights else None

    @property
    def has_weights(self) -> bool:
        """Whether a publish of weights is complete. With adapters, these are the weights of the base."""
        return self.weights is not None and not self.weights.stale

    @property
    def stale(self) -> bool:
        return self.weight_version is None

    def model(self) -> torch.nn.Module:
        """vLLM's own module tree, for comparisons and hooks."""
        return loaded_model(self.llm)

    def sleep(self) -> None:
        """Free the GPU memory of the weights and the KV cache until the next `publish` or `generate`. Do nothing on a
        CPU, or if the engine is closed or broken. Raise EngineFailed if vLLM fails."""
        usable = self.weights is not None and not self.weights.broken
        if (
            usable
            and not self._asleep
            and self.config.free_cache_engine
            and torch.cuda.is_available()
        ):
            self._asleep = (
                True  # also after a failure, which may leave a part of the memory unmapped
            )
            self._run(lambda: self.llm.sleep(level=1))

    def wake_up(self) -> None:
        """Undo `sleep`. Raise EngineFailed if the memory is no longer free."""
        if not self._asleep or self.weights is None:
            return
        engine_config.release_unused_memory()
        self._run(self.llm.wake_up)
        self._asleep = False
        # The new memory may contain NaN. Attention multiplies masked positions by zero, and NaN times zero is NaN.
        for kv_cache in self.weights.kv_caches():
            kv_cache.zero_()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[int] | None = None,
        *,
        max_tokens: Sequence[int] | None = None,
        run: Run = whole_requests,
    ) -> RolloutBatch:
        """Return one response per prompt. To sample n responses, repeat the prompt n times with n seeds.
        `max_tokens`: the limit of each response, in the place of that of `sampling`. `run`: what samples
        (`qarl.rollout.sessions`).

        Raises:
            UserError: the engine has no complete set of published weights, or vLLM would not sample as `sampling` asks.
            EngineFailed: vLLM raised an exception. A publish does not repair the engine; call `rebuild`.
            FloatingPointError: a log-prob is not finite, because the weights or the KV cache are corrupt.
        """
        version = self.weight_version
        if version is None:
            why = self.weights.stale_because if self.weights else "it was closed"
            if self.adapter is not None and self.has_weights:
                why = self.adapter.stale_because
            raise UserError(
                "the rollout engine refuses to generate",
                why=why,
                fix="call publish with all tensors of the model first; if a publish failed, mend what its error says",
            )
        self.wake_up()
        check_requests(prompts, seeds)
        adapter = None
        if self.adapter is not None:
            self.adapter.check_present()
            adapter = self.adapter.request
        params = engine_config.request_params(sampling, len(prompts), seeds, max_tokens)
        requests: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        preemptions = self._preemptions()
        counts = LiveCounts(self.llm, len(requests))
        with live.phase("sampling", total=counts.total, unit="responses", measure=counts) as phase:
            completions = self._run(lambda: run(self.llm, requests, params, adapter))
            phase.sampled(sum(len(c.token_ids) for c in completions))
        log_probs = [sampled_log_probs(c) for c in completions]
        if (bad := first_not_finite(log_probs)) is not None:
            self.mark_stale(
                f"response {bad} of the last call had a log-prob that is not finite", nan=True
            )
            raise FloatingPointError(
                f"rollout_log_probs of response {bad} are not finite: {log_probs[bad][:8]} ..."
            )
        routing = self.config.return_routed_experts
        return RolloutBatch(
            prompt_token_ids=[list(prompt) for prompt in prompts],
            response_token_ids=[list(c.token_ids) for c in completions],
            rollout_log_probs=log_probs,
            finish_reasons=[str(c.finish_reason) for c in completions],
            weight_version=version,
            top_token_ids=[top_tokens(c) for c in completions] if sampling.top_tokens else None,
            preemptions=self._preemptions() - preemptions,
            routed_experts=[routed_experts(c) for c in completions] if routing else None,
        )

    def _preemptions(self) -> int:
        """Number of preemptions since this vLLM was started."""
        metrics: list[Any] = self.llm.get_metrics() if self._counts_preemptions else []
        return sum(int(metric.value) for metric in metrics if metric.name == "vllm:num_preemptions")

    def publish_from(self, source: WeightSource, *, version: int) -> PublishReport:
        """Let `source` publish its weights as `version`."""
        return source(self, version=version)

    def publish(
        self,
        tensors: Iterable[NamedTensor],
        *,
        version: int,
        prepared: Mapping[str, torch.Tensor] | None = None,
    ) -> PublishReport:
        """Replace all of the engine's weights with `tensors` (checkpoint names, in layer order), as `version`.

        `prepared`: what the trainer's kernels have made of their codes (`qarl.quant.state_dict.prepared_codes`). An
        engine whose kernel reads the same layout copies it.

        All tensors are compared with the manifest, and with NaN and Inf, before the first one is written. After any
        exception the engine is stale, unless `tensors` is a mapping or `version` none. Exceptions from iterating over
        `tensors` are passed on.

        Raises:
            UserError: `version` is not a whole number from 0, or the tensors do not fit the engine's model. A later
                publish can succeed.
            ReloadFailed, EngineFailed: vLLM failed in this publish or earlier. Call `rebuild` first.
        """
        if self.weights is None:
            raise UserError(
                "the rollout engine is closed", fix="start a new one, or call rebuild()"
            )
        if isinstance(tensors, Mapping):
            why = "publish takes pairs of names and tensors"
            raise UserError(
                "the tensors are a mapping",
                why=why,
                fix="write publish(packed_state_dict(model), ...)",
            )
        version = checked_version(version)
        self.wake_up()
        start = time.perf_counter()
        if self.adapter is not None:
            self.adapter.mark_stale(
                f"only the base of version {version} has been published to it, and no adapter"
            )
            self.adapter.base_changes()
        try:
            published = list(tensors)
            check_complete(published, self.expected)
            if any(is_of_expert(name) for name, _ in published):
                published = list(stacked(published))
            seconds = {"validate": time.perf_counter() - start}
            with self.weights.replacing(version) as plan:
                plan.write_units(published, prepared)
            if not self.reset_prefix_cache():
                raise RuntimeError(
                    "vLLM could not reset its prefix cache: requests are still running"
                )
        except BaseException as error:
            if not self.weights.broken or not self.stale:
                reason = " ".join(str(error).split())[:300]
                self.mark_stale(
                    f"the publish of version {version} did not complete: {type(error).__name__}: {reason}"
                )
            raise
        return PublishReport.of(published, self.expected, version, seconds | self.weights.seconds)

    def publish_adapter(self, adapter: Adapter, *, version: int) -> PublishReport:
        """Replace the engine's adapter, as `version`. The base must have been published. After any exception the engine
        refuses to generate until an adapter is published. The first time, a probe shows that adapters act.

        Raises:
            UserError: `version` is not a whole number from 0, there is no base, the adapter does not fit it, or the
                engine does not multiply by the adapter.
            EngineFailed: vLLM failed. Call `rebuild`, then publish the base and the adapter.
        """
        if self.adapter is None:
            raise takes_no_adapter("it was started without adapters", "set EngineConfig.adapters")
        if not self.has_weights:
            raise takes_no_adapter(
                "its base has not been published", "call publish with the tensors of the base first"
            )
        version = checked_version(version)
        adapter = adapter.padded()
        self.wake_up()
        target = self.adapter
        if not target.proved and self.config.max_model_len > len(PROBE):
            self._run(lambda: target.prove(adapter, version, self._log_prob))
        seconds = self._run(lambda: target.publish(adapter, version=version))
        if not self.reset_prefix_cache():
            target.mark_stale("vLLM could not reset its prefix cache: requests are still running")
            raise RuntimeError(target.stale_because)
        return PublishReport(version, len(adapter.tensors), adapter.nbytes, 0, 0, seconds)

    def _log_prob(self, adapter: Any) -> float:
        """Return the log-prob of the likeliest token after `PROBE`, with or without an adapter."""
        params = engine_config.sampling_params(SamplingConfig(1, temperature=0.0), None)
        prompt: Any = {"prompt_token_ids": PROBE}
        (output,) = self._run(
            lambda: self.llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)
        )
        return sampled_log_probs(output.outputs[0])[0]

    def _run(self, call: Callable[[], Any]) -> Any:
        """Return `call()`, which uses vLLM. Turn exceptions into EngineFailed, except vLLM's refusal of a request."""
        try:
            return call()
        except Exception as error:
            if is_refusal(error) or isinstance(error, UserError):
                raise
            reason = f"vLLM failed: {type(error).__name__}: {error}"
            self.mark_stale(reason)
            if self.weights:
                self.weights.broken = True
            raise EngineFailed("the rollout engine is lost", why=reason) from error

    def reset_prefix_cache(self) -> bool:
        return bool(self._run(self.llm.reset_prefix_cache))

    def mark_stale(self, reason: str, *, nan: bool = False) -> None:
        """Make `generate` refuse, with `reason`, until the next complete publish. `nan`: whether vLLM returned NaN."""
        if self.weights:
            self.weights.mark_stale(reason)
            self.weights.kv_cache_spoilt |= nan

    def close(self) -> None:
        """Free the engine and vLLM's process-wide groups of torch.distributed. All other engines in this process stop
        working. An engine that is open when the program ends is closed automatically."""
        if self._asleep:  # vLLM would free memory that is already unmapped
            engine_config.release_unused_memory()
            with suppress(Exception):
                self.llm.wake_up()
        self.weights = None
        self.adapter = None
        self._asleep = False
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
        if self._dynamo_was_disabled is not None:
            torch._dynamo.config.disable = self._dynamo_was_disabled
        others = (
            engine
            for engine in open_engines.ENGINES
            if engine is not self and engine.weights and not engine.weights.broken
        )
        release_engine_memory([engine.model() for engine in others])

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Close the engine. If the block has failed, an error of the close, as of a lost vLLM, is only noted."""
        try:
            self.close()
        except Exception as error:
            if kind is None:
                raise
            note(f"the rollout engine could not be closed: {in_one_line(error)}")


def _engine_weights(worker: Any, expected: Manifest, direct: bool) -> EngineWeights:
    """Return the engine's weights. vLLM calls this in its worker, which is in this process."""
    return EngineWeights.of_runner(worker.model_runner, expected, direct=direct)
