"""Show how far trainer and rollout differ for a run, and why.

usage: qarl diagnose config=NAME.yaml [KEY=VALUE ...]
       qarl diagnose --help [SECTION | SECTION.KEY ...]

The arguments are those of qarl train. The command samples one batch, as in the first step of that
run, but does not train the model. It prints one response token by token, and the mismatch split by
cause. `python -m qarl.diagnose` is the same command.

exit codes:
  0    the mismatch was measured
  2    the config, the data or the machine cannot be used; one message says why
  130  ended by Ctrl-C
"""

from __future__ import annotations

import sys

from qarl.console import entry


def _main(argv: list[str]) -> int:
    from qarl.config import load_config
    from qarl.process import limit_threads

    config = load_config(argv)
    limit_threads(config.trainer.num_threads)
    from qarl.diagnose.diagnosis import diagnose

    diagnose(config)
    return 0


def _help(topics: list[str]) -> str:
    """Return the help: this page and the config's sections, or help on the sections and keys in `topics`."""
    from qarl.config.help import config_help

    return config_help(__doc__ or "", topics)


main, describe = entry(_main, __doc__, _help)


if __name__ == "__main__":
    sys.exit(main())
