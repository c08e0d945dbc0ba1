"""A tokenizer with the traps of real ones, small enough to be read.

Byte-level pairs as in SmolLM2, with its three special tokens, a chat template that inserts a system message, a pad
token that is also the end token, pieces of white space before a digit, and a vocabulary that lacks a byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SYSTEM = "You are a helpful assistant"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\n" + SYSTEM + "<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n"
    "{{ m['content'] }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's, with the answers of tools in a turn of the user."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MISSING_BYTE = "\x04"
"""SmolLM2's vocabulary lacks it, too."""
MERGES = ((" ", " "), ("\n", "\n"), ("d", "o"), ("do", "n"), ("'", "t"), (" ", "x"))


def save_chat_tokenizer(folder: Path) -> Path:
    """Write the tokenizer to `folder`, and return it. Ids 0 to 2 are `SPECIAL`."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    names = {
        text: shown(text) for text in {MISSING_BYTE, *(part for pair in MERGES for part in pair)}
    }
    alphabet = [byte for byte in sorted(ByteLevel.alphabet()) if byte != names[MISSING_BYTE]]
    merges = [(names[left], names[right]) for left, right in MERGES]
    words = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return folder


def shown(text: str) -> str:
    """Return ASCII `text` as byte-level vocabularies spell it: a space is `Ġ`."""
    from tokenizers.pre_tokenizers import ByteLevel

    ((word, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return str(word)
