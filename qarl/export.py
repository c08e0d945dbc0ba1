"""Write a checkpoint of a run as a model folder that vLLM can load.

usage: qarl export run=runs/NAME output=DIR [KEY=VALUE ...]

keys:
  run=runs/NAME           the folder of a run (local or verl backend)
  output=DIR              the folder to write; must be missing or empty, unless overwrite=true
  step=N                  the step of the checkpoint; default: the latest
  step=best               that of the best evaluation, which trainer.save_best keeps
  format=quantized        (default) the bytes that were published at that step, as a
                          compressed-tensors checkpoint with the run's quant keys
  format=bf16             the weights that the forward used, as an ordinary checkpoint
  format=fp32             the optimizer's FP32 masters (needs optim.master_dtype=fp32)
  overwrite=true          replace an earlier export, and no other folder; default: false
  trust_remote_code=true  run the code that comes with the run's model; default: false

A run with adapters (lora.r) has only format=quantized: the base, and the adapter in DIR/adapter.

transformers loads the folder too, unless it has quantized experts (format=quantized of a mixture of
experts in w4a16, w8a8 or fp8). The checkpoint is verified by its digests or checksums, and its files
are never changed. Tensors are streamed, one shard at a time. The folder appears complete or not at
all. If the disk is full, there is an error and no partial folder is left. `python -m qarl.export` is
the same command.

exit codes:
  0    the folder was written
  2    the arguments, the checkpoint or the disk cannot be used; one message says why
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import sys

from qarl.console import entry


def _main(argv: list[str]) -> int:
    from qarl.checkpoint.export import ExportRequest, export
    from qarl.config.command_arguments import read_request

    print(export(read_request(ExportRequest, argv, example="qarl export run=runs/NAME output=DIR")))
    return 0


main, describe = entry(_main, __doc__)


if __name__ == "__main__":
    sys.exit(main())
