"""The transfer engine `qarl` in both workers of one vLLM. Run as a program:

    python tests/support/two_transfer_workers.py FOLDER SCHEME

publishes to a vLLM with two workers. One publish fails in one of the workers only, and must then fail in both. vLLM
must take the next one, and must refuse to generate after the last one, which fails again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from random_moe import save_checkpoint
from two_workers import both, greedy, start

from qarl.process import configure_vllm_process
from qarl.quant.scheme import get_scheme
from qarl.rollout.publish.wire import TransferFailed


def fail_once(worker: Any, rank: int) -> None:
    """In the middle of the next publish, in one worker."""
    receiver = worker.weight_transfer_engine.receiver
    take = receiver._take

    def failing(name: str, tensor: Any) -> None:
        if ".layers.1." in name:
            receiver._take = take
            raise MemoryError("no memory")
        take(name, tensor)

    if worker.rank == rank:
        receiver._take = failing


def held(worker: Any) -> str | None:
    return worker.weight_transfer_engine.receiver.held


class Client:
    """vLLM's interface for weights, to an `LLM` of this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, info: Any) -> None:
        self.llm.init_weight_transfer_engine({"init_info": info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, info: Any) -> None:
        self.llm.update_weights({"update_info": info})

    def finish_weight_update(self, version: Any) -> None:
        self.llm.finish_weight_update(version)


def refused(transfer: Any) -> bool:
    try:
        transfer.send_weights()
    except TransferFailed as error:
        return "1 of 2 workers" in str(error) and "no memory" in str(error)
    return False


def main(folder: str, scheme_name: str) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions for the workers
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    configure_vllm_process()
    like, scheme = Path(folder), get_scheme(scheme_name, 32)
    first, second = both(like, scheme)
    llm = start(
        save_checkpoint(like.parent / "checkpoint", like, scheme, first), weight_transfer_config={"backend": "qarl"}
    )
    from qarl.rollout.vllm_plugin.transfer import PackedSource, QaRLTrainerInitInfo, QaRLTrainerTransfer

    before, sent = greedy(llm), [second]
    transfer = QaRLTrainerTransfer.trainer_init(
        QaRLTrainerInitInfo(rank=0, workers=2, seconds=60),
        client=Client(llm),
        source=PackedSource(lambda: list(sent[0].items())),
    )
    transfer.send_weights()
    other = greedy(llm)
    assert other != before
    sent[0] = first
    for rank in (0, 1):
        llm.collective_rpc(fail_once, args=(rank,))
        assert refused(transfer), rank
        assert llm.collective_rpc(held) == [None, None]
        transfer.send_weights()
        assert not transfer.sender.tally.known and greedy(llm) == before, "after the next publish, which sends all"
    llm.collective_rpc(fail_once, args=(1,))
    assert refused(transfer)
    try:
        greedy(llm)
    except Exception as error:
        print("REFUSED", type(error).__name__, error)


if __name__ == "__main__":
    main(*sys.argv[1:])
