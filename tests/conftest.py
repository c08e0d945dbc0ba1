"""Shared fixtures: small random models as Hugging Face folders, and what this CPU can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return set(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


needs_w4a16_cpu = pytest.mark.skipif(
    not {"avx512f", "avx512_vnni"} <= cpu_flags(),
    reason="vLLM's W4A16 kernel on CPU needs AVX512 with VNNI",
)


# These run on a GPU or under Triton's interpreter, where test_triton.py runs them.
_TRITON_RUNS = os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()
collect_ignore_glob = [] if _TRITON_RUNS else ["triton_kernels/*"]


@pytest.fixture(autouse=True)
def new_tensors_hold_garbage(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests of kernels `torch.empty` is filled with NaN, or the largest integer: what no kernel wrote is seen."""
    wanted = request.path.parent.name == "triton_kernels"
    if wanted:
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    if wanted:
        torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)


def save_random_model(folder: Path, family: str = "qwen3", *, vocab_size: int = 64, tie: bool = False) -> Path:
    """A 2-layer random model of `family` with a word-level tokenizer whose size is the model's vocabulary."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if family != "qwen2":
        sizes["head_dim"] = 32
    config = {
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "llama": transformers.LlamaConfig,
    }[family](**sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="t1", pad_token="t2", unk_token="t0"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


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
