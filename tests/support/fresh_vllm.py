"""A vLLM in a process that knows nothing of QaRL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_FRESH_VLLM = """
import json, os, sys
os.environ["VLLM_CPU_INT4_W4A8"] = "0"
import torch
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()  # without it vLLM's kernels end with an illegal instruction
from vllm import LLM, SamplingParams
folder, prompts, max_tokens, max_model_len = json.loads(sys.argv[1])
llm = LLM(model=folder, max_model_len=max_model_len, enforce_eager=True, kv_cache_memory_bytes=2**28)
params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
completions = [output.outputs[0] for output in outputs]
tokens = [list(c.token_ids) for c in completions]
log_probs = [[p[t].logprob for t, p in zip(c.token_ids, c.logprobs)] for c in completions]
print("RESULT" + json.dumps([tokens, log_probs]))
"""


def greedy_in_a_fresh_vllm(
    folder: Path, prompts: list[list[int]], *, max_tokens: int, max_model_len: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens and log-probs from a vLLM in a process that knows nothing of QaRL and loads `folder` as it is."""
    arguments = json.dumps([str(folder), prompts, max_tokens, max_model_len])
    command = [sys.executable, "-c", _FRESH_VLLM, arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT")), None)
    assert line is not None, run.stderr[-3000:]
    tokens, log_probs = json.loads(line.removeprefix("RESULT"))
    return tokens, log_probs
