"""`python -m qarl.bench steps | rollout | trainer | publish`: measure the seconds that trainer and engine take."""
