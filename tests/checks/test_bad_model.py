"""Unusable model folders, and layers that the scheme or the engine cannot hold: refused as in `test_bad_input.py`."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bad_runs import (
    SPLIT_GROUPS,
    EngineConstructed,
    Refusal,
    edit_model_config,
    refuses,
)
from cpu_features import needs_vllm_cpu
from random_models import save_random_model
from safetensors.torch import load_file, save_file

from qarl.checks import kernels, layers, lengths, machine
from qarl.checks.model_folder import load_hf_config
from qarl.config import load_config
from qarl.errors import UserError
from qarl.process import configure_vllm_process
from qarl.train import main

pytestmark = pytest.mark.usefixtures("startable_run")


# The model folder.


def test_missing_model_folder(refusal: Refusal) -> None:
    refusal("model.path=models/none", words=["models/none", "model.path"])


def test_model_without_config(refusal: Refusal) -> None:
    Path("model/config.json").unlink()
    refusal(words=["'model'", "model.path", "config.json"])


def test_model_config_that_contradicts_itself(refusal: Refusal) -> None:
    edit_model_config(num_hidden_layers=3)
    refusal(words=["'model'", "model.path", "`num_hidden_layers` (3) must be equal"])


def test_weights_of_another_size_than_the_config_says(refusal: Refusal) -> None:
    edit_model_config(intermediate_size=128)
    refusal(words=["cannot be built from its weights", "'model'", "model.path"])


def test_model_without_tokenizer(refusal: Refusal) -> None:
    for path in Path("model").glob("tokenizer*"):
        path.unlink()
    refusal(words=["no tokenizer", "'model'", "tokenizer.json"])


def test_model_without_weights(refusal: Refusal) -> None:
    Path("model/model.safetensors").unlink()
    refusal(words=["cannot be loaded", "model.path", "safetensors"])


def test_weights_that_lack_a_tensor(refusal: Refusal) -> None:
    file = Path("model/model.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    refusal(words=["lacks 1 tensors", "model.layers.1.mlp.up_proj.weight", "random numbers"])


def test_tied_weights_that_differ(refusal: Refusal) -> None:
    """Equal ones are no fault: transformers ties them."""
    file = Path("model/model.safetensors")
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"].clone()
    edit_model_config(tie_word_embeddings=True)
    save_file(tensors | {"lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})
    refusal(words=["ties lm_head.weight to model.embed_tokens.weight", "different tensors", "tie_word_embeddings"])
    save_file(tensors | {"lm_head.weight": embedding}, file, metadata={"format": "pt"})
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml"])


@pytest.mark.parametrize(("file", "word"), [("adapter_config.json", "an adapter"), ("model.gguf", "a GGUF file")])
def test_a_folder_that_is_no_model(refusal: Refusal, file: str, word: str) -> None:
    Path("model/config.json").rename(Path("model") / file)
    refusal(words=[word, "not a model", "model.path"])


def test_weights_cut_short(refusal: Refusal) -> None:
    path = Path("model/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1000])
    refusal(words=["model/model.safetensors", "cut short"])


@pytest.mark.parametrize(("vocab_size", "why"), [(128, "masked in the rollout"), (48, "no embedding")])
def test_vocabularies_that_do_not_match(refusal: Refusal, vocab_size: int, why: str) -> None:
    edit_model_config(vocab_size=vocab_size)
    refusal(words=["64 entries", f"vocab_size is {vocab_size}", why])


def test_a_padded_vocabulary_is_no_fault() -> None:
    """Qwen's own checkpoints have 0.2% more embeddings than tokens."""
    shutil.rmtree("model")
    save_random_model(Path("model"), vocab_size=200)
    tokenizer = json.loads(Path("model/tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["t199"]
    Path("model/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml"])


def test_tokenizer_without_chat_template(refusal: Refusal) -> None:
    Path("model/chat_template.jinja").unlink()
    refusal(words=["chat template", "model"])


def test_kv_cache_that_holds_no_sequence(refusal: Refusal) -> None:
    words = [
        "rollout.cpu_kvcache_space_gib=0.0001",
        "is too small for one sequence of 32 tokens",
        "set it to at least 0.001",
    ]
    refusal("rollout.cpu_kvcache_space_gib=0.0001", words=words)


@needs_vllm_cpu
def test_the_kv_cache_is_counted_as_vllm_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.29 counts it. 0.24 did not count the block that it keeps free."""
    configure_vllm_process()
    from vllm.v1.core.kv_cache_utils import check_enough_kv_cache_memory
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    hf_config = load_hf_config("model")
    spec = FullAttentionSpec(block_size=lengths.KV_BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    specs = {f"layer{i}": spec for i in range(2)}
    for response in (1, 112, 113, 300):
        vllm_config = fake_vllm_config(16 + response)
        for size in range(1, 6 * len(specs) * spec.page_size_bytes, 8191):
            gib = f"rollout.cpu_kvcache_space_gib={size / 2**30!r}"
            config = load_config(["config=run.yaml", f"data.max_response_length={response}", gib])
            theirs = refuses(lambda: check_enough_kv_cache_memory(vllm_config, specs, size), ValueError)  # noqa: B023  called at once
            assert refuses(lambda: lengths.check_kv_cache(config, hf_config), UserError) == theirs  # noqa: B023  called at once
    monkeypatch.setattr(lengths, "runs_on_cpu", lambda backend: False)
    lengths.check_kv_cache(config, hf_config)


def fake_vllm_config(max_model_len: int) -> Any:
    """The attributes that vLLM's count of a cache reads."""
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(block_size=lengths.KV_BLOCK, num_gpu_blocks_override=None),
    )


