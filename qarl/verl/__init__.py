"""The verl backend: QaRL's loss, engine, trainer and receiver of weights, and the way to start a run.

verl loads `entry_point.py`. `run.py` starts a run from QaRL's config. The folders `qarl`, `qarl_loss` and
`qarl_machine` are groups of Hydra for verl's own command line (docs/do/verl.md). Nothing here changes a run of that
command line unless its configuration asks for it.
"""
