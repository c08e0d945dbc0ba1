"""vLLM's FlashAttention with one order over the keys of a query, whatever else a step computes.

Level `model` on a GPU chooses this backend (`qarl.kernels.cuda.layer_ops.ENGINE_ARGUMENTS`). It is vLLM's own, but for
two numbers that its builder passes to the kernel for a whole step:

    splits    one, in steps of any size, with CUDA graphs or without. vLLM's setting for that
              (`flash_attn_max_num_splits_for_cuda_graph`) holds only up to the largest captured step
    queries   the largest number that a request has in the step, but not fewer than `layer_ops.least_queries`. The
              kernel chooses its tile by this number

The attributes that are set here are those of `FlashAttentionMetadataBuilder` in both supported releases
(vllm/v1/attention/backends/flash_attn.py).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from qarl.kernels.cuda.layer_ops import least_queries


class OneOrderBuilder(FlashAttentionMetadataBuilder):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        """The arguments are those of vLLM's class."""
        super().__init__(*arguments, **named)
        if not self.use_full_cuda_graph:
            # In eager mode vLLM leaves the splits to the kernel. With this it takes the way of CUDA graphs.
            self.use_full_cuda_graph = True
            requests = self.vllm_config.scheduler_config.max_num_seqs
            self.scheduler_metadata = torch.zeros(
                1 + -(-requests // 4) * 4 * 4, dtype=torch.int32, device=self.device
            )
        self.max_num_splits = 1
        self.max_cudagraph_size = sys.maxsize

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        queries = max(common_attn_metadata.max_query_len, least_queries(self.headdim))
        step = replace(common_attn_metadata, max_query_len=queries)
        return super().build(common_prefix_len, step, fast_build)


class OneOrderBackend(FlashAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return OneOrderBuilder
