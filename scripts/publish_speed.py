"""The cost of a publish per MB, by phase, beside vLLM's own reload of the same tensors.

    python scripts/publish_speed.py --schemes w4a16 w8a8 fp8 bf16

A Qwen3 of random weights (`--layers` of width 1024, all of whose linears are quantized), one engine a scheme; the two
ways take turns in one process, so that a machine whose speed drifts slows both alike. MB are 10^6 bytes on the wire.
`quantize` and `pack` are the quantizer's, `prepare` the trainer's own kernel layout; they run once an optimizer step
whatever the publish does. "vLLM's reload" is `reload_weights` of the whole list (for W8A8 it leaves NaN behind, so
only its time means something; the other ways are checked by what the engine generates).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qarl.quant import get_scheme, packed_state_dict, quantize_model
from qarl.quant.convert import invalidate_quantized
from qarl.quant.timing import measure_phases
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig

PROMPTS = [[3 + i % 50, 5, 8 + i % 40, 4] for i in range(8)]
PHASES = ("quantize", "pack", "prepare", "validate", "transfer", "apply")


def make_model(folder: Path, layers: int) -> Path:
    """A random Qwen3 with a small vocabulary, and the tokenizer that vLLM asks for."""
    import transformers
    from tokenizers import Tokenizer, models

    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", unk_token="t0").save_pretrained(folder)
    return folder


def greedy(engine: RolloutEngine) -> tuple[list[list[int]], list[list[float]]]:
    batch = engine.generate(PROMPTS, SamplingConfig(16, temperature=0.0, ignore_eos=True))
    return batch.response_token_ids, batch.rollout_log_probs


def measure(folder: Path, scheme_name: str, rounds: int) -> dict[str, Any]:
    """Medians of seconds by phase, and of vLLM's reload."""
    from transformers import AutoModelForCausalLM

    scheme = get_scheme(scheme_name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if scheme.quantized:
        quantize_model(model, scheme=scheme)
    config = EngineConfig(str(folder), scheme, ("lm_head",), max_model_len=64, kv_cache_gib=0.25)
    seconds: dict[str, list[float]] = {phase: [] for phase in (*PHASES, "reload")}
    with RolloutEngine(config) as engine:
        tensors = list(packed_state_dict(model))
        report = engine.publish(tensors, version=0)
        expected = greedy(engine)
        for number in range(rounds):
            invalidate_quantized(model)
            with measure_phases() as quantizing:
                tensors = list(packed_state_dict(model))
            start = time.perf_counter()
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            seconds["reload"].append(time.perf_counter() - start)
            report = engine.publish(tensors, version=number + 1)
            for phase, value in {**quantizing, **report.seconds}.items():
                seconds[phase].append(value)
            if greedy(engine) != expected:
                raise RuntimeError(f"{scheme_name}: the engine generates something else after round {number}")
    megabytes = report.bytes / 1e6
    cost = {phase: statistics.median(values) / megabytes * 1e3 for phase, values in seconds.items()}
    publish = cost["validate"] + cost["transfer"] + cost["apply"]
    return {"scheme": scheme_name, "mbytes": megabytes, "ms_per_mb": cost, "publish_ms_per_mb": publish}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=["w4a16", "w8a8", "fp8", "bf16"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(make_model(Path(folder), args.layers), scheme, args.rounds) for scheme in args.schemes]
    print("ms per MB on the wire (medians)\n")
    print(f"| scheme | MB | {' | '.join(PHASES)} | publish | vLLM's reload |")
    print("|---" * (len(PHASES) + 4) + "|")
    for row in results:
        cost = row["ms_per_mb"]
        cells = " | ".join(f"{cost[phase]:.2f}" for phase in PHASES)
        total = f"{row['publish_ms_per_mb']:.2f} | {cost['reload']:.2f}"
        print(f"| {row['scheme']} | {row['mbytes']:.1f} | {cells} | {total} |")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
