"""`python -m qarl.bench steps | rollout | trainer | publish`: seconds of the trainer and engine themselves."""
