"""A vLLM in a process that knows nothing of QaRL."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from itertools import takewhile
from pathlib import Path

# Importing vLLM takes several times as long as an engine, so each engine is in a fork of one process that has done it.
_FRESH_VLLM = """
import gc, json, os, sys
os.environ |= {"VLLM_CPU_INT4_W4A8": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
import torch
from vllm import LLM, SamplingParams
import vllm.v1.worker.cpu_worker
gc.freeze()  # an engine collects garbage three times as it starts
for line in sys.stdin:
    if os.fork():
        os.wait()
        print("\\nEND", flush=True)
        continue
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # without it vLLM's kernels end with an illegal instruction
    folder, prompts, max_tokens, max_model_len, adapter = json.loads(line)
    lora, request = {}, None  # as docs/do/lora.md advises
    if adapter:
        from vllm.lora.request import LoRARequest
        targets = json.load(open(adapter + "/adapter_config.json"))["target_modules"]
        leaves = sorted({target.rpartition(".")[2] for target in targets})
        lora = {"enable_lora": True, "lora_target_modules": leaves}
        request = LoRARequest("adapter", 1, adapter)
    llm = LLM(model=folder, max_model_len=max_model_len, enforce_eager=True, kv_cache_memory_bytes=2**28, **lora)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, lora_request=request)
    completions = [output.outputs[0] for output in outputs]
    tokens = [list(c.token_ids) for c in completions]
    log_probs = [[p[t].logprob for t, p in zip(c.token_ids, c.logprobs)] for c in completions]
    print("\\nRESULT" + json.dumps([tokens, log_probs]), flush=True)
    os._exit(0)
"""


@cache
def _forking_process() -> subprocess.Popen[str]:
    """It ends with this process, which closes its standard input."""
    command, pipe = [sys.executable, "-c", _FRESH_VLLM], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def greedy_in_a_fresh_vllm(
    folder: Path,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    max_model_len: int,
    adapter: Path | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens and log-probs from a vLLM in a process that knows nothing of QaRL and loads `folder` as it is, and
    the adapter in the folder `adapter`."""
    process = _forking_process()
    assert process.stdin and process.stdout
    request = [str(folder), prompts, max_tokens, max_model_len, adapter and str(adapter)]
    print(json.dumps(request), file=process.stdin, flush=True)
    lines = list(takewhile(lambda line: line != "END\n", process.stdout))
    line = next((line for line in lines if line.startswith("RESULT")), None)
    assert line is not None, "".join(lines)[-3000:]
    tokens, log_probs = json.loads(line.removeprefix("RESULT"))
    return tokens, log_probs
