"""Collectives of the cost model: ring counts by hand, and an engine's all-reduce beside what others measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qarl.bench.cost.ceilings import Links
from qarl.bench.cost.collectives import all_gather, all_reduce, reduce_scatter
from qarl.bench.cost.gpus import assumed_ceilings
from qarl.errors import UserError


class TestCollectives:
    LINKS = Links(node=100.0, network=10.0, gpus_per_node=8, node_latency=0.5, network_latency=2.0,
                  reduce_latency=0.1, reduce_rate=1000.0)  # fmt: skip

    def test_rings(self) -> None:
        # 400 bytes on 4 GPUs: each receives 300, at 100 a second
        assert all_gather(self.LINKS, 400, 4).seconds == pytest.approx(3.5)
        assert all_gather(self.LINKS, 400, 4, calls=3).seconds == pytest.approx(4.5)
        assert reduce_scatter(self.LINKS, 400, 4).seconds == pytest.approx(3.5)

    def test_an_all_reduce_starts_by_the_engines_own_kernel_or_by_nccl(self) -> None:
        # 40 bytes on 4 GPUs: 60 to send. 400: 600, and 0.1 + 0.6 s of the kernel. 4000: NCCL's two passes of 0.5 s are
        # sooner. On 16 GPUs, 2 x 160 x 15 / 16 = 300 bytes at 80, after two passes of 2 s.
        assert all_reduce(self.LINKS, 40, 4).seconds == pytest.approx(0.1 + 0.06 + 0.6)
        assert all_reduce(self.LINKS, 400, 4).seconds == pytest.approx(0.1 + 0.6 + 6.0)
        assert all_reduce(self.LINKS, 4000, 4).seconds == pytest.approx(1.0 + 60.0)
        assert all_reduce(self.LINKS, 160, 16).seconds == pytest.approx(2 * 2.0 + 300 / 80)
        assert all_reduce(None, 160, 1).seconds == 0

    @pytest.mark.parametrize(
        "gpus, size, microseconds",
        [(2, 4096, 8.8), (4, 4096, 8.5), (8, 4096, 9.3), (2, 2**18, 12.9), (4, 2**18, 20.6), (8, 2**18, 24.1),
         (2, 2**20, 26.6), (4, 2**20, 40.2), (8, 2**20, 45.0), (8, 2**22, 59.4), (8, 2**24, 135.7)],
    )  # fmt: skip
    def test_an_all_reduce_on_h100s_takes_what_others_measured(self, gpus: int, size: int, microseconds: float) -> None:
        """sgl-project/sglang #2904 and, from 4 MiB, ByteDance-Seed/Triton-distributed #57."""
        predicted = all_reduce(assumed_ceilings("h100").links, size, gpus).seconds
        assert predicted * 1e6 == pytest.approx(microseconds, rel=0.25)

    def test_between_nodes_all_adapters_of_a_node_work(self) -> None:
        """150 of 160 bytes: 8 adapters of 10 in a node, 4 where the last node has 4 GPUs; NVLink's 100 at most."""
        assert all_gather(self.LINKS, 160, 16).seconds == pytest.approx(150 / 80 + 2)
        assert all_gather(self.LINKS, 120, 12).seconds == pytest.approx(110 / 40 + 2)
        assert all_gather(replace(self.LINKS, network=20.0), 160, 16).seconds == pytest.approx(150 / 100 + 2)

    def test_one_gpu_has_nobody_to_talk_to(self) -> None:
        assert all_gather(None, 400, 1).seconds == 0
        with pytest.raises(UserError, match="no links"):
            all_gather(None, 400, 2)
