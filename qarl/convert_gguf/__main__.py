"""Make a model folder, with BF16 weights, of a GGUF file.

usage: qarl convert-gguf FILE FOLDER

FOLDER gets config.json, generation_config.json, model.safetensors, the tokenizer and its chat template. QaRL, vLLM and
transformers load it like any other model. The command then prints what differs from the model that the file was made
of: the types to which its weights were rounded, and the tokens that transformers' own conversion gets wrong.
FOLDER/gguf_conversion.json records the same. Models of the families that QaRL trains are converted, from one file.

The package gguf is needed. It comes with `make smollm2`, and without it the command says how to install it.
`python -m qarl.convert_gguf` is the same command.

exit codes:
  0    the folder was written
  2    the file, the folder or the disk cannot be used; one message says why, and nothing was written
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import sys

from qarl.console import entry

EXAMPLE = "qarl convert-gguf FILE FOLDER"
KEYS = ("file", "folder")


def _main(argv: list[str]) -> int:
    from qarl.config.command_arguments import read_request
    from qarl.convert_gguf.convert import ConversionRequest, check, convert
    from qarl.side_packages import require

    request = read_request(ConversionRequest, named(argv), example=EXAMPLE)
    check(request)
    require("gguf", needed_for="qarl convert-gguf")
    print(convert(request))
    return 0


def named(argv: list[str]) -> list[str]:
    """Return `argv` with the keys of its first two words that have none: FILE is file=FILE, FOLDER is folder=FOLDER."""
    keys = list(KEYS)
    arguments = []
    for word in argv:
        if "=" not in word and keys:
            word = f"{keys.pop(0)}={word}"
        arguments.append(word)
    return arguments


main, describe = entry(_main, __doc__)


if __name__ == "__main__":
    sys.exit(main())
