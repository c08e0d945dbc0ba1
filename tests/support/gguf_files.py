"""Small GGUF files of a random Llama, written by the package gguf as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from chat_tokenizers import save_chat_tokenizer

HEADS = 4
LAYERS = 2
HIDDEN = 64


def random_llama(words: int) -> Any:
    """A Llama with untied embeddings, whose weights are BF16 numbers held in FP32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # and not the buffers of the rotary embedding
        parameter.data = parameter.data.bfloat16().float()
    return model


def write_gguf(
    path: Path,
    *,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    template: str | None = None,
    user_words: tuple[str, ...] = (),
    token_types: bool = True,
) -> Any:
    """Write a random Llama with the tokenizer of `chat_tokenizers` to `path`, and return the Llama.

    kind: the type of its matrices. metadata: more or other keys. tensors: more tensors. template: another one.
    user_words: tokens at the end of the vocabulary, of the type that llama.cpp calls user-defined. token_types: whether
    the file says of which type its tokens are."""
    import gguf
    from gguf.quants import quantize
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(save_chat_tokenizer(path.with_suffix(".words")))
    model = random_llama(len(tokenizer) + len(user_words))
    values = dict(metadata or {})
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "llama"))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokenizer) + len(user_words))
    write_tokenizer(
        writer, tokenizer, template or tokenizer.chat_template, user_words, types=token_types
    )
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in values.items():
        adders[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    stored = gguf.GGMLQuantizationType[kind]
    for name, parameter in model.state_dict().items():
        target = names.get_name(name, try_suffixes=(".weight",))
        array = as_llama_cpp(name, parameter).numpy()
        if array.ndim == 2:
            writer.add_tensor(target, quantize(array, stored), raw_dtype=stored)
        else:
            writer.add_tensor(target, array)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_tokenizer(
    writer: Any, tokenizer: Any, template: str, user_words: tuple[str, ...], *, types: bool
) -> None:
    """Add the keys `tokenizer.*`: special tokens have type 3, others 1. The end is 2, and no pad token is named."""
    import json

    backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    words = sorted(backend["vocab"], key=backend["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*words, *user_words])
    if types:
        writer.add_token_types([3, 3, 3] + [1] * (len(words) - 3) + [4] * len(user_words))
    writer.add_token_merges([" ".join(pair) for pair in backend["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(template)


def as_llama_cpp(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of queries and keys in llama.cpp's order: the two halves of a head's rotary pairs alternate.

    Source: `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    heads = {"q_proj": HEADS, "k_proj": HEADS // 2}
    for part, count in heads.items():
        if part in name:
            pairs = weight.reshape(count, 2, weight.shape[0] // count // 2, weight.shape[1])
            return pairs.swapaxes(1, 2).reshape(weight.shape).contiguous()
    return weight