def test_more_tokens_than_positions(refusal: Refusal) -> None:
    words = ["data.max_prompt_length", "data.max_response_length", "1016", "512 positions"]
    refusal("data.max_response_length=1000", words=words)


@pytest.mark.parametrize("scheme", ["w4a16", "bf16"])
def test_model_that_is_already_quantized(refusal: Refusal, scheme: str) -> None:
    edit_model_config(quantization_config={"quant_method": "gptq", "bits": 4})
    refusal(f"quant.scheme={scheme}", words=["already quantized (gptq)", "BF16 master weights", "model.path"])


# Layers that the scheme or the engine cannot hold.


@pytest.mark.parametrize("align", ["linears", "off"])
def test_group_size_that_does_not_divide_the_layers(refusal: Refusal, align: str) -> None:
    words = ["quant.group_size=64", "2 of 14 layers", "model.layers.0-1.mlp.down_proj", "these layers have 96 inputs"]
    message = refusal("quant.group_size=64", f"quant.align={align}", words=words)
    assert "gate_proj" not in message
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", "quant.group_size=64", 'quant.ignore=[lm_head, "re:.*down_proj"]'])


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ({"hidden_size": 64, "intermediate_size": 80}, ["model.layers.0-1.mlp.down_proj", "[64, 80]"]),
        (
            {"hidden_size": 64, "intermediate_size": 72},
            ["model.layers.0-1.mlp.gate_proj", "model.layers.0-1.mlp.up_proj", "[72, 64]"],
        ),
        ({"hidden_size": 40}, ["model.layers.0-1.self_attn.q_proj", "model.layers.0-1.self_attn.o_proj"]),
    ],
    ids=["K", "N of a fused layer", "hidden"],
)
def test_sizes_that_the_engines_kernel_refuses(refusal: Refusal, sizes: dict[str, int], layers: list[str]) -> None:
    edit_model_config(**sizes)
    words = ["multiples of 32", "quant.ignore", *layers]
    message = refusal("quant.group_size=8", words=words)
    if "intermediate_size" in sizes:
        assert "self_attn" not in message
        assert ("mlp.up_proj" in message) == ((2 * sizes["intermediate_size"]) % 32 != 0)


