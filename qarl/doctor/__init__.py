"""The checks behind `python -m qarl.doctor`: everything about a run that can be known before it starts.

Each topic has one file. Each finding says what was found and, if something is wrong, what to change. Where training
already has a check (`qarl.checks.layers`, `qarl.trainer.setup`, ...), the doctor calls it and does not reimplement it.

Importing this package imports nothing; call `qarl.doctor.run.run_checks`.
"""
