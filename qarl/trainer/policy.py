"""The trainer's policy: a Hugging Face causal LM in BF16, its linears quantized, its forward aligned with the engine's,
and the log-probs of responses under it.

Sequences are prompt and response side by side, padded on the right, and attention is causal: no valid token ever sees
padding, so no attention mask is needed and a row's log-probs do not depend on the rows beside it. That matters:
TBPO's bands are narrower than the noise between two ways of batching the same row. (verl pads prompts on the left
and masks.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qarl.align import align_model
from qarl.errors import UserError
from qarl.quant.convert import packed_state_dict, quantize_model
from qarl.quant.linear import QuantLinear
from qarl.quant.scheme import Scheme, get_scheme
from qarl.trainer.batch import Batch

if TYPE_CHECKING:
    from qarl.config import Config


class Policy:
    """`model`: the live module; `scheme` and `ignore`: what its linears are published as; `align`: the level that was
    applied, which is lower than the one asked for where that is not built; `report`: what was swapped, and why so.
    """

    def __init__(self, model: nn.Module, scheme: Scheme, ignore: tuple[str, ...], *, align: str = "linears") -> None:
        self.model, self.scheme, self.ignore = model, scheme, ignore
        quantized = align != "off" and scheme.quantized
        linears = quantize_model(model, scheme=scheme, ignore=ignore) if quantized else "linears: BF16 in the forward"
        aligned = align_model(model, align)
        self.align = aligned.level
        self.report = f"{linears}\n{aligned}"

    @classmethod
    def load(cls, config: Config) -> Policy:
        """Load `model.path` in BF16 and quantize its linears as `quant` says."""
        from transformers import AutoModelForCausalLM

        quant = config.quant
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                config.model.path,
                dtype=torch.bfloat16,
                attn_implementation="sdpa",
                attention_dropout=0.0,
                output_loading_info=True,
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"the model cannot be loaded from {config.model.path!r}",
                where="model.path",
                why=str(error).splitlines()[0],
                fix="give a Hugging Face folder with config.json and safetensors",
            ) from error
        model, loading = loaded
        if loading["missing_keys"]:
            raise UserError(
                f"the checkpoint lacks {len(loading['missing_keys'])} tensors of the model",
                where=f"{config.model.path}: {', '.join(sorted(loading['missing_keys'])[:4])}",
                why="transformers would start them from random numbers",
                fix="give the whole checkpoint",
            )
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        model.train(config.model.gradient_checkpointing)
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        scheme = get_scheme(quant.scheme, group_size=quant.group_size)
        return cls(model, scheme, tuple(quant.ignore), align=quant.align)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def response_log_probs(self, batch: Batch, rows: slice, *, temperature: float) -> torch.Tensor:
        """Log-probs of the response tokens of `batch[rows]`: FP32 [rows, response_length], zero where no token is."""
        return self.response_log_probs_and_top(batch, rows, temperature=temperature)[0]

    def response_log_probs_and_top(
        self, batch: Batch, rows: slice, *, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`response_log_probs`, and the likeliest token at each place: int64, zero where no token is.

        The logits are BF16, as the engine's; they are upcast before the temperature and the softmax.
        """
        input_ids, mask = batch.input_ids[rows], batch.response_mask[rows]
        first = int(batch.prompt_lengths.min()) - 1
        keep = input_ids.shape[1] - first
        # The engine's attention sums a prompt, which it prefills, in another order than the tokens it decodes.
        exact = {"prompt_lengths": batch.prompt_lengths[rows]} if self.align == "exact" else {}
        logits = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=keep, **exact).logits
        # The logits at position t predict token t + 1; response token j of row i sits at prompt_lengths[i] + j.
        offsets = torch.arange(mask.shape[1], device=mask.device)
        positions = (batch.prompt_lengths[rows, None] - 1 - first + offsets).clamp(max=keep - 1)
        row_index = torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(positions)
        chosen = logits[row_index[mask], positions[mask]].float() / temperature
        log_probs = chosen.log_softmax(-1).gather(1, batch.responses[rows][mask][:, None])[:, 0]
        zeros = torch.zeros(mask.shape, device=mask.device)
        return zeros.masked_scatter(mask, log_probs), zeros.long().masked_scatter(mask, chosen.argmax(-1))

    def quantize(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor to publish by checkpoint name; quantized layers as what the next forward multiplies by."""
        return list(self.packed_state_dict())

    def packed_state_dict(self) -> Iterator[tuple[str, torch.Tensor]]:
        scheme = self.scheme if self.align == "off" else None
        return packed_state_dict(self.model, scheme=scheme, ignore=self.ignore)

    def requantize(self) -> None:
        """Make the low-bit tensors of every quantized layer whose weight has changed."""
        for layer in self.quantized_layers().values():
            layer.quantized()

    def quantized_layers(self) -> dict[str, QuantLinear]:
        return {name: module for name, module in self.model.named_modules() if isinstance(module, QuantLinear)}

    def save(self, folder: Path, tokenizer: Any) -> Path:
        """Write a compressed-tensors checkpoint (an ordinary one for bf16) with config and tokenizer."""
        from qarl.checkpoint import save_compressed

        return save_compressed(folder, self.model, self.packed_state_dict(), self.scheme, self.ignore, tokenizer)