@pytest.mark.parametrize("missing", [["avx512_vnni"], ["avx512f", "avx512_vnni"]])
def test_cpu_without_the_kernels_instructions(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    flags = {"avx2", *machine.W4A16_CPU_FLAGS} - set(missing)
    monkeypatch.setattr(machine, "cpu_flags", lambda: flags)
    refusal(words=["quant.scheme", f"lacks {' and '.join(missing)}", "quant.scheme=bf16"])
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", "quant.scheme=bf16"])
    monkeypatch.setattr(machine, "runs_on_cpu", lambda backend: False)
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml"])


def test_own_kernels_that_this_machine_has_not(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for scheme in ("w4a16", "w8a8", "fp8"):
        words = ["quant.kernels=qarl", f"quant.scheme={scheme}", "runs on GPUs, not on cpu", "quant.kernels=engine"]
        refusal(f"quant.scheme={scheme}", "quant.kernels=qarl", words=words)
    own = {"w4a8": "qarl", "w4a16": "dequantized"}
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx2"})
    refusal("quant.scheme=w4a8", "quant.kernels=qarl", words=["lacks avx512_vnni"])
    with pytest.raises(EngineConstructed):  # a BF16 product needs no instruction of its own
        main(["config=run.yaml", "quant.kernels=dequantized"])
    monkeypatch.setattr(kernels, "runs_on_cpu", lambda backend: False)
    monkeypatch.setattr(machine, "runs_on_cpu", lambda backend: False)
    for scheme, name in own.items():
        words = [
            "quant.kernels",
            f"quant.scheme={scheme}",
            "rounds activations" if scheme == "w4a8" else "only on a CPU",
        ]
        refusal(f"quant.scheme={scheme}", f"quant.kernels={name}", words=words)


def test_own_kernels_are_for_dense_models() -> None:
    config = load_config(["config=run.yaml", "quant.kernels=dequantized"])
    kernels.check_dense(config, SimpleNamespace(num_experts=None))
    with pytest.raises(UserError, match=r"(?s)dequantized does not support a mixture of experts.*dense"):
        kernels.check_dense(config, SimpleNamespace(num_experts=4))


def test_each_scheme_asks_for_what_it_needs(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal("quant.scheme=w4a8", words=["quant.scheme", "its W4A16 kernel with BF16 activations", "quant.kernels=qarl"])
    monkeypatch.setattr(layers, "W4A16_CPU_MULTIPLE", 1000)
    refusal("quant.scheme=w4a16", words=["multiples of 1000"])
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx512_vnni"})
    for scheme in ("w8a8", "fp8"):
        with pytest.raises(EngineConstructed):
            main(["config=run.yaml", f"quant.scheme={scheme}"])
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx512f"})
    refusal("quant.scheme=w8a8", words=["lacks avx512_vnni", "int8 products"])
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", "quant.scheme=fp8"])


@pytest.mark.parametrize(("ignore", "words"), SPLIT_GROUPS.values(), ids=SPLIT_GROUPS)
def test_ignore_that_the_engine_cannot_follow(refusal: Refusal, ignore: list[str], words: list[str]) -> None:
    refusal(f"quant.ignore={json.dumps(['lm_head', *ignore])}", words=["quant.ignore", *words])


@pytest.mark.parametrize(
    ("entry", "pattern"), [("down_proj", "re:.*[.](down_proj)$"), ("k_proj", "re:.*[.](q_proj|k_proj|v_proj)$")]
)
def test_ignore_that_names_only_the_end_of_a_linear(refusal: Refusal, entry: str, pattern: str) -> None:
    """The pattern that it suggests is taken."""
    refusal(f"quant.ignore=[lm_head, {entry}]", words=[f"{entry} names no linear", pattern])
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", f"quant.ignore={json.dumps(['lm_head', pattern])}"])


def test_a_whole_fused_group_can_be_ignored() -> None:
    with pytest.raises(EngineConstructed):
        main(["config=run.yaml", 'quant.ignore=[lm_head, "re:.*self_attn[.][qkv]_proj"]'])


def test_the_checks_refuse_what_vllm_refuses() -> None:
    """Fused layers as vLLM fuses them, ignore lists it cannot follow, sizes its kernel for CPUs cannot take."""
    configure_vllm_process()
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
    from vllm.platforms import current_platform

    fused_layers = {fused: list(parts) for fused, parts in layers.FUSED_LAYERS.items()}
    for family in (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM):
        assert family.packed_modules_mapping == fused_layers

    parts = [f"model.layers.0.self_attn.{part}" for part in fused_layers["qkv_proj"]]
    for count in range(4):
        for ignore in itertools.combinations(parts, count):
            engine = functools.partial(
                should_ignore_layer, "model.layers.0.self_attn.qkv_proj", ignore, fused_mapping=fused_layers
            )
            ours = functools.partial(layers.check_fused_layers, parts, ignore)
            assert refuses(ours, UserError) == refuses(engine, ValueError), ignore

    if not current_platform.is_cpu():
        pytest.skip("vLLM's kernel for CPUs answers on a CPU only")
    import torch
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    for n, k in itertools.product((16, 32, 40, 64, 96), repeat=2):
        layer = MPLinearLayerConfig((k, n), (k, n), scalar_types.uint4b8, torch.bfloat16, 8, False, False)
        ours = functools.partial(layers.check_engine_shapes, {"down_proj": (n, k)})
        assert refuses(ours, UserError) != CPUWNA16LinearKernel.can_implement(layer)[0], (n, k)


def test_layers_are_named_by_ranges_of_their_numbers() -> None:
    names = [f"model.layers.{i}.mlp.up_proj" for i in (0, 1, 2, 5, 11, 10)] + ["score"]
    assert layers.name_layers(names) == "model.layers.0-2,5,10-11.mlp.up_proj, score"
