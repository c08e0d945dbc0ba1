"""A training loop of your own around the four parts of QaRL: engine, low-bit layers, publish and loss.

    python examples/own_loop.py                     # the quickstart's model and data; `qarl demo` makes both
    python examples/own_loop.py STEPS MODEL_FOLDER

`qarl.trainer.local` is the same loop with checkpoints, evaluation, micro-batches and failure handling.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.align import align_model
from qarl.checks.model_folder import check_model_folder
from qarl.config import OptimConfig
from qarl.data.prompts import load_prompts
from qarl.data.rewards import arithmetic
from qarl.data.rows import check_data_file
from qarl.kernels.log_probs import log_probs_of_logits
from qarl.quant import get_scheme, packed_state_dict, quantize_model
from qarl.rollout import EngineConfig, RolloutEngine, SamplingConfig
from qarl.tbpo import TBPOConfig, reduce_metrics, tbpo_loss
from qarl.trainer.advantages import grpo_advantages
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.master_optimizer import MasterOptimizer

DATA = "data/column_addition/train.parquet"
PROMPTS, RESPONSES, MAX_TOKENS = 4, 8, 80
SCHEME = get_scheme("w4a16", group_size=32)
IGNORE = ("lm_head",)
# Answers of about 50 tokens need wider bands than the paper's, which are for thousands of tokens.
BANDS = TBPOConfig(
    seq_clip_ratio_high=0.01, neg_seq_clip_ratio_low=0.008, neg_seq_clip_ratio_high=0.015
)


def response_log_probs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """FP32 [B, R]: the log-prob of each response token, 0 after a response has ended."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    rows, tokens = batch.response_mask.nonzero(as_tuple=True)
    before = batch.prompt_lengths[rows] + tokens - 1  # the logits here predict the token
    log_probs, _ = log_probs_of_logits(
        logits[rows, before], batch.responses[rows, tokens], temperature=1.0
    )
    return torch.zeros(batch.response_mask.shape).masked_scatter(batch.response_mask, log_probs)


def main(argv: Sequence[str]) -> None:
    steps = int(argv[0]) if argv else 3
    folder = argv[1] if len(argv) > 1 else "models/tiny-qwen3"
    check_model_folder(folder)
    check_data_file(DATA)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = load_prompts(DATA, tokenizer=tokenizer, max_prompt_length=32)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    print(
        quantize_model(model, scheme=SCHEME, ignore=IGNORE)
    )  # which kernel multiplies, what was left in BF16 and why
    print(
        align_model(model, "model")
    )  # norms, rotary embedding and attention now round as the engine's do
    optimizer = MasterOptimizer(
        model.named_parameters(), OptimConfig(lr=1.5e-4), seed=0, total_training_steps=steps
    )
    engine = RolloutEngine(
        EngineConfig(folder, SCHEME, IGNORE, max_model_len=32 + MAX_TOKENS, kv_cache_gib=0.25)
    )

    # The engine starts stale: it generates only after this.
    engine.publish(packed_state_dict(model), version=0)
    for step in range(steps):
        chosen = [
            prompts[(step * PROMPTS + i) % len(prompts)]
            for i in range(PROMPTS)
            for _ in range(RESPONSES)
        ]
        seeds = [step * len(chosen) + i for i in range(len(chosen))]
        token_ids = [prompt.prompt_token_ids for prompt in chosen]
        rollout = engine.generate(token_ids, SamplingConfig(MAX_TOKENS), seeds)
        texts = tokenizer.batch_decode(rollout.response_token_ids, skip_special_tokens=True)
        rewards = torch.tensor(
            [arithmetic("", text, p.ground_truth) for text, p in zip(texts, chosen, strict=True)]
        )
        advantages = grpo_advantages(rewards, [i // RESPONSES for i in range(len(chosen))])
        batch = make_batch(rollout, rewards, advantages, pad_token_id=tokenizer.pad_token_id)

        with torch.no_grad():
            old_log_prob = response_log_probs(model, batch)
        rollout_log_prob, mask = batch.rollout_log_probs, batch.response_mask
        delta = (old_log_prob - rollout_log_prob)[mask].abs().mean()
        log_prob = response_log_probs(model, batch)
        loss, statistics = tbpo_loss(
            log_prob, old_log_prob, rollout_log_prob, advantages, mask, BANDS
        )
        loss.backward()
        optimizer.accumulate()  # FP32 sums, FP32 master weights
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        # The tensors that the next forward multiplies by.
        engine.publish(packed_state_dict(model), version=step + 1)
        ratio = reduce_metrics([statistics])["actor/seq_ratio_mean"]
        print(
            f"step {step + 1}: reward {rewards.mean():.3f}, mean |δ| {delta:.1e}, mean ratio {ratio:.3f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
