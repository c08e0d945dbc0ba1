"""Exported checkpoints against the trainer: the same log-probs from vLLM and from transformers, per scheme.

    python scripts/export_check.py --output result.json

For each model (dense; a mixture of experts, which `make model-moe` makes) and scheme: two steps of its quickstart at
learning rates that move the weights, a checkpoint, `qarl.export`, and then the greedy responses of a vLLM in a separate
process on the exported folder. On those tokens, log-probs of

    vllm           that vLLM itself
    exact, model   our trainer's forward at these alignment levels, from the checkpoint's BF16 weights
    transformers   the exported folder in stock transformers with compressed-tensors

If transformers reports missing or unexpected tensors, its entry has their numbers instead, because its model
is another one.
A row gives mean and largest |difference| to vLLM's in nats per token. The weights in transformers are the engine's,
bit for bit; its arithmetic is not: it multiplies dequantized weights by (for w8a8 and fp8, fake-quantized) activations
in BF16, and rounds norms, rotary embedding and attention elsewhere. `published`: whether the exported bytes are those
that were published at that step. Rows of other models and schemes in the output file stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qarl.checkpoint.compressed_tensors import read_tensors
from qarl.checkpoint.export import export, read_request
from qarl.checkpoint.folder import open_checkpoint, tensor_digest
from qarl.config import Config, load_config
from qarl.config.quant import ROLLOUT_SCHEMES as SCHEMES
from qarl.diagnose.diagnosis import with_quant
from qarl.process import configure_vllm_process
from qarl.rollout.engine import RolloutBatch
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.loop import train
from qarl.trainer.policy import Policy

CONFIGS = {"dense": "quickstart.yaml", "experts": "quickstart_moe.yaml"}
_LENGTHS = (80, 112)  # of the quickstart: response, and prompt with response

_FRESH_VLLM = """
import json, os, sys
os.environ["VLLM_CPU_INT4_W4A8"] = "0"
import torch
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()  # without it vLLM's kernels end with an illegal instruction
from vllm import LLM, SamplingParams
folder, prompts, max_tokens, max_model_len = json.loads(sys.stdin.read())
llm = LLM(model=folder, max_model_len=max_model_len, enforce_eager=True, kv_cache_memory_bytes=2**28,
          enable_prefix_caching=False, enable_chunked_prefill=False, max_num_batched_tokens=4096)
params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0, detokenize=False)
done = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]
log_probs = [[p[t].logprob for t, p in zip(c.token_ids, c.logprobs)] for c in done]
print("RESULT" + json.dumps([[list(c.token_ids) for c in done], log_probs]))
"""


def train_and_export(folder: Path, scheme: str, model: str) -> tuple[Config, Path, Path]:
    """The config of a run of two steps, its checkpoint, and the folder exported of it."""
    steps = ["trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=-1", "trainer.plots=false"]
    settings = [f"output_dir={folder}", f"quant.scheme={scheme}", "optim.lr=2e-4", "trainer.val_before_train=false"]
    config = load_config([f"config={CONFIGS[model]}", "name=run", *settings, *steps, "trainer.logger=[]"])
    train(config)
    export(read_request([f"run={config.run_dir}", f"output={folder}/exported"]))
    return config, config.run_dir / "checkpoints" / "step_2", folder / "exported"


def vllm_responses(folder: Path, prompts: list[list[int]]) -> RolloutBatch:
    """Greedy responses of a vLLM that loads `folder` as it is, in a separate process."""
    configure_vllm_process()
    request = json.dumps([str(folder), prompts, *_LENGTHS])
    run = subprocess.run([sys.executable, "-c", _FRESH_VLLM], input=request, capture_output=True, text=True)
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT")), None)
    if line is None:
        raise RuntimeError(f"vLLM failed on {folder}: {run.stderr[-2000:]}")
    tokens, log_probs = json.loads(line.removeprefix("RESULT"))
    return RolloutBatch(prompts, tokens, log_probs, ["stop"] * len(tokens), weight_version=0)


@torch.no_grad()
def transformers_log_probs(folder: Path, rollout: RolloutBatch) -> tuple[list[list[float]], dict[str, int]]:
    """Log-probs of each response by itself, as its user would compute them: logits of the whole sequence, upcast before
    the softmax. And the numbers of tensors that did not fit, with which there are no log-probs."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    model, told = loaded
    if any(told.values()):
        return [], {kind: len(names) for kind, names in told.items() if names}
    found = []
    for prompt, response in zip(rollout.prompt_token_ids, rollout.response_token_ids, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist())
    return found, {}


