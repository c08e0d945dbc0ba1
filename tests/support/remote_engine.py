"""A vLLM in a process of its own that receives publishes by the transfer engine `qarl`: run by
test_vllm_transfer.py.

    python remote_engine.py MODEL_FOLDER SCHEME

It answers one JSON request per line, as an HTTP server of vLLM's would: a method of `vllm.LLM` and its arguments. The
process kills itself in the middle of a publish if it is told to `die`, and raises there if it is told to `fail`.
"""

# ruff: noqa: E402  the process must be set up first
from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints

from qarl.process import configure_vllm_process

configure_vllm_process()
from vllm import LLM, SamplingParams

from qarl.quant import get_scheme

folder, scheme_name = sys.argv[1:]
scheme = get_scheme(scheme_name, group_size=32)
overrides = (
    {"quantization_config": scheme.quantization_config(["lm_head"])} if scheme.quantized else {}
)
llm = LLM(
    model=folder, load_format="dummy", dtype="bfloat16", max_model_len=64, enforce_eager=True,
    kv_cache_memory_bytes=2**28, logprobs_mode="processed_logprobs", enable_prefix_caching=False,
    hf_overrides=overrides, weight_transfer_config={"backend": "qarl"},
)  # fmt: skip


def generate(prompts: list[list[int]]) -> Any:
    params = SamplingParams(
        max_tokens=12, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True
    )
    requests: Any = [{"prompt_token_ids": p} for p in prompts]
    outputs: Any = llm.generate(requests, params, use_tqdm=False)
    done = [output.outputs[0] for output in outputs]
    log_probs = [[p[t].logprob for t, p in zip(c.token_ids, c.logprobs, strict=True)] for c in done]
    return [[list(c.token_ids) for c in done], log_probs]


def die() -> None:
    """In the second half of the next publish."""
    (engine,) = llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
    take, seen = engine.receiver._take, []

    def dying(name: str, tensor: Any) -> None:
        seen.append(name)
        if len(seen) > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        take(name, tensor)

    engine.receiver._take = dying


def fail() -> None:
    """In the middle of the next publish, once."""
    (engine,) = llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
    receiver = engine.receiver
    take = receiver._take

    def failing(name: str, tensor: Any) -> None:
        if ".layers.1." in name:
            receiver._take = take
            raise MemoryError("no memory")
        take(name, tensor)

    receiver._take = failing


def call(method: str, arguments: list[Any]) -> Any:
    if method in ("generate", "die", "fail"):
        return globals()[method](*arguments)
    if method == "digests":
        (engine,) = llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
        return engine.receiver._weights.cache.digests
    if method == "init_weight_transfer_engine":
        return llm.init_weight_transfer_engine({"init_info": arguments[0]})
    if method == "update_weights":
        return llm.update_weights({"update_info": arguments[0]})
    return getattr(llm, method)(*arguments)


print("ready", file=out, flush=True)
for line in sys.stdin:
    try:
        answer = {"result": call(*json.loads(line))}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=out, flush=True)
