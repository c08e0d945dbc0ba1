"""`python -m qarl.diagnose`: how far trainer and rollout differ, and why."""
