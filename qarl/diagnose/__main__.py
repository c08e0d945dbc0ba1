"""Show how far trainer and rollout differ for a run, and why.

usage: qarl diagnose config=NAME.yaml [KEY=VALUE ...]
       qarl diagnose runs/NAME [KEY=VALUE ...]
       qarl diagnose calibrate config=NAME.yaml [batches=6] [share=0.05] [KEY=VALUE ...]
       qarl diagnose greedy config=NAME.yaml [batch_sizes=1,2,4,8,16,64] [KEY=VALUE ...]
       qarl diagnose --help [SECTION | SECTION.KEY ...]

The arguments are those of qarl train; the folder of a run stands for its config.yaml. The command
samples one batch, as in the first step of that run, from the model that the run started from, and
does not train. It prints one response token by token, and the mismatch split by cause.
`python -m qarl.diagnose` is the same command.

calibrate samples several batches, and proposes thresholds for the corrections of a run: weights,
rejections, TBPO's cap and bands. Each would lose `share` of the responses (or tokens) to the
mismatch of a level, compared with level exact, which has none.

greedy answers the validation prompts several times, always with each position's likeliest token,
but with another number of prompts at a time. It prints how many answers differ, and the standard
deviation of the accuracy. Where rows of the engine's products do not depend on each other, both
are 0.

exit codes:
  0    what was asked for was measured
  2    the config, the data or the machine cannot be used; one message says why
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import sys
from importlib import import_module

from qarl.console import entry


def _main(argv: list[str]) -> int:
    from qarl.checks.exact_threads import run_threads
    from qarl.config import load_config
    from qarl.diagnose.arguments import REQUESTS, request_of
    from qarl.process import limit_threads

    command = argv[0] if argv[:1] and argv[0] in REQUESTS else None
    if command is None:
        config = load_config(argv)
        limit_threads(run_threads(config))
        from qarl.diagnose.diagnosis import diagnose

        diagnose(config)
        return 0
    request, argv = request_of(command, argv[1:])
    config = load_config(argv)
    limit_threads(run_threads(config))
    import_module(f"qarl.diagnose.{command}").run(config, request)
    return 0


def _help(topics: list[str]) -> str:
    """Return the help: this page and the config's sections, or help on the sections and keys in `topics`."""
    from qarl.config.help import config_help
    from qarl.diagnose.arguments import REQUESTS

    return config_help(__doc__ or "", [topic for topic in topics if topic not in REQUESTS])


main, describe = entry(_main, __doc__, _help)


if __name__ == "__main__":
    sys.exit(main())
