"""The trainer's policy: a Hugging Face causal LM in BF16 with quantized linears, aligned with the engine.

A row is a prompt followed by its response. The rows of a micro-batch are packed into one forward
(`qarl.trainer.batch`), and causal attention stays within each row. So no attention mask is needed, and a row's
log-probs do not depend on the other rows of its batch. If they did, the differences could be wider than TBPO's bands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.align import align_model
from qarl.align.cpu_attention import uses_engine_attention
from qarl.align.packed_attention import attends_in_rows, no_mask
from qarl.align.rotary import head_size_of
from qarl.align.router import replays
from qarl.checks.gpu_memory_decides import recomputes_activations
from qarl.checks.machine import this_machine
from qarl.checks.model import has_plain_head, no_fp32_head
from qarl.checks.model_folder import load_hf_config
from qarl.config.level import Level
from qarl.kernels.cpu.layer_ops import longest_shared_prompt
from qarl.kernels.gather import rows_of
from qarl.kernels.log_probs import LOGITS_AT_A_TIME, LogitsInBlocks, WholeLogits
from qarl.kernels.sampling_masks import Truncation
from qarl.lora.layers import Adapters
from qarl.progress import live
from qarl.quant.convert import quantize_model
from qarl.quant.experts import stacked_experts
from qarl.quant.meta_model import check_buffers
from qarl.quant.quantize import QuantizedTensor
from qarl.quant.state_dict import packed_state_dict, prepared_codes
from qarl.schemes import Scheme, get_scheme
from qarl.schemes.kernel_choice import KernelChoice
from qarl.step.noise import TrainedModel
from qarl.step.routing import RoutingReplay
from qarl.trainer.batch import TOKEN_MULTIPLE, Batch, Rows, index_of, micro_batches
from qarl.trainer.layout import Layout, lay_out
from qarl.trainer.load_weights import load_weights
from qarl.trainer.sampled_from import sampled_from

if TYPE_CHECKING:
    from qarl.config import Config
    from qarl.rollout.engine import RolloutEngine
    from qarl.rollout.publish.manifest import PublishReport


Phase = Callable[..., AbstractContextManager[None]]
"""`PhaseTimer.phase` or `untimed`."""


def untimed(name: str, *, not_in: str | None = None) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    return nullcontext()


def adapters_of(config: Config) -> Callable[..., Adapters] | None:
    """Return what gives a model the adapters of the section `lora`, or None if all weights are trained."""
    return (
        partial(Adapters, config=config.lora, seed=config.seed, base=config.model.path)
        if config.lora.r
        else None
    )


class Policy:
    """The trainer's model.

    model            the module that is trained
    called           the module that the forward calls: `model`, or a wrapper such as DDP
    scheme, ignore   the quantization scheme, and the modules that stay unquantized
    align            the alignment level that was applied, which may be lower than the config's
    limit_level      the level whose limit on the mismatch applies, which is lower if `align` is unconfirmed
    why_lower        the reasons if `align` is lower than the config's
    report           a text that lists the replaced modules, and the reason if `align` is lower than the config's
    kernels          a value of `quant.kernels`
    packed           whether the rows of a forward are packed; if false, they are padded
    adapters         the adapters that are trained, or None if all weights are
    base_digests     with adapters: the digests of the base's tensors, once they have been computed
    """

    def __init__(
        self,
        model: Any,
        scheme: Scheme,
        ignore: tuple[str, ...],
        *,
        align: Level = Level.LINEARS,
        router_replay: str = "auto",
        packed: bool = True,
        head_dtype: str = "model",
        kernels: KernelChoice = KernelChoice.ENGINE,
        eager: bool = False,
        adapters: Callable[..., Adapters] | None = None,
        device: torch.device | None = None,
        codes: Mapping[str, QuantizedTensor] | None = None,
    ) -> None:
        """`router_replay`: a value of `rollout.router_replay`. Batches without routing are not replayed.
        `head_dtype`: a value of `model.head_dtype`. `kernels`: a value of `quant.kernels`.
        `eager`: whether the engine runs without CUDA graphs. `adapters`: freezes the model and gives it adapters.
        `device`: where to move the model, if it is not there. `adapters` moves it layer by layer. `codes`: the weights
        of quantized linears, if the checkpoint is quantized already.

        Raise UserError if `head_dtype` is fp32 without `plain_head`, or if something has cast the model's buffers."""
        check_buffers(model)
        if adapters is None and device is not None:
            model.to(device)
        self.model = model
        self.scheme = scheme
        self.ignore = ignore
        self.called = model
        quantized = align.low_bit and scheme.quantized
        linears: object = "linears: BF16 in the forward"
        if quantized:
            linears = quantize_model(
                model, scheme=scheme, ignore=ignore, kernels=kernels, device=device
            )
        for name, tensors in (codes or {}).items():
            model.get_submodule(name).adopt({"weight": tensors}, device)
        aligned = align_model(
            model, align, eager=eager, adapters=adapters is not None, device=device
        )
        self.align = aligned.level
        self.limit_level = aligned.limit_level
        self.why_lower = aligned.why_lower
        self.packed = packed and attends_in_rows(model)
        self.fp32_head = head_dtype == "fp32"
        if self.fp32_head and not self.plain_head:
            raise no_fp32_head(model.config.model_type)
        self.replays = replays(router_replay, self.align)
        self.kernels = kernels
        self._routing = RoutingReplay()
        self.adapters = adapters(model, device=device) if adapters else None
        self.base_digests: dict[str, str] = {}
        self.report = f"{linears}\n{aligned}" + (f"\n{self.adapters}" if self.adapters else "")

    @classmethod
    def load(cls, config: Config) -> Policy:
        """Load `model.path` in `model.dtype` and quantize its linears as the section `quant` says. Raise UserError if
        the model cannot be loaded, or if a weight does not fit into that dtype."""
        quant = config.quant
        hf_config = load_hf_config(config.model.path, config.model.trust_remote_code)
        model, codes = load_weights(config, hf_config)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        machine = this_machine()
        recomputed = recomputes_activations(
            config,
            hf_config,
            device=machine.device,
            gpu_memory_bytes=machine.gpu_memory_bytes,
        )
        model.train(recomputed)
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        scheme = get_scheme(quant.scheme, group_size=quant.group_size)
        return cls(
            model,
            scheme,
            tuple(quant.ignore),
            align=quant.align,
            router_replay=config.rollout.router_replay,
            packed=config.model.use_remove_padding,
            head_dtype=config.model.head_dtype,
            kernels=quant.kernels,
            eager=config.rollout.enforce_eager is True,
            adapters=adapters_of(config),
            device=device,
            codes=codes,
        )

    @property
    def has_experts(self) -> bool:
        """Whether a layer of the model is a mixture of experts."""
        return bool(stacked_experts(self.model))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def batch_log_probs(
        self,
        batch: Batch,
        config: Config,
        *,
        truncation: Truncation | None = None,
        only: Tensor | None = None,
    ) -> Tensor:
        """Return the log-probs of all response tokens of a batch, FP32 [B, R], without gradients.

        `only`: int64 [rows]; rows to compute, while all others are 0. `truncation`: see `response_log_probs`."""
        log_probs = torch.zeros_like(batch.rollout_log_probs)
        temperature = config.rollout.temperature
        split = micro_batches(batch, config.actor, log_probs=True, only=only)
        with live.phase("log-probs", total=len(split), unit="micro-batches") as phase:
            for rows in split:
                log_probs[index_of(rows)] = self.response_log_probs(
                    batch, rows, temperature=temperature, truncation=truncation
                )
                phase.advance()
        return log_probs

    def response_log_probs(
        self, batch: Batch, rows: Rows, *, temperature: float, truncation: Truncation | None = None
    ) -> Tensor:
        """Return log-probs of the response tokens of `batch[rows]`, FP32 [rows, response_length]; 0 on padding.

        `truncation`: top-p and top-k. Pass it only to compute the old log-probs. It stores the tokens that top-p and
        top-k leave in `batch.sampling_mask`. If that is set, each softmax is over these tokens only.
        """
        layout, log_probs, _ = self._of_tokens(batch, rows, temperature, truncation)
        return layout.to_responses(log_probs)

    def response_log_probs_and_top(
        self, batch: Batch, rows: Rows, *, temperature: float, truncation: Truncation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `response_log_probs` and the likeliest token at each position (int64; 0 on padding)."""
        layout, log_probs, top = self._of_tokens(
            batch, rows, temperature, truncation, likeliest=True
        )
        return layout.to_responses(log_probs), layout.to_responses(top)

    def _of_tokens(
        self,
        batch: Batch,
        rows: Rows,
        temperature: float,
        truncation: Truncation | None,
        *,
        likeliest: bool = False,
    ) -> tuple[Layout, Tensor, Tensor]:
        """Return the layout of a forward, and for each response token its log-prob and, if `likeliest`, the likeliest.

        The logits are BF16 or FP32, like the engine's (`model.head_dtype`). They are converted to FP32 before the
        temperature and the softmax.
        """
        index = index_of(rows)
        layout = self.lay_out(batch, rows)
        tokens = layout.of_responses(batch.responses[index])
        with self.routing(batch, rows, layout):
            logits = self.logits(batch, rows, layout)
        mask = sampled_from(batch, rows, layout, logits, tokens, truncation, temperature)
        log_probs, top = logits.log_probs(
            tokens, temperature=temperature, mask=mask, likeliest=likeliest
        )
        return layout, log_probs, top

    def lay_out(self, batch: Batch, rows: Rows) -> Layout:
        """Return the layout of `batch[rows]` in a forward."""
        longest = 0 if batch.routed_experts is not None else self.shared_prompt
        return lay_out(batch, rows, packed=self.packed, shared_prompt=longest)

    @property
    def shared_prompt(self) -> int:
        """The largest number of tokens of a prompt that rows of a pack share, or 0 if they share none. They do so where
        its tokens have the same bits in each row, and where no wrapper must see the whole forward."""
        plain = self.plain_head and self.called is self.model
        if not (self.packed and plain and uses_engine_attention(self.model)):
            return 0
        return longest_shared_prompt(head_size_of(self.model.config))

    @contextmanager
    def routing(self, batch: Batch, rows: Rows, layout: Layout) -> Iterator[None]:
        """Make a context for a forward of `batch[rows]`. If router replay is on, tokens go to the rollout's experts.

        Without gradients, also record the tokens for which the policy's own routers choose different experts than the
        rollout's. With gradients, the replay lasts until `end_replay`, because gradient checkpointing repeats the
        forward in the backward.
        """
        self.end_replay()
        if batch.routed_experts is None:
            yield
            return
        sampled = layout.flatten(batch.routed_experts[index_of(rows)], -1)
        self._routing.begin(self.model, sampled, replay=self.replays)
        if torch.is_grad_enabled():
            yield
            return
        try:
            yield
            compared = self._routing.end()
        finally:
            self._routing.stop()
        assert compared is not None
        batch.note_routing(rows, layout.unflatten(compared.other))

    def end_replay(self) -> None:
        """Let the routers choose experts again. Call this after the backward if the forward replayed."""
        self._routing.stop()

    def logits(self, batch: Batch, rows: Rows, layout: Layout) -> WholeLogits | LogitsInBlocks:
        """Run the forward of `batch[rows]`, and return the logits that predict its response tokens, one row per token.

        If there are more than `LOGITS_AT_A_TIME` logits, or if they are FP32, they are computed in blocks of tokens."""
        inputs = layout.inputs | no_mask(self.model)
        predictors = layout.predictors
        if uses_engine_attention(self.model):
            # The engine's attention sums in different orders in the prefill of a prompt and in decoding.
            inputs["groups"] = layout.groups
        in_blocks = self.logits_in_blocks(len(predictors) if self.packed else layout.size)
        to_keep = F.pad(predictors, (0, -len(predictors) % TOKEN_MULTIPLE))
        if in_blocks or layout.shares_prompts:
            hidden = self.model.base_model(use_cache=False, **inputs).last_hidden_state
            head = self.model.get_output_embeddings()
            if not in_blocks:
                logits = head(rows_of(hidden.flatten(0, 1), to_keep))
                return WholeLogits(logits[: len(predictors)])
            chosen = rows_of(hidden.flatten(0, 1), predictors)
            if self.fp32_head:  # as in vLLM's LogitsProcessor, both operands are cast
                return LogitsInBlocks(chosen.float(), head.weight.float())
            return LogitsInBlocks(chosen, head.weight)
        if not self.packed:
            return WholeLogits(
                self.called(use_cache=False, **inputs).logits.flatten(0, 1)[predictors]
            )
        return WholeLogits(
            self.called(use_cache=False, logits_to_keep=to_keep, **inputs).logits[
                0, : len(predictors)
            ]
        )

    def logits_in_blocks(self, positions: int) -> bool:
        """Return whether to compute the logits of `positions` positions in blocks.

        This is true if there are too many logits, or if the model's own forward would round FP32 logits to BF16. It
        requires `plain_head`. It is false for a wrapper such as DDP, which must see the whole forward."""
        too_many = positions * self.model.get_output_embeddings().out_features > LOGITS_AT_A_TIME
        return self.plain_head and self.called is self.model and (too_many or self.fp32_head)

    @property
    def plain_head(self) -> bool:
        """Whether the logits are lm_head's unchanged output."""
        return has_plain_head(self.model)

    def published_tensors(self, *, stacks: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to publish. The forward of quantized layers uses these tensors. `stacks=False`: with
        experts one by one, as in a checkpoint."""
        return packed_state_dict(self.model, scheme=self.scheme, ignore=self.ignore, stacks=stacks)

    def publish(
        self, engine: RolloutEngine, *, version: int, phase: Phase = untimed
    ) -> PublishReport:
        """Send `engine` what the next forward multiplies by, as `version`. With adapters, the base only if the engine
        does not have it. `phase`: times the quantization of weights that no forward has quantized, in the phase
        `publish`."""
        if self.adapters is None:
            with phase("quantize", not_in="publish"):
                tensors = list(self.published_tensors())
            codes = prepared_codes(self.model)
            return engine.publish(tensors, version=version, prepared=codes)
        base = None
        if not engine.has_weights:
            base = self.publish_base(engine, version=version)
        report = engine.publish_adapter(self.adapters.adapter(), version=version)
        return report if base is None else report.after(base)

    def publish_base(self, engine: RolloutEngine, *, version: int) -> PublishReport:
        """Publish the frozen base of the adapters. Then share its weights with the engine where that is possible."""
        report = engine.publish(self.published_tensors(), version=version)
        assert self.adapters is not None and engine.weights is not None
        self.adapters.share(engine.weights.storage())
        return report

    def in_comparison(self) -> TrainedModel:
        """Return what `compare_with_noise` needs. At `off`, experts of a quantized policy stay those of transformers,
        which level `model` does not have."""
        plain_experts = not self.align.low_bit and self.scheme.quantized and self.has_experts
        return TrainedModel(
            self.model,
            self.scheme,
            self.ignore,
            align=self.align,
            limit_level=self.limit_level,
            kernels=self.kernels,
            can_be_aligned=not plain_experts,
        )

    def freeze(self) -> Policy:
        """Stop training this policy, and return it. The reference policy of the KL term is frozen from the start."""
        self.model.requires_grad_(False).eval()
        return self

    def save(self, folder: Path, tokenizer: Any) -> Path:
        """Write the model, in compressed-tensors format unless the scheme is bf16, with its config and tokenizer. An
        adapter is beside it, in the folder `adapter`."""
        from qarl.checkpoint.model_files import ModelFiles, save_model

        files = ModelFiles.of(self.model, tokenizer)
        adapter = self.adapters.adapter() if self.adapters else None
        return save_model(
            folder,
            files,
            self.published_tensors(stacks=False),
            scheme=self.scheme,
            ignore=self.ignore,
            adapter=adapter,
        )
