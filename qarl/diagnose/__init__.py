"""`python -m qarl.diagnose`: measure how far trainer and rollout differ, and find out why."""
