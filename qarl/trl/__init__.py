"""TRL's GRPO with quantized rollouts: `QaRLConfig` and `QaRLTrainer` replace `GRPOConfig` and `GRPOTrainer`.

    from qarl.trl import QaRLConfig, QaRLTrainer

docs/trl.md says what changes for a TRL user. Importing this package does not import TRL; using a name does.
"""

from __future__ import annotations

from qarl.lazy import exporter

__getattr__ = exporter(__name__, {"config": ["QaRLConfig"], "trainer": ["QaRLTrainer"]})
