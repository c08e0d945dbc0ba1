"""QaRL's transfer engine in a vLLM of another process: equal by digest and by log-probs to an engine in this process,
and a trainer that goes on after the other process was killed in the middle of a publish."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, SCHEME, load_model
from random_models import save_random_model

from qarl.quant import packed_state_dict
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.publish.checksum import checksums
from qarl.rollout.remote.records import TransferFailed
from qarl.rollout.remote.sockets import PeerLost

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]


class Remote:
    """vLLM's interface for weights (`VLLMWeightSyncClient`), to the process of remote_engine.py."""

    def __init__(self, folder: Path, scheme: str) -> None:
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(ROOT / "tests/support/remote_engine.py"),
            str(folder),
            scheme,
        ]
        self.log = (folder / "engine.log").open("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        if self.process.stdout.readline() != "ready\n":
            self.log.seek(0)
            raise RuntimeError(self.log.read()[-3000:])

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: self.call(method, arguments)

    def call(self, method: str, arguments: Any) -> Any:
        self.process.stdin.write(json.dumps([method, list(arguments)]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ConnectionError("the engine's process has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def step(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.randint(0, 60, (2, 12))).logits.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_two_processes_and_a_killed_engine(tmp_path):
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from qarl.rollout.remote.vllm_transfer import PackedSource, QaRLTrainerInitInfo

    folder = save_random_model(tmp_path / "qwen3")
    model = load_model(folder)
    remote = Remote(folder, "w4a16")
    transfer = WeightTransferTrainerFactory.trainer_init(
        QaRLTrainerInitInfo(rank=0, seconds=60),
        client=remote,
        source=PackedSource(lambda: list(packed_state_dict(model))),
    )
    answers, kinds = [], []
    for number in range(3):
        transfer.send_weights()
        kinds.append(transfer.sender.tally.known)
        names, tensors = zip(*packed_state_dict(model), strict=True)
        assert remote.digests() == dict(zip(names, checksums(tensors), strict=True))
        answers.append(
            ([(n, t.clone()) for n, t in packed_state_dict(model)], remote.generate(PROMPTS))
        )
        step(model, number)
    assert kinds == [False, True, True]

    remote.fail()
    with pytest.raises(TransferFailed, match="no memory"):
        transfer.send_weights()
    transfer.send_weights()
    assert not transfer.sender.tally.known
    answers.append(
        ([(n, t.clone()) for n, t in packed_state_dict(model)], remote.generate(PROMPTS))
    )

    step(model, 8)
    remote.die()
    start = time.monotonic()
    with pytest.raises(PeerLost, match="the publish lost a receiver"):
        transfer.send_weights()
    assert time.monotonic() - start < 30
    remote.process.wait()
    step(model, 9)  # the trainer goes on
    remote = transfer.client = Remote(folder, "w4a16")
    transfer.connect()
    transfer.send_weights()
    assert not transfer.sender.tally.known
    answers.append(
        ([(n, t.clone()) for n, t in packed_state_dict(model)], remote.generate(PROMPTS))
    )
    with pytest.raises(RuntimeError, match="without a matching start_weight_update"):
        remote.finish_weight_update("7")
    step(model, 10)  # a publish of unchanged weights has no tensor that could fail
    remote.fail()
    with pytest.raises(TransferFailed, match="no memory"):
        transfer.send_weights()
    with pytest.raises(RuntimeError, match=r"this engine does not generate[\s\S]*no memory"):
        remote.generate(PROMPTS)
    remote.close()
    transfer.shutdown()

    config = EngineConfig(str(folder), SCHEME, ("lm_head",), max_model_len=64, kv_cache_gib=0.25)
    with RolloutEngine(config) as engine:
        for version, (tensors, (tokens, log_probs)) in enumerate(answers):
            engine.publish(tensors, version=version)
            batch = engine.generate(PROMPTS, SamplingConfig(12, temperature=0.0, ignore_eos=True))
            assert (batch.response_token_ids, batch.rollout_log_probs) == (tokens, log_probs)
    assert len({json.dumps(answer) for _, answer in answers}) == 5
