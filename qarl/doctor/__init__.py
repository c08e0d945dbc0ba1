"""The checks of `python -m qarl.doctor`, which find problems of a run before it starts.

Each topic has one file. Each finding says what was found and, if something is wrong, what to change. Checks that
training also makes (`qarl.checks.layers`, `qarl.trainer.setup`, ...) are called, not copied.

Importing this package imports nothing. Call `qarl.doctor.run.run_checks`.
"""
