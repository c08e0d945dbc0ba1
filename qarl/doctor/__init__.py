"""The checks behind `python -m qarl.doctor`: everything about a run that can be known before it starts.

One file a topic. Each finding says what was found and, if that is not fine, what to change. Checks that training
itself makes (`qarl.checks.layers`, `qarl.trainer.setup`, `qarl.data`, ...) are called, not written again.

Importing this package imports nothing; `qarl.doctor.run.run_checks` is the way in.
"""