@torch.no_grad()
def trainer_log_probs(config: Config, checkpoint: Path, level: str, batch: Batch) -> torch.Tensor:
    """[B, R]: the trainer's forward at `level`, with the weights of the checkpoint."""
    path = config.model.model_copy(update={"path": str(checkpoint)})
    policy = Policy.load(with_quant(config.model_copy(update={"model": path}), align=level))
    return policy.response_log_probs(batch, slice(0, len(batch)), temperature=1.0)


def same_as_published(checkpoint: Path, exported: Path) -> bool:
    digests = {name: tensor_digest(tensor) for name, tensor in read_tensors(exported)}
    return digests == open_checkpoint(checkpoint).state["published"]


def check(scheme: str, prompts: int, model: str = "dense") -> dict[str, Any]:
    """The row of one scheme and model."""
    with tempfile.TemporaryDirectory() as parent:
        config, checkpoint, exported = train_and_export(Path(parent), scheme, model)
        rollout = vllm_responses(exported, prompt_tokens(config, prompts))
        zeros = torch.zeros(prompts)
        batch = make_batch(rollout, zeros, zeros, pad_token_id=0)
        stock = torch.zeros_like(batch.rollout_log_probs)
        log_probs_of_stock, unfit = transformers_log_probs(exported, rollout)
        for i, values in enumerate(log_probs_of_stock):
            stock[i, : len(values)] = torch.tensor(values)
        found = {level: trainer_log_probs(config, checkpoint, level, batch) for level in ("exact", "model")}
        row: dict[str, Any] = {"kind": model, "scheme": scheme, "tokens": int(batch.response_mask.sum())}
        row["published"] = same_as_published(checkpoint, exported)
    for name, log_probs in {**found, "transformers": stock}.items():
        delta = (log_probs - batch.rollout_log_probs)[batch.response_mask].abs()
        row[name] = {"mean": float(delta.mean()), "max": float(delta.max())}
    return row | ({"transformers": unfit} if unfit else {})


def prompt_tokens(config: Config, count: int) -> list[list[int]]:
    from qarl.checks.model_folder import load_tokenizer
    from qarl.data import load_prompts

    tokenizer, _ = load_tokenizer(config.model.path)
    found = load_prompts(config.data.val_files, tokenizer=tokenizer, max_prompt_length=32, limit=count)
    return [prompt.prompt_token_ids for prompt in found]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--row", action="store_true", help="of one model and scheme, in this process")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.row:
        print("ROW" + json.dumps(check(args.schemes[0], args.prompts, args.models[0])))
        return
    rows = []
    for model, scheme in itertools.product(args.models, args.schemes):
        command = [sys.executable, __file__, "--row", "--models", model, "--schemes", scheme]
        command += ["--prompts", str(args.prompts)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        line = next((line for line in run.stdout.splitlines() if line.startswith("ROW")), None)
        if line is None:
            raise SystemExit(f"{model}, {scheme}: failed, see above")
        rows.append(json.loads(line.removeprefix("ROW")))
        print(line.removeprefix("ROW"), file=sys.stderr, flush=True)
    measured = {(row["kind"], row["scheme"]) for row in rows}
    before = json.loads(args.output.read_text()) if args.output and args.output.is_file() else []
    rows = [row for row in before if (row["kind"], row["scheme"]) not in measured] + rows
    text = json.dumps(rows, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
