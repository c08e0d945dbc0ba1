"""TRL's GRPO with quantized rollouts: `QaRLConfig` and `QaRLTrainer` replace `GRPOConfig` and `GRPOTrainer`.

    from qarl.trl import QaRLConfig, QaRLTrainer

docs/lookup/trl.md says what changes for a TRL user. Importing this package does not import TRL; using a name does.
"""

from __future__ import annotations

from typing import Any

from qarl.lazy import exporter

_exported = exporter(__name__, {"config": ["QaRLConfig"], "trainer": ["QaRLTrainer"]})


def __getattr__(name: str) -> Any:
    try:
        return _exported(name)
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        what = "TRL is not installed: pip install 'qarl[trl]' in an environment without verl (docs/learn/trl.md)"
        raise ModuleNotFoundError(what, name="trl") from error
