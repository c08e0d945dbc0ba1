"""Delta publishes of real optimizer updates, each compared with the full publish of the same tensors.

    python scripts/publish_delta.py --json benchmarks/results/publish_delta_cpu.json

Each run trains a small model with AdamW on FP32 masters (policy gradient with random advantages of random responses, so
nothing but the size of an update is realistic). After every update one vLLM engine gets two publishes of the same
tensors: first the changes, then all tensors through a second receiver. After each publish the bytes of every parameter
and buffer of the engine are compared, and the tensors that the first receiver keeps are compared with the trainer's.
Every hundredth time greedy responses and their log-probs are compared too. `remote` are the seconds that a sender in
another process needs to find and encode the changes, and a receiver there to apply them, without the transport.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_tensors import copied, differ
from publish_speed import make_model

from qarl.config import load_config
from qarl.rollout.engine import RolloutEngine, SamplingConfig
from qarl.rollout.publish.receive import WeightReceiver
from qarl.rollout.publish.send import DeltaSender, publish_weights
from qarl.trainer.optim import MasterOptimizer
from qarl.trainer.policy import Policy
from qarl.trainer.setup import engine_config

PROMPTS = [[3 + i % 7, 5, 8 + i % 11, 4] for i in range(16)]
RUNS = (
    ("quickstart.yaml", "w4a16", 1e-6, 1.0),
    ("quickstart.yaml", "w4a16", 1e-4, 1.0),
    *(("quickstart.yaml", scheme, 1e-6, 0.1) for scheme in ("w8a8", "fp8", "bf16")),
    *(("quickstart_moe.yaml", scheme, 1e-6, 0.1) for scheme in ("w4a16", "bf16")),
    *(("random", "w4a16", lr, 0.02) for lr in (1e-6, 1e-4)),
)
"""Config, scheme, learning rate, and the share of `--publishes`. `random` is the model of scripts/publish_speed.py."""


def update(policy: Policy, optimizer: MasterOptimizer, generator: torch.Generator) -> None:
    vocab = policy.model.config.vocab_size
    tokens = torch.randint(0, vocab, (4, 24), generator=generator)
    advantages = torch.randn(4, 1, generator=generator)
    log_probs = policy.model(input_ids=tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    chosen = log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    (-(advantages * chosen).mean()).backward()
    optimizer.accumulate()
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()


def greedy(engine: RolloutEngine) -> Any:
    batch = engine.generate(PROMPTS, SamplingConfig(12, temperature=0.0, ignore_eos=True))
    return batch.response_token_ids, batch.rollout_log_probs


def measure(config_name: str, scheme: str, lr: float, publishes: int, out: str) -> dict[str, Any]:
    overrides = [f"output_dir={out}", f"optim.lr={lr}", f"quant.scheme={scheme}", "rollout.cpu_kvcache_space_gib=0.25"]
    if config_name == "random":
        overrides += [f"model.path={make_model(Path(out) / 'model', 6)}", "quant.group_size=128"]
    config = load_config([f"config={'quickstart.yaml' if config_name == 'random' else config_name}", *overrides])
    policy = Policy.load(config)
    optimizer = MasterOptimizer(policy.model.named_parameters(), config.optim, seed=0, total_training_steps=publishes)
    generator = torch.Generator().manual_seed(0)
    bf16 = 2 * sum(parameter.numel() for parameter in policy.model.parameters())
    rows: list[dict[str, float]] = []
    wrong = different_answers = 0
    with RolloutEngine(engine_config(config, level=policy.align)) as engine:
        assert engine.receiver is not None
        core: Any = engine.llm.llm_engine.engine_core
        runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        second = WeightReceiver.of_runner(runner, engine.expected)
        outbox = DeltaSender()
        tensors = list(policy.quantize())
        full = engine.publish(tensors, version=0)
        list(outbox.stream(tensors, version=0, held=[None]))
        for version in range(1, publishes + 1):
            update(policy, optimizer, generator)
            tensors = list(policy.quantize())
            start = time.perf_counter()
            stream = list(outbox.stream(tensors, version=version, held=[outbox.cache.fingerprint]))
            remote = time.perf_counter() - start
            start = time.perf_counter()
            report = engine.publish(tensors, version=version)
            delta_seconds = time.perf_counter() - start
            after_delta = copied(engine.model())
            kept = engine.receiver.cache
            wrong += kept is None or differ(dict(tensors), kept.tensors) or differ(dict(tensors), outbox.cache.tensors)
            answers = greedy(engine) if version % 100 == 0 else None
            start = time.perf_counter()
            publish_weights(engine, second, tensors, version=version)
            full_seconds = time.perf_counter() - start
            wrong += differ(after_delta, copied(engine.model()))
            if answers is not None:
                different_answers += greedy(engine) != answers
            row = {
                "sent": report.sent_bytes,
                "changed": report.changed["publish/changed_words"],
                "changed_frac": report.changed["publish/changed_frac"],
                "delta_s": delta_seconds,
                "full_s": full_seconds,
                "encode_s": remote,
                "delta": float(report.is_delta),
                "payloads": float(sum(tensor.nbytes for name, tensor in stream if not name.startswith("qarl."))),
            }
            for name in ("codes", "scales"):
                if (key := f"publish/changed_{name}_frac") in report.changed:
                    row[f"{name}_frac"] = report.changed[key]
            rows.append(row)

    def column(name: str) -> list[float]:
        return [row[name] for row in rows if name in row]

    def median(name: str) -> float | None:
        return statistics.median(column(name)) if column(name) else None

    return {
        "config": config_name,
        "scheme": scheme,
        "lr": lr,
        "publishes": publishes,
        "deltas": int(sum(column("delta"))),
        "tensors_that_differ": wrong,
        "different_answers": different_answers,
        "empty": sum(not value for value in column("changed")),
        "without_changed_codes": sum(not value for value in column("codes_frac")),
        "changed_words_frac_median": median("changed_frac"),
        "changed_codes_frac_median": median("codes_frac"),
        "changed_scales_frac_median": median("scales_frac"),
        "full_bytes": full.sent_bytes,
        "bf16_bytes": bf16,
        "delta_bytes_median": median("sent"),
        "delta_bytes_max": max(column("sent")),
        "delta_payload_bytes_median": median("payloads"),
        "delta_seconds_median": median("delta_s"),
        "full_seconds_median": median("full_s"),
        "encode_seconds_median": median("encode_s"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publishes", type=int, default=1000)
    parser.add_argument("--runs", type=int, nargs="+", default=list(range(len(RUNS))), help="which of RUNS")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as out:
        for number in args.runs:
            config, scheme, lr, share = RUNS[number]
            results.append(measure(config, scheme, lr, max(int(args.publishes * share), 1), out))
            print(json.dumps(results[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(any(row["tensors_that_differ"] or row["different_answers"] for row in results))


if __name__ == "__main__":
    sys.exit(main())
