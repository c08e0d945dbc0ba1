"""Exported checkpoints against the trainer they came from: published bytes, a vLLM of its own, stock transformers."""

from __future__ import annotations

import pytest
from cpu_features import needs_w4a16_cpu

from benchmarks.proofs.publish import exported_row

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]

# Mean |difference| to stock transformers, which rounds norms, rotary embedding and attention elsewhere and multiplies
# in BF16: 1.5e-3 without any quantization, 5e-3 where activations are quantized too. A wrong scale would be near 1.
TRANSFORMERS_MEAN = {"w4a16": 5e-3, "w8a8": 1e-2, "fp8": 2e-2}


@pytest.mark.timeout(
    1800
)  # vLLM multiplies e4m3 by oneDNN's reference code where a CPU has no other: minutes
@pytest.mark.parametrize("scheme", TRANSFORMERS_MEAN)
def test_an_exported_checkpoint_is_the_trainers_model_everywhere(scheme):
    row = exported_row(scheme, 16)
    assert row["tokens"] > 300
    assert row["published"], "the exported bytes are not those that were published"
    assert row["exact"]["max"] == 0, "vLLM and the trainer's forward on the engine's own operators"
    assert 0 < row["transformers"]["mean"] <= TRANSFORMERS_MEAN[scheme]
