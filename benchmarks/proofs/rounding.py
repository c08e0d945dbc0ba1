"""What int4 rounding costs real weights before any training, and how much of that a searched scale saves.

The linears of SmolLM2-135M-Instruct are rounded to the nearest int4 code, in groups along the inputs, as W4A16 rounds
them. `searched` tries 21 factors from 1 down to 0.5 on each group's scale and takes the one with the smallest squared
error: what a search once at the start of a run could reach without data. The same tokens, sampled by the unrounded
model, are scored by each variant, so `nll` is the cross-entropy with that model. Computed in FP32 with transformers.
"""

from __future__ import annotations

from typing import Any

from benchmarks.proofs.harness import Record, Row
from benchmarks.proofs.real_weights import MODEL, SUBJECTS

FACTORS = 21
STEP = 0.025
TOKENS = 96
HALF_RANGE = 7.5
QUESTIONS = (*SUBJECTS, "What is the capital of France?", "List three uses of salt.")


def real_rounding(record: Record, *, groups: tuple[int, ...] = (32, 64)) -> None:
    """Score the model's own text with each size of groups, with and without a search for the scale."""
    variants = [(group, searched) for group in groups for searched in (False, True)]
    names = {pair: f"groups of {pair[0]}{' | searched' if pair[1] else ''}" for pair in variants}
    if not any(record.wants(name) for name in (*names.values(), "bf16")):
        return
    model, texts = sampled_texts()
    original = {
        name: weight.detach().clone()
        for name, weight in model.named_parameters()
        if name.endswith("proj.weight")
    }
    weights = dict(model.named_parameters())
    log_probs, top = score(model, texts)
    record.add("bf16", {"tokens": len(log_probs), "nll": float(-log_probs.mean())})
    for (group, searched), name in names.items():
        errors = []
        for key, weight in original.items():
            rounded = round_groups(weight, group, searched)
            weights[key].data.copy_(rounded)
            errors.append(float((rounded - weight).norm() / weight.norm()))
        rounded_log_probs, rounded_top = score(model, texts)
        difference = (rounded_log_probs - log_probs).abs()
        row: Row = {
            "weight_error": sum(errors) / len(errors),
            "nll": float(-rounded_log_probs.mean()),
            "log_prob_differs_by": float(difference.mean()),
            "argmax_differs": float((rounded_top != top).double().mean()),
        }
        record.add(name, row)


def sampled_texts() -> tuple[Any, list[tuple[int, Any]]]:
    """Return the model in FP32, and for each question the length of its prompt and its tokens with the answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    texts = []
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        encoded: Any = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        prompt = encoded["input_ids"]
        answered = model.generate(
            prompt,
            attention_mask=encoded["attention_mask"],
            do_sample=True,
            temperature=0.7,
            max_new_tokens=TOKENS,
        )
        texts.append((prompt.shape[1], answered))
    return model, texts


def score(model: Any, texts: list[tuple[int, Any]]) -> tuple[Any, Any]:
    """Return the log-probs of all answers' tokens, and the model's likeliest tokens at their positions."""
    import torch

    log_probs = []
    top = []
    with torch.no_grad():
        for prompt, tokens in texts:
            logits = model(tokens).logits[0, prompt - 1 : -1].log_softmax(-1)
            answer = tokens[0, prompt:, None]
            log_probs.append(logits.gather(1, answer)[:, 0])
            top.append(logits.argmax(-1))
    return torch.cat(log_probs), torch.cat(top)


def round_groups(weight: Any, group: int, searched: bool) -> Any:
    """Round a weight [out, in] in groups of inputs: scale absmax / 7.5, codes -8 to 7. Return it dequantized."""
    import torch

    rows = weight.view(-1, group)
    absmax = rows.abs().amax(1, keepdim=True).clamp(min=1e-12)
    best = torch.zeros_like(rows)
    least = torch.full_like(absmax, torch.inf)
    for number in range(FACTORS if searched else 1):
        scale = absmax / HALF_RANGE * (1 - STEP * number)
        rounded = (rows / scale).round().clamp(-8, 7) * scale
        error = (rounded - rows).square().sum(1, keepdim=True)
        better = error < least
        best = torch.where(better, rounded, best)
        least = torch.where(better, error, least)
    return best.view(weight.shape)
