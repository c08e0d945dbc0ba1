"""What needs two GPUs or more: FSDP2's all-gather of low-bit tensors over NCCL, and a publish between two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from publish_streams import engine_model, receiver

from qarl.quant import packed_state_dict
from qarl.rollout.remote.sockets import WeightClient, WeightServer
from qarl.rollout.remote.wire import DeltaSender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
def test_the_gather_over_nccl(tmp_path: Path, kind: str, scheme: str) -> None:
    """As many ranks as GPUs, up to four: the logits of one rank, bit for bit, and the bytes of the formula."""
    file = tmp_path / "gather.json"
    gpus = min(4, torch.cuda.device_count())
    arguments = [
        f"kinds={kind}",
        f"schemes={scheme}",
        "device=cuda",
        f"ranks={gpus}",
        "--output",
        str(file),
    ]
    command = [sys.executable, "-m", "benchmarks.proofs", "low_bit_gather", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=400)
    (row,) = json.loads(file.read_text())["rows"].values()
    ranks = {world: row[world] for world in map(str, range(1, gpus + 1))}
    assert len({figures["logits"] for figures in ranks.values()}) == 1
    for world, figures in ranks.items():
        assert figures["gradient_apart"] <= 2**-16
        assert world == "1" or figures["of_bf16"] == pytest.approx(figures["formula"], rel=0.01)


def test_a_publish_between_two_gpus() -> None:
    """Over the sockets that engines on GPUs of their own use: first whole, then what has changed."""
    source, target = (
        engine_model("llama", seed=2).to("cuda:0"),
        engine_model("llama", seed=1).to("cuda:1"),
    )
    server, outbox, inbox = WeightServer("of this run", seconds=60), DeltaSender(), receiver(target)

    def receive() -> None:
        for _ in range(2):
            with WeightClient(
                server.address, "of this run", fingerprint=inbox.fingerprint, seconds=60
            ) as client:
                client.feed(inbox)

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        for version in (1, 2):
            tensors = list(packed_state_dict(source, scheme=None, ignore=()))
            server.publish(lambda known, tensors=tensors, version=version: outbox.stream(
                tensors, version=version, receivers=known
            ))  # fmt: skip
            assert outbox.metrics()["publish/delta"] == (version == 2)
            with torch.no_grad():
                source.model.layers[1].mlp.down_proj.weight.add_(1)
    finally:
        thread.join(timeout=60)
        server.close()
    with torch.no_grad():
        source.model.layers[1].mlp.down_proj.weight.sub_(1)
    for (name, mine), theirs in zip(source.named_parameters(), target.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu()), name
