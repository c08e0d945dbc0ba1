"""The engine that level `model` follows on a GPU, as vLLM's own configuration resolves it in the GPU lock."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_lock import pretend, required
from random_models import save_random_model

from qarl.errors import UserError
from qarl.kernels import reference
from qarl.kernels.cuda import layer_ops, whole_sums
from qarl.quant import get_scheme
from qarl.rollout.engine_config import operator_arguments
from qarl.rollout.vllm_plugin import check_operators_loaded

required()

OPERATORS = partial(operator_arguments, get_scheme("w8a8"), aligned=True, max_num_seqs=256)
ALIGNED = OPERATORS(eager=False)
EAGER = OPERATORS(eager=True) | {"enforce_eager": True}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(Path(sys.prefix) / "libcuda_stub"))
    pretend(monkeypatch, (9, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), "qwen3")


def engine_config(folder: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    quantization = get_scheme("w8a8").quantization_config(["lm_head"])
    return EngineArgs(
        model=str(folder), dtype="bfloat16", max_model_len=64, max_num_seqs=256, load_format="dummy",
        hf_overrides={"quantization_config": quantization}, **arguments,
    ).create_engine_config()  # fmt: skip


def test_the_operators_and_their_arguments_exist() -> None:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    assert layer_ops.unavailable() is None and layer_ops.attention_unavailable((9, 0)) is None
    names = {
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "max_seqlen_q",
        "seqused_k",
        "max_seqlen_k",
        "softmax_scale",
        "causal",
    }
    names |= {"block_table", "fa_version", "num_splits"}
    assert names <= inspect.signature(flash_attn_varlen_func).parameters.keys()
    assert all(f" {name}=" in inspect.getsource(layer_ops.flash_attention) for name in names)


def test_the_engines_arguments_give_vllms_operators_and_graphs(folder: Path) -> None:
    from vllm.config import CompilationMode, CUDAGraphMode

    check_operators_loaded()
    config = engine_config(folder, **ALIGNED)
    compilation = config.compilation_config
    assert compilation.mode == CompilationMode.NONE
    assert (
        compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
        and "all" in compilation.custom_ops
    )
    assert compilation.max_cudagraph_capture_size == 512
    eager = engine_config(folder, **EAGER)
    assert eager.compilation_config.mode == CompilationMode.NONE
    for operator in layer_ops.NORMS:
        for priority in (config, eager):
            names = getattr(priority.kernel_config.ir_op_priority, operator)
            assert names[:2] == [layer_ops.NORM_PROVIDER, "vllm_c"]
    assert config.model_config.disable_cascade_attn
    assert config.use_v2_model_runner  # whose log-softmax the contract names
    # By default Inductor compiles PyTorch's formulas instead.
    assert engine_config(folder).kernel_config.ir_op_priority.rms_norm[0] == "native"


def test_vllms_norms_run_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's layer, alone, behind a residual addition, and on heads within the product of q, k and v."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    from qarl.kernels.triton import norms
    from qarl.rollout.vllm_plugin.cuda_operators import check_operators

    calls: list[tuple[torch.Size, bool]] = []

    def alone(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        calls.append((x.shape, x.is_contiguous()))
        return reference.rms_norm(x, weight, epsilon)

    def behind_sum(
        x: torch.Tensor, residual: torch.Tensor, *operands: Any, in_place: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert in_place
        calls.append((x.shape, x.is_contiguous()))
        return reference.add_rms_norm(x, residual, *operands)

    monkeypatch.setattr(norms, "rms_norm", alone)
    monkeypatch.setattr(norms, "add_rms_norm", behind_sum)
    check_operators_loaded()
    config = engine_config(folder, **ALIGNED)
    x, residual = (torch.randn(5, 64).bfloat16() for _ in range(2))
    with set_current_vllm_config(config), config.kernel_config.ir_op_priority.set_priority():
        check_operators()
        norm, head_norm = (RMSNorm(size, dtype=torch.bfloat16) for size in (64, 16))
        assert torch.equal(norm(x), reference.rms_norm(x, norm.weight, 1e-6))
        expected = reference.add_rms_norm(x, residual, norm.weight, 1e-6)
        assert all(map(torch.equal, norm(x.clone(), residual.clone()), expected))
        heads = x[:, :32].view(5, 2, 16)
        assert torch.equal(head_norm(heads), reference.rms_norm(heads, head_norm.weight, 1e-6))
        assert calls == [((5, 64), True), ((5, 64), True), ((5, 2, 16), False)]
        with pytest.raises(
            NotImplementedError, match="_C::rms_norm"
        ):  # vLLM's own, on the GPU alone
            norm.float()(x.float())
        assert len(calls) == 3
    with pytest.raises(UserError, match="another rms_norm than the trainer"):
        check_operators()


@pytest.mark.parametrize(
    ("arguments", "tokens", "splits"),
    [
        (ALIGNED, 8, 1),
        (ALIGNED, 512, 1),
        (ALIGNED, 513, 1),
        ({"compilation_config": ALIGNED["compilation_config"]}, 8, 32),
        ({"enforce_eager": True}, 8, 0),
        (EAGER, 8, 1),
    ],
    ids=["decode", "largest graph", "large step", "default", "default eager", "eager"],
)
def test_the_splits_that_the_engine_asks_for(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    tokens: int,
    splits: int,
) -> None:
    """0 is FlashAttention's own choice."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends import flash_attn
    from vllm.v1.attention.selector import get_attn_backend

    check_operators_loaded()
    asked = []
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *args, **kwargs: 3)
    monkeypatch.setattr(flash_attn, "_get_sliding_window_configs", lambda config: {None})
    monkeypatch.setattr(
        flash_attn,
        "get_scheduler_metadata",
        lambda **kwargs: (
            asked.append((kwargs["num_splits"], kwargs["max_seqlen_q"])) or torch.zeros(4)
        ),
    )
    config = engine_config(folder, **arguments)
    spec = SimpleNamespace(dtype=torch.bfloat16, block_size=layer_ops.PAGE)
    lengths = torch.full((tokens,), 40, dtype=torch.int32)
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=tokens,
        num_actual_tokens=tokens, max_query_len=1, max_seq_len=40, block_table_tensor=torch.zeros(tokens, 3),
        slot_mapping=torch.zeros(tokens),
    )  # fmt: skip
    with set_current_vllm_config(config):
        backend = get_attn_backend(head_size=16, dtype=torch.bfloat16, kv_cache_dtype="auto")
        builder = backend.get_builder_cls()(spec, [], config, torch.device("cpu"))
        metadata = builder.build(0, step)
    aligned = "attention_config" in arguments
    assert issubclass(backend, flash_attn.FlashAttentionBackend)
    assert (backend is flash_attn.FlashAttentionBackend) != aligned
    queries = layer_ops.least_queries(16) if aligned else 1
    assert asked == [(splits, queries)]
    assert (metadata.max_num_splits, metadata.max_query_len) == (splits, queries)


@pytest.mark.parametrize(("capability", "version"), [((8, 0), 2), ((9, 0), 3)])
def test_the_level_is_built_where_vllm_runs_flash_attention_3(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: int
) -> None:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    pretend(monkeypatch, capability)
    assert get_flash_attn_version() == version
    assert (layer_ops.attention_unavailable(capability) is None) == (version == 3)


def test_pytorch_takes_what_exact_asks_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    preferred = library()
    splits = "allow_bf16_reduced_precision_reduction"
    allowed = (getattr(matmul, splits), getattr(matmul, f"{splits}_split_k"))
    for name, value in whole_sums.VARIABLES.items():
        monkeypatch.setenv(name, value)
    try:
        whole_sums.apply()
        assert "lt" in str(library()).lower()
        assert (getattr(matmul, splits), getattr(matmul, f"{splits}_split_k")) == (False, False)
    finally:
        library(preferred)
        setattr(matmul, splits, allowed)
