"""`python -m qarl.doctor`, which makes every check of a run (`qarl.checks.registry`) and more, and prints all findings.

Importing this package imports nothing. Call `qarl.doctor.examination.run_checks`.
"""
