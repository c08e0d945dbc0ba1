"""Sampling with a seed for each request, on a CPU: without the noise that nobody uses.

vLLM draws a token as the argmax of probability / noise. On a CPU its sampler (`TopKTopPSampler.forward_cpu`)
first draws noise for the whole batch, rows times vocabulary, and then overwrites each row that has a seed. QaRL's
requests all have one. vLLM's `forward_native` of the same class draws only what it uses, and gives the same tokens.
vLLM chooses between them when it makes the sampler; this chooses again. With 49,152 words the unused noise took a
fifth of a rollout of SmolLM2-135M's shape.

vLLM has no extension point for this:

- The runner for CPUs makes its `Sampler`, and that its `TopKTopPSampler`, by name, and asks the platform only for its
  kind. `model_state.custom_sampler` exists only in the other runner (vllm/v1/worker/gpu/), which is for GPUs.
- A logits processor sees the logits before the noise, and chooses no token. `use_fp64_gumbel` draws the same noise in
  another type.
- A worker or a runner of our own (`worker_cls`) would set the same attribute after vLLM has made it, and would be a
  subclass of two more private classes.

So this module is the only one that knows the attributes `model_runner.sampler.topk_topp_sampler.forward`.
"""

from __future__ import annotations

from typing import Any


def draw_only_used_noise(worker: Any) -> None:
    """Let the sampler of this vLLM worker draw no noise that it overwrites. Other samplers stay as they are."""
    sampler = getattr(worker.model_runner.sampler, "topk_topp_sampler", None)
    if sampler is not None and sampler.forward == sampler.forward_cpu:
        sampler.forward = sampler.forward_native
