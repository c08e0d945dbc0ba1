"""δ by length of the prompts, with one and two threads, with and without a prefix cache, around the predicted border.

Models with random weights. Up to `longest_exact_prompt` of `qarl.kernels.cpu.attention_tiles` δ must be 0 in every row;
longer prompts are only measured. (With one thread and no cache δ is 0 at any length.)
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.proofs.align import random_twin
from benchmarks.proofs.harness import Record, Row, in_process, run_config
from benchmarks.proofs.lengths import SHAPE, endless_trainer, keys, local_row
from qarl.kernels.cpu.attention_tiles import longest_exact_prompt

RESPONSE = 16
WAYS = {
    "1 thread and cache": (1, True),
    "2 threads": (2, False),
    "2 threads and cache": (2, True),
}
"""Name -> number of threads, and whether there is a prefix cache."""


def exact_prompts(
    record: Record,
    *,
    heads: tuple[int, ...] = (64, 128),
    schemes: tuple[str, ...] = ("w4a16",),
    ways: tuple[str, ...] = tuple(WAYS),
    beside: tuple[int, ...] = (-64, -1, 0, 1, 64, 256, 960),
) -> None:
    """Take a step with prompts of each length, by which they are longer than the border. `heads`: head sizes.

    Four responses of 16 tokens to two prompts. A process takes all lengths of a model, a scheme and a way."""
    with tempfile.TemporaryDirectory() as parent:
        for size in heads:
            border = longest_exact_prompt(size)
            sizes = {"head_dim": size, "num_attention_heads": 4, "num_key_value_heads": 2}
            model = random_twin(Path(parent) / str(size), **SHAPE | sizes)
            for scheme in schemes:
                for way in ways:
                    names = {
                        border + more: f"heads of {size} | {scheme} | {way} | {border + more}"
                        for more in beside
                    }
                    lengths = [length for length, name in names.items() if record.wants(name)]
                    if not lengths:
                        continue
                    threads, cached = WAYS[way]
                    settings = keys("dense", model, scheme, RESPONSE, "model", max(lengths))
                    settings |= {
                        "trainer.num_threads": threads,
                        "rollout.enable_prefix_caching": cached,
                        "rollout.cpu_kvcache_space_gib": 0.5,
                    }
                    environment = {"OMP_NUM_THREADS": str(threads)}
                    (rows,) = in_process(measure, settings, lengths, **environment)
                    for length, row in zip(lengths, rows, strict=True):
                        promised = length <= border
                        record.add(
                            names[length],
                            row | {"border": border},
                            ok=row["tokens"] == 4 * RESPONSE and not (promised and row["max"]),
                        )


def measure(settings: Row, lengths: list[int]) -> list[Row]:
    """Take a step with prompts of each length."""
    import torch

    from qarl.data.prompts import Prompt, PromptDataset
    from qarl.trainer.prepare import prepare_run

    with tempfile.TemporaryDirectory() as folder:
        config = run_config("quickstart.yaml", settings | {"output_dir": folder})
        trainer = endless_trainer(config, prepare_run(config))
        count = len(trainer.parts.train_prompts)
        draw = torch.Generator().manual_seed(0)
        rows = []
        with trainer.engine:
            trainer.publish()
            for length in lengths:
                tokens = torch.randint(3, 250, (count, length), generator=draw).tolist()
                prompts = [Prompt(i, "random", [], row, "") for i, row in enumerate(tokens)]
                trainer.parts.train_prompts = PromptDataset(prompts)
                rows.append(local_row(trainer, RESPONSE))
        return rows
