"""The model of the twin: transformers' own in float64, on the tensors that an engine was sent.

compressed-tensors' own functions turn the wire's tensors into weights. Activations are quantized token by token with
the formulas of vLLM's operators: absmax / 127 for int8, absmax / 448 for e4m3. The gradient goes straight through.
Rows are computed one by one, without padding or packing.

The same model in BF16 or FP16, transformers' own again, says how much of a difference is rounding: it has a rounding at
every operator, as the trainer has, but none of QaRL's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors_rule import PRESETS
from torch import Tensor, nn

SCALES = "weight_scale"
STACKS = ("experts.gate_up_proj", "experts.down_proj")
"""Ends of the names of transformers' parameters that hold all experts of a layer. On the wire `.weight` follows."""


def dequantized(published: Mapping[str, Tensor], scheme: str, group_size: int) -> dict[str, Tensor]:
    """The weights, float64, that a vLLM for compressed-tensors checkpoints multiplies by."""
    layers = {name.rpartition(".")[0] for name in published if name.endswith(SCALES)}
    weights = {}
    for name, tensor in published.items():
        owner, _, leaf = name.rpartition(".")
        if owner not in layers or leaf == "bias":
            weights[owner if owner.endswith(STACKS) else name] = tensor.double()
    for layer in layers:
        state = {
            name.rpartition(".")[2]: tensor
            for name, tensor in published.items()
            if name.rpartition(".")[0] == layer
        }
        preset = preset_name_to_scheme(PRESETS[scheme][0], ["Linear"])
        assert preset.weights is not None
        if preset.weights.group_size is not None:
            preset.weights.group_size = group_size
        restored = PRESETS[scheme][1].decompress(state, preset)
        weights[f"{layer}.weight"] = restored["weight"].double()
    return weights


def rounded_activations(x: Tensor, scheme: str) -> Tensor:
    """What a linear of `scheme` multiplies instead of `x`, with the gradient of `x`."""
    if scheme not in ("w8a8", "w4a8", "fp8"):
        return x
    exact = x.detach().double()
    largest = exact.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    if scheme == "fp8":
        scale = largest / 448
        codes = (exact / scale).float().to(torch.float8_e4m3fn).double()
    else:
        scale = largest / 127
        codes = (exact / scale).round().clamp(-128, 127)
    return x + ((codes * scale).to(x.dtype) - x.detach())


class TwinModel:
    """`model`: the model in `dtype`, float64 unless it is to show what rounding does. `load` sets its weights."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config: Any = AutoConfig.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self._hooks: list[Any] = []

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], scheme: str, layers: Sequence[str]) -> None:
        """`layers`: the names of the linears whose activations `scheme` quantizes."""
        for hook in self._hooks:
            hook.remove()
        own = dict(self.model.named_parameters())
        assert own.keys() == weights.keys()
        for name, parameter in own.items():
            parameter.copy_(weights[name])
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        self._hooks = [
            modules[name].register_forward_pre_hook(
                lambda module, inputs: (rounded_activations(inputs[0], scheme),)
            )
            for name in layers
        ]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float64 [tokens, vocabulary], rounded if the model is."""
        return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].double()

    def log_probs(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float
    ) -> Tensor:
        """float64 [len(response)]: the log-prob of each token, given those before it."""
        if not response:
            return torch.zeros(0, dtype=torch.float64)
        logits = self.logits([*prompt, *response])
        before = logits[len(prompt) - 1 : -1] / temperature
        chosen = torch.tensor(response)[:, None]
        return before.log_softmax(-1).gather(1, chosen)[:, 0]

    def gradients(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int], Tensor]], temperature: float
    ) -> dict[str, Tensor]:
        """By parameter: the gradient of the sum over `rows` (prompt, response, d loss / d log-prob), float64."""
        named = dict(self.model.named_parameters())
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
        for prompt, response, gradient in rows:
            if not response:
                continue
            self.model.zero_grad(set_to_none=True)
            log_probs = self.log_probs(prompt, response, temperature)
            log_probs.backward(gradient[: len(response)].double())
            for name, parameter in named.items():
                if parameter.grad is not None:
                    total[name] += parameter.grad.double()
        return total

    @torch.no_grad()
    def adapt(self, adapter: Mapping[str, Any] | None) -> None:
        """Add B A alpha / r to each linear that `adapter` names (arXiv 2106.09685, section 4.1)."""
        if adapter is None:
            return
        own = dict(self.model.named_parameters())
        factor = adapter["alpha"] / adapter["r"]
        for name, a in adapter["tensors"].items():
            if not name.endswith(".lora_A.weight"):
                continue
            b = adapter["tensors"][name.replace("lora_A", "lora_B")]
            linear = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weight = own[f"{linear}.weight"]
            weight.copy_(weight.double() + factor * b.double() @ a.double())
