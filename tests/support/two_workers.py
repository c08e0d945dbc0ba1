"""Publishes to the two workers of one vLLM, each of which holds half of every matrix. Run as a program:

    python tests/support/two_workers.py FOLDER SCHEME

makes two checkpoints of the model in FOLDER, publishes the second to an engine of the first, then the first and the
second again as deltas, and fails if the engine does not generate what it did, or what an engine started on the second
generates.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from random_moe import IGNORE, near, save_checkpoint, wire_tensors

from qarl.process import configure_vllm_process
from qarl.quant.experts import stacked
from qarl.schemes import Scheme, get_scheme

PROMPTS = [[3 + i % 7, 5, 8 + i % 11, 4] for i in range(8)]


def publish(worker: Any, folder: str, scheme_name: str, version: int) -> tuple[list[str], bool]:
    """Runs in each worker, with a sender beside it. Odd versions are of the second checkpoint. Returns the modules that
    vLLM's layerwise reload wrote, and whether it was a delta."""
    from qarl.rollout.publish.manifest import check_same_layers, expected_manifest
    from qarl.rollout.publish.transaction import EngineWeights
    from qarl.rollout.remote.receive import StreamReceiver
    from qarl.rollout.remote.wire import DeltaSender

    scheme, model = get_scheme(scheme_name, 32), worker.get_model()
    if version == 1:
        expected = expected_manifest(worker.vllm_config.model_config.hf_config, scheme, IGNORE)
        check_same_layers(model, expected)
        weights = EngineWeights(model, worker.vllm_config, expected, kv_caches=lambda: [])
        worker.receiver = StreamReceiver(weights)
        worker.sender = DeltaSender()
    tensors = both(Path(folder), scheme)[version % 2]
    fingerprint = worker.receiver.fingerprint
    stream = worker.sender.stream(
        stacked(tensors.items()), version=version, receivers=[fingerprint]
    )
    worker.receiver.feed(stream)
    assert worker.receiver.weights.version == version
    reloaded = [
        target.name
        for target in worker.receiver.weights.plan.by_owner.values()
        if target.stored is None
    ]
    return reloaded, worker.sender.tally.known


def both(folder: Path, scheme: Scheme) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    first = wire_tensors(folder, scheme)
    return first, near(first, wire_tensors(folder, scheme, noise_seed=1))


def start(folder: Path, **options: Any) -> Any:
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
        **options,
    )


def greedy(llm: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
    )
    completions = [output.outputs[0] for output in outputs]
    return [
        [(t, p[t].logprob) for t, p in zip(c.token_ids, c.logprobs, strict=True)]
        for c in completions
    ]


def main(folder: str, scheme_name: str) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions for the workers
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    configure_vllm_process()
    like, scheme = Path(folder), get_scheme(scheme_name, 32)
    first, second = (
        save_checkpoint(like.parent / f"checkpoint_{number}", like, scheme, tensors)
        for number, tensors in enumerate(both(like, scheme))
    )
    llm = start(first)
    before = greedy(llm)
    outputs = []
    for version in (1, 2, 3):
        answers = llm.collective_rpc(publish, args=(folder, scheme_name, version))
        assert answers == [([], version > 1)] * 2, answers
        outputs.append(greedy(llm))
    assert outputs[0] != before and outputs == [outputs[0], before, outputs[0]], "A, B, A, B"
    del llm
    assert greedy(start(second)) == outputs[0], "an engine started on the second"
    print("EXACT")


if __name__ == "__main__":
    main(*sys.argv[1:])
