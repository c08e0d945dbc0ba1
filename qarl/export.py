"""`python -m qarl.export run=runs/NAME output=DIR key=value ...`: a checkpoint of a run as a model folder.

    run=runs/NAME         the run's folder
    output=DIR            where the model goes; must not exist or be empty, unless overwrite=true
    step=N                which checkpoint; default: the latest
    format=quantized      compressed-tensors by the run's quant.scheme, group_size and ignore (default): the bytes that
                          were published at that step
           bf16           the weights the forward saw, as an ordinary checkpoint
           fp32           the optimizer's FP32 masters (optim.master_dtype=fp32)
    max_shard_size=5GB    larger models are split into files of at most this size
    overwrite=true        replace an earlier export
    trust_remote_code=true  run code that the run's model brings along; the checkpoint itself cannot ask for that

Exit codes: 0; 2 if something is wrong, with one message.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qarl.checkpoint.export import export, read_request
from qarl.console import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Export as `argv` says; returns the exit code."""
    return run_command(_main, argv)


def _main(argv: list[str]) -> int:
    if not argv or set(argv) & {"-h", "--help"}:
        print(__doc__)
        return 0 if argv else 2
    print(export(read_request(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
