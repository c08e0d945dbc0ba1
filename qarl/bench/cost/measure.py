"""`python -m qarl.bench ceilings`: measures `qarl.bench.cost.ceilings.Ceilings` on this machine.

    python -m qarl.bench ceilings json=FILE rounds=4 threads=1

Single operations only, of sizes that no model has: see the modules of the parts. A few minutes on one core. malloc
keeps freed memory, as it does beside a trainer on a CPU, so that an operation gets such pages as it gets in a step.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qarl.bench import report, timing
from qarl.bench.cost import measure_blocks, measure_products
from qarl.bench.cost.arguments import CeilingsArguments
from qarl.bench.cost.ceilings import Ceilings, EngineCost, Product, PublishCost, QuantizeCost
from qarl.bench.cost.doubts import warn
from qarl.bench.cost.measure_engine import overheads, token_costs
from qarl.bench.cost.rig import PRODUCTS, make_engine, make_model
from qarl.process import keep_freed_memory
from qarl.quant import packed_state_dict, quantize_model

VOCABULARIES = (8192, 32768, 98304)
"""Of the embeddings that are published, 640 wide."""


def measure(schemes: Sequence[str], *, rounds: int) -> Ceilings:
    """Of BF16 and `schemes`."""
    device = torch.device("cpu")
    kept = keep_freed_memory()
    torch.manual_seed(0)
    start = time.perf_counter()
    products: dict[str, Product] = {}
    quantizers: dict[str, QuantizeCost] = {}
    published: dict[str, dict[str, float]] = {}
    for scheme in ("bf16", *(name for name in schemes if name != "bf16")):
        model = make_model(PRODUCTS)
        if scheme != "bf16":
            quantize_model(model, scheme=scheme)
            quantizers[scheme] = measure_products.quantizer(model, rounds)
        for direction, product in measure_products.trainer_products(model, rounds).items():
            products[f"trainer {direction} {scheme}"] = product
        with tempfile.TemporaryDirectory() as folder, make_engine(Path(folder), PRODUCTS, scheme) as running:
            running.publish(list(packed_state_dict(model)), version=0)
            products[f"engine forward {scheme}"] = measure_products.engine_products(running, rounds)
            published[scheme] = measure_products.publish(model, running, rounds)
            if scheme == "bf16":
                tokens = token_costs(running, rounds)
    for direction, product in measure_products.head_products(rounds).items():
        products[f"trainer {direction} head"] = product
    tables = {
        name: tuple((float(vocab * PRODUCTS.hidden), _tables(vocab, name == "tied", rounds)) for vocab in VOCABULARIES)
        for name in ("tied", "untied")
    }
    bf16 = published["bf16"]
    return Ceilings(
        device=report.device_name(device),
        assumed=False,
        copy_bytes_per_s=timing.ceilings(device)["copy_bytes_per_s"],
        products=products,
        blocks={level: measure_blocks.blocks(level, rounds) for level in measure_blocks.LEVELS},
        engine=EngineCost(**overheads(products["engine forward bf16"], rounds), **tokens),
        head=measure_blocks.head(rounds),
        optimizer=measure_blocks.optimizer(rounds),
        quantize=quantizers,
        publish=PublishCost(
            call=bf16["call"],
            validate=bf16["validate"],
            transfer=bf16["transfer"],
            apply={name: found["apply"] for name, found in published.items()},
            tied=tables["tied"],
            untied=tables["untied"],
        ),
        memory_bytes=0,
        facts=_facts(rounds, time.perf_counter() - start) | {"keeps_freed_memory": kept},
    )


def _tables(vocab: int, tied: bool, rounds: int) -> float:
    size = replace(PRODUCTS, layers=1, vocab=vocab, tied=tied)
    model = make_model(size)
    with tempfile.TemporaryDirectory() as folder, make_engine(Path(folder), size, "bf16") as running:
        return measure_products.tables(model, running, rounds)


def _facts(rounds: int, seconds: float) -> dict[str, Any]:
    return {
        "versions": report.versions(),
        "commit": report.commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "seconds": seconds,
    }


def run(arguments: CeilingsArguments) -> int:
    """Measure, print the most telling numbers, write the file."""
    ceilings = measure(arguments.schemes, rounds=arguments.rounds)
    report.write_json(arguments.json, ceilings.to_json())
    print(f"{ceilings.device}: copy {ceilings.copy_bytes_per_s / 1e9:.1f} GB/s, {ceilings.facts['seconds']:.0f} s")
    for name, product in ceilings.products.items():
        print(f"  {name:24} {product.flop_per_s / 1e9:7.0f} GFLOP/s at best")
    warn(ceilings)
    print(f"wrote {arguments.json}")
    return 0
