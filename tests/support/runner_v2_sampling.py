"""The sampling kernels of the locked vLLM's Model Runner V2 under Triton's interpreter, and what QaRL reads from them.
Run as a program, because the interpreter acts when a kernel is defined:

    TRITON_INTERPRET=1 python tests/support/runner_v2_sampling.py

Prints one JSON object.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_lock import load_libcuda, pretend

from qarl.kernels.sampling_masks import Truncation, sampling_mask
from qarl.rollout.completions import sampled_log_probs, top_tokens

ROWS, VOCABULARY = 8, 640


def main() -> dict[str, Any]:
    load_libcuda()
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend(monkeypatch, (9, 0))
        torch.manual_seed(0)
        logits = 3 * torch.randn(ROWS, VOCABULARY)
        return {**log_probs(logits), **truncated(logits)}


def log_probs(logits: torch.Tensor) -> dict[str, Any]:
    """What vLLM computes for sampled tokens, read as the rollout engine reads it."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_logprobs  # type: ignore[attr-defined]  # vLLM 0.24

    sampled = torch.randint(VOCABULARY, (ROWS,))
    sampled[0] = logits[0].argmax()
    exact = logits.double().log_softmax(-1)
    figures: dict[str, Any] = {}
    for top in (0, 1):
        tensors = compute_topk_logprobs(logits, top, sampled)
        processor = LogprobsProcessor(None, FlatLogprobs(), None, 0.0, top, None)
        processor._update_sample_logprobs(tensors.tolists())
        completion = SimpleNamespace(token_ids=sampled.tolist(), logprobs=processor.logprobs)
        ours = torch.tensor(sampled_log_probs(completion), dtype=torch.float64)
        figures[f"off_{top}"] = float((ours - exact[torch.arange(ROWS), sampled]).abs().max())
        figures[f"shape_{top}"] = list(tensors.logprobs.shape)
        if top:
            figures["top_tokens"] = top_tokens(completion) == logits.argmax(-1).tolist()
    return figures


def truncated(logits: torch.Tensor) -> dict[str, Any]:
    """The tokens that top-k and top-p keep on a GPU, for 8 rows and more, beside those that the trainer keeps: the
    largest probability, per row, of tokens that only one of them keeps."""
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    probabilities = logits.double().softmax(-1)
    figures: dict[str, Any] = {}
    for top_k, top_p in ((20, None), (None, 0.9), (50, 0.95), (None, 0.999)):
        k = None if top_k is None else torch.full((ROWS,), top_k, dtype=torch.int32)
        p = None if top_p is None else torch.full((ROWS,), top_p)
        theirs = apply_top_k_top_p_triton(logits.clone(), k, p).isfinite()
        ours = sampling_mask(
            logits, Truncation(top_p=1.0 if top_p is None else top_p, top_k=top_k or -1)
        )
        figures[f"kept_otherwise top_k={top_k} top_p={top_p}"] = float(
            (probabilities * (theirs != ours)).sum(-1).max()
        )
    return figures


if __name__ == "__main__":
    print(json.dumps(main()))
