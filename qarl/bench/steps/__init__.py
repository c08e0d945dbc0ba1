"""A training step in parts, per quantization scheme: `python -m qarl.bench steps | rollout | trainer | publish`."""
