"""The folder of a run that never ran: metrics, samples, warnings, config, versions and summary of any length."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from qarl.report.samples import append_samples, is_logged, make_sample

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)> <!-- & \u2028 @@DATA@@ 漢"
PHASES = ("rollout", "reward", "old_log_prob", "update", "quantize", "publish")
OTHER_METRICS = 60


def metrics_of(step: int) -> dict[str, Any]:
    """Return numbers that look like those of a run: a learning curve, a heavy tail, NaN now and then."""
    wave = math.sin(step * 12.9898) * 43758.5453 % 1.0
    found: dict[str, Any] = {
        "critic/score/mean": 0.3 + 0.5 * (1 - math.exp(-step / 120)) + 0.05 * wave,
        "mismatch/k3": 1e-4 * (1 + wave) * (100 if step % 97 == 0 else 1),
        "mismatch/abs_mean": 3e-3 * (1 + wave),
        "mismatch/abs_p99": 2e-2 * (1 + wave),
        "mismatch/abs_max": 0.3 * (1 + wave),
        "actor/pos_outside_band_frac_after_first": 0.04 * wave,
        "actor/neg_outside_band_frac_after_first": 0.08 * wave,
        "actor/seq_ratio_max": 1 + 0.01 * wave,
        "actor/seq_ratio_min": 1 - 0.01 * wave,
        "actor/grad_norm": "nan" if step % 100 == 50 else 0.5 + wave,
        "actor/lr": 1e-4,
        "response_length/mean": 120 + 10 * wave,
        "response_length/max": 160,
        **{f"timing_s/{phase}": 0.3 * (1 + wave) * (place + 1) for place, phase in enumerate(PHASES)},
        **{f"part{place % 5}/metric_{place}": place + wave for place in range(OTHER_METRICS)},
    }
    if step % 40 == 0:
        found["val/accuracy"] = 0.3 + 0.001 * step
    return found


def make_run(folder: Path, steps: int, *, tokens: int = 600, finished: bool = True) -> Path:
    """Write a run folder of `steps` steps. Each logged step has three responses of `tokens` tokens of hostile text."""
    folder.mkdir(parents=True)
    entries = [{"step": 0, "val/accuracy": 0.3}] + [{"step": step} | metrics_of(step) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for step in range(1, steps + 1):
        if is_logged(step, steps):
            append_samples(folder, [sample(step, row, tokens) for row in range(3)])
    (folder / "config.yaml").write_text(
        f"name: made-up\nnote: {HOSTILE!r}\ntrainer:\n  total_training_steps: {steps}\n"
    )
    (folder / "versions.json").write_text(json.dumps({"git_commit": "0" * 40, "packages": {"qarl": HOSTILE}}))
    warning = {"sign": "entropy", "since_step": steps // 2, "text": HOSTILE, "remedy": "lower optim.lr"}
    (folder / "warnings.jsonl").write_text(json.dumps(warning) + "\nnot json\n")
    if finished:
        summary = {"finished": True, "failed": None, "steps": steps, "note": HOSTILE}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def sample(step: int, row: int, tokens: int) -> dict[str, Any]:
    """Return one line of samples.jsonl, with a token of every strength and sign of δ."""
    strengths = (0.0, 2e-5, -3e-4, 4e-3, -5e-2, 0.7)
    pieces = (HOSTILE, "1", "+", " ", "\n", "<b>")
    return make_sample(
        step,
        f"prompt {row} {HOSTILE}",
        [place % len(pieces) for place in range(tokens)],
        [strengths[place % len(strengths)] for place in range(tokens)],
        lambda ids: pieces[ids[0]],
        advantage=1.0 - row,
        reward=float(row == 0),
        finish_reason="stop",
    )
