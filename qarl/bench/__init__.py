"""The benchmark: `python -m qarl.bench kernels | steps | rollout | trainer | publish | plan`."""
