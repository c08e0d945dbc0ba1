"""`python -m qarl.doctor`, which makes every check of a run (`qarl.checks.run`) and more, and prints all findings.

Importing this package imports nothing. Call `qarl.doctor.report.run_checks`.
"""
