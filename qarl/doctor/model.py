"""Checks the model folder: config, tokenizer, vocabulary, positions, weights."""

from __future__ import annotations

from pathlib import Path

from qarl.align.families import FAMILIES, check_family, check_rows, shown_mismatch
from qarl.checks import lengths, model_folder, stops, weight_files
from qarl.checks import model as model_checks
from qarl.checks.memory import readable
from qarl.checks.model_size import ModelSize
from qarl.data import check_vocabulary
from qarl.doctor.context import Context, NotCheckedError
from qarl.doctor.findings import Topic


def check_config(context: Context, topic: Topic) -> None:
    """Whether the model's config can be read and describes a model that can be trained."""
    hf_config = context.hf_config.load()
    if context.no_model is not None:
        topic.refusal(context.no_model, "error" if context.target.here else "note")
        topic.warning(
            f"QaRL's own copy of the config of {context.config.model.path} is used instead",
            why="sizes, memory and kernels are those of the public model; your own config may differ",
            fix="run the doctor where the model is, or give its folder",
        )
    model_checks.check_not_quantized(context.config, hf_config)
    model_checks.check_served(hf_config)
    topic.passes(check_family, hf_config)  # the other topics are still worth a look
    topic.passes(check_rows, hf_config, context.config.model.use_remove_padding)
    count = sum(parameter.numel() for parameter in context.model.load().parameters())
    in_words = f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.2f} million"
    topic.ok(f"{hf_config.model_type} with {in_words} parameters, from {context.config.model.path}")
    if shown := shown_mismatch(hf_config):
        topic.warning(
            shown,
            why=f"only {', '.join(FAMILIES)} models are aligned, and tested against a fresh vLLM after an export",
            fix="watch mismatch/k3 in the first steps, and compare an export with the run before you rely on it",
        )


def check_sizes(context: Context, topic: Topic) -> None:
    """Whether the memory estimate counts the model's parameters correctly."""
    size: ModelSize = context.size.get()
    count = sum(parameter.numel() for parameter in context.model.get().parameters())
    if size.parameters != count:
        topic.note(
            f"the memory estimate counts {size.parameters:,} parameters, but the model has {count:,}",
            why="the estimate knows only Llama-like blocks and Qwen3's experts, and this model has other parts",
            fix="allow for the difference when you read the memory estimate",
        )


def check_tokenizer(context: Context, topic: Topic) -> None:
    """Whether the model has a tokenizer with a chat template."""
    context.hf_config.get()
    if context.is_folder and not context.target.here:
        try:
            model_folder.check_tokenizer_files(context.config.model.path)
        except Exception as error:
            fix = "copy a tokenizer into the folder there, and also into this one if you want it checked here"
            raise NotCheckedError("the folder has no tokenizer; the machine of the run needs one", fix) from error
    tokenizer = context.tokenizer.load()
    if getattr(tokenizer, "chat_template", None):
        topic.ok(f"tokenizer with {len(tokenizer)} entries and a chat template")


def check_stops(context: Context, topic: Topic) -> None:
    """Whether tokenizer and model agree about where a response ends."""
    tokenizer, hf_config = context.tokenizer.get(), context.hf_config.get()
    warnings = stops.check_stops(context.config.model.path, tokenizer, hf_config)
    for warning in warnings:
        topic.warning(
            warning,
            where="eos_token of tokenizer_config.json; eos_token_id of generation_config.json and config.json",
            why="vLLM stops at the tokenizer's EOS and at the EOS ids of the model's config",
            fix="take these files from the same model",
        )
    if not warnings:
        topic.ok(
            f"model and tokenizer agree: responses end at {tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)!r}"
        )


def check_vocab(context: Context, topic: Topic) -> None:
    """Whether model and tokenizer have the same number of token ids."""
    vocab = context.hf_config.get().vocab_size
    unused = check_vocabulary(context.tokenizer.get(), vocab, max_unused=vocab // 100)
    if unused:
        topic.note(
            f"{unused} of the model's {vocab} token ids are not in the tokenizer",
            why="verl masks these ids in vLLM but not in its trainer. A trained model gives them little probability, "
            "but the log-probs of an untrained model are shifted",
            fix="nothing to do for a trained model; for an untrained one, resize the embeddings to the tokenizer",
        )
    else:
        topic.ok(f"model and tokenizer have the same {vocab} token ids")


def check_lm_head(context: Context, topic: Topic) -> None:
    """Whether lm_head is tied to the embedding."""
    if getattr(context.hf_config.get(), "tie_word_embeddings", False):
        topic.ok("lm_head is tied to the input embedding: it stays in BF16 and is published once, as the embedding")
    else:
        topic.ok("lm_head is a separate tensor and stays in BF16")


def check_positions(context: Context, topic: Topic) -> None:
    """Whether prompt and response fit the model's positions."""
    hf_config, data = context.hf_config.get(), context.config.data
    lengths.check_length(context.config, hf_config)
    wanted = data.max_prompt_length + data.max_response_length
    topic.ok(f"{wanted} of {getattr(hf_config, 'max_position_embeddings', 'unlimited')} positions are used")


def check_weights(context: Context, topic: Topic) -> None:
    """Whether the weights are complete and belong to this model."""
    path, trust = context.config.model.path, context.config.model.trust_remote_code
    hf_config = context.hf_config.get()
    if not context.is_folder:
        size = readable(2 * context.size.get().parameters)
        why = f"{path} is a name on the Hub, and its BF16 weights are a download of {size}"
        raise NotCheckedError(why, "download the model and set model.path to its folder")
    if not weight_files.has_weights(path):
        if not context.target.here:
            why = "the folder holds no weights; the machine of the run needs them"
            raise NotCheckedError(why, "run the doctor there too")
        raise weight_files.cannot_load(path, "it holds neither *.safetensors nor *.bin files")
    weight_files.check_weight_files(path)
    weight_files.check_tied(path, hf_config, trust_remote_code=trust)
    compared = weight_files.check_stored_tensors(path, hf_config, trust_remote_code=trust)
    if compared is None:
        files = len(list(Path(path).glob("*.safetensors")))
        topic.note(
            f"the tensor names in {files} safetensors files differ from the model's, so shapes were not compared",
            fix="make sure that the files belong to this config.json",
        )
    else:
        topic.ok(f"{compared} stored tensors have the shapes that config.json says")


CHECKS = (
    check_config,
    check_sizes,
    check_tokenizer,
    check_stops,
    check_vocab,
    check_lm_head,
    check_positions,
    check_weights,
)
