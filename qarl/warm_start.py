"""Make a tiny model, data and a config for a task of your own.

usage: qarl warm-start my_task.py [KEY=VALUE ...]

my_task.py has four functions, draw, prompt, answer and reward; docs/learn/own_task.md has an example of twenty
lines. A fifth, environment, makes it a task of several turns (docs/do/turns.md). A Qwen3 of 0.9M
parameters learns the task from scratch by supervised learning, until it writes
some answers right. In the working folder it writes models/tiny-MY_TASK, data/MY_TASK and MY_TASK.yaml,
which `qarl train config=MY_TASK.yaml` runs. A MY_TASK.yaml that exists stays as it is. If nothing has
changed since the last call, nothing is made. A model or data of other arguments, or of another text
of my_task.py, are replaced only with overwrite=true. `python -m qarl.warm_start` is the same command.

keys:
  target=0.3        greedy accuracy at which the warm start stops
  steps=600         most steps of the warm start
  train_size=4000   rows of data/MY_TASK/train.parquet
  test_size=512     rows of data/MY_TASK/test.parquet
  seed=0
  experts=0         number of experts; 0 is a dense model
  overwrite=false   true: replace a model and data that were made otherwise

exit codes:
  0    model, data and config are there
  2    the file is not a task, or a folder cannot be used; one message says why
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import sys

from qarl.console import entry
from qarl.process import limit_threads


def _main(argv: list[str]) -> int:
    limit_threads(1)  # a model this small is no faster on two
    from qarl.config.command_arguments import read_request
    from qarl.demo.own_task import WarmStart, make_own

    example = "qarl warm-start my_task.py"
    config = make_own(read_request(WarmStart, argv, example=example, positional="file"))
    print(f"now: qarl train config={config}")
    return 0


main, describe = entry(_main, __doc__)


if __name__ == "__main__":
    sys.exit(main())
