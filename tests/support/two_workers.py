"""Publishes to the two workers of one vLLM, each of which holds half of every matrix. Run as a program:

    python tests/support/two_workers.py FOLDER SCHEME

makes two checkpoints of the model in FOLDER, publishes the second to an engine of the first and the first again, and
fails if the engine does not generate what it did, or what an engine started on the second generates.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from random_moe import IGNORE, save_checkpoint, wire_tensors

from qarl.process import configure_vllm_process
from qarl.quant.scheme import get_scheme

PROMPTS = [[3 + i % 7, 5, 8 + i % 11, 4] for i in range(8)]


def publish(worker: Any, folder: str, scheme_name: str, noise_seed: int | None) -> list[str]:
    """Runs in each worker; the modules that vLLM's layerwise reload wrote."""
    from qarl.rollout.publish.manifest import check_same_layers, expected_manifest
    from qarl.rollout.publish.receive import WeightReceiver
    from qarl.rollout.publish.wire import encode_publish

    scheme, model = get_scheme(scheme_name, 32), worker.get_model()
    expected = expected_manifest(worker.vllm_config.model_config.hf_config, scheme, IGNORE)
    check_same_layers(model, expected)
    receiver = WeightReceiver(model, worker.vllm_config, expected, kv_caches=lambda: [])
    tensors = wire_tensors(Path(folder), scheme, noise_seed=noise_seed)
    receiver.feed(encode_publish(tensors.items(), version=1))
    assert receiver.version == 1
    return [target.name for target in receiver.plan.by_owner.values() if target.writer is None]


def start(folder: Path) -> Any:
    from vllm import LLM

    return LLM(
        str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=2**25,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )


def greedy(llm: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [[(t, p[t].logprob) for t, p in zip(c.token_ids, c.logprobs, strict=True)] for c in completions]


def main(folder: str, scheme_name: str) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions for the workers
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    configure_vllm_process()
    like, scheme = Path(folder), get_scheme(scheme_name, 32)
    first, second = (
        save_checkpoint(like.parent / f"checkpoint_{seed}", like, scheme, wire_tensors(like, scheme, noise_seed=seed))
        for seed in (None, 1)
    )
    llm = start(first)
    before = greedy(llm)
    reloaded = llm.collective_rpc(publish, args=(folder, scheme_name, 1))
    assert reloaded == [[], []], reloaded
    other = greedy(llm)
    assert other != before
    llm.collective_rpc(publish, args=(folder, scheme_name, None))
    assert greedy(llm) == before, "back to the first"
    del llm
    assert greedy(start(second)) == other, "an engine started on the second"
    print("EXACT")


if __name__ == "__main__":
    main(*sys.argv[1:])
