"""The section `model` of the config."""

from __future__ import annotations

from typing import Literal

from qarl.config.types import PathText, Section


class ModelConfig(Section):
    """The model to train."""

    path: PathText
    """Folder of a Hugging Face checkpoint (config, weights, tokenizer), or its name on the Hub."""

    trust_remote_code: bool = False
    """Run the Python code in the model's folder or Hub repository. It runs with all your rights, so read it first."""

    dtype: Literal["bf16", "fp16"] = "bf16"
    """Dtype of weights and activations in trainer and engine. `fp16` is 8 times as precise as `bf16`, but its largest
    number is 65504 and small gradients become 0, so the loss is scaled (docs/forward.md). `fp16` requires
    backend=local, quant.scheme=bf16 (unquantized) and optim.master_dtype=fp32."""

    head_dtype: Literal["model", "fp32"] = "model"
    """Precision of the logits. `model`: that of the model. `fp32`: trainer and engine compute FP32 logits from the BF16
    weights. `fp32` requires vLLM 0.29 and a model of the families Llama, Qwen2, Qwen3 or Qwen3-MoE."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward. This needs less memory but about a third more compute."""

    use_remove_padding: bool = True
    """Pack the rows of a micro-batch into one sequence, without padding. If false, each row is padded to the length of
    the longest row. This takes more time and does not change the log-probs. Set false only for debugging."""
