"""QaRL: reinforcement learning of language models with low-bit rollouts and a trainer aligned to them.

Importing this package does not import torch, vllm or verl. Start with `python -m qarl.train config=quickstart.yaml`.
"""

__version__ = "0.2.0"
