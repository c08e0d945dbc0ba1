"""The checks behind `python -m qarl.doctor`: everything about a run that can be known before it starts.

Each topic has one file. Each finding says what was found and, if something is wrong, what to change. The doctor calls
the checks that training makes itself (`qarl.checks.layers`, `qarl.trainer.setup`, `qarl.data`, ...) instead of
repeating them.

Importing this package imports nothing; call `qarl.doctor.run.run_checks`.
"""
