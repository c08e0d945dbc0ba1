"""Publishes and exports: an engine that was published to is one that loaded the same tensors, byte for byte."""

from __future__ import annotations

import json
import os
import random
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.proofs.harness import (
    QUIET,
    TINY,
    Record,
    Row,
    batch_of,
    in_process,
    log_probs,
    run_config,
)
from qarl.checkpoint.export import ExportRequest, export
from qarl.checkpoint.model_files import ModelFiles, read_tensors, save_model
from qarl.checkpoint.resumable import open_checkpoint, tensor_digest
from qarl.checks.model_folder import load_tokenizer
from qarl.config import Config
from qarl.config.level import Level
from qarl.data.prompts import load_prompts
from qarl.diagnose.diagnosis import with_keys
from qarl.process import configure_vllm_process
from qarl.quant import get_scheme, packed_state_dict
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.loop import train
from qarl.trainer.policy import Policy

IGNORE = ("lm_head",)
STRESS_PROMPTS = [[3 + i % 17, 5 + i % 11, 8 + i % 13, 4 + i % 29, 3] for i in range(64)]
GROWTH_MB = 32
"""Of the high-water mark of memory between the tenth publish and the last."""


def fresh_vllm(
    folder: str, prompts: list[list[int]], tokens: int, length: int, ignore_eos: bool
) -> list[Any]:
    """Return the greedy responses, with log-probs, of a vLLM that loads `folder` and knows nothing of QaRL."""
    os.environ["VLLM_CPU_INT4_W4A8"] = "0"  # before vLLM is imported
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # without it vLLM's kernels end with an illegal instruction
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        model=folder, max_model_len=length, enforce_eager=True, kv_cache_memory_bytes=2**28,
        enable_prefix_caching=False, enable_chunked_prefill=False, max_num_batched_tokens=4096,
    )  # fmt: skip
    asked = SamplingParams(
        max_tokens=tokens, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=ignore_eos
    )
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    completions = [output.outputs[0] for output in done]
    values = [
        [p[t].logprob for t, p in zip(completion.token_ids, completion.logprobs, strict=True)]
        for completion in completions
    ]
    return [[list(c.token_ids) for c in completions], values]


def _greedy(engine: RolloutEngine, prompts: list[list[int]], tokens: int) -> list[Any]:
    batch = engine.generate(prompts, SamplingConfig(tokens, temperature=0.0, ignore_eos=True))
    return [batch.response_token_ids, batch.rollout_log_probs]


def weight_sets(
    scheme_name: str, count: int, parent: Path
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield the tensors of the tiny model with noise on top, and what a fresh vLLM generates from them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scheme = get_scheme(scheme_name, group_size=32)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for number in range(count):
        model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02 * number)
        packed = [
            (name, t.clone()) for name, t in packed_state_dict(model, scheme=scheme, ignore=IGNORE)
        ]
        files = ModelFiles.of(model, tokenizer)
        folder = save_model(
            parent / f"{scheme_name}-{number}", files, packed, scheme=scheme, ignore=IGNORE
        )
        (reference,) = in_process(fresh_vllm, str(folder), STRESS_PROMPTS, 24, 64, True)
        yield packed, reference


def publish_stress(
    record: Record,
    *,
    schemes: tuple[str, ...] = ("w4a16", "w8a8", "fp8", "bf16"),
    publishes: int = 100,
    sets: int = 4,
) -> None:
    """Publish sets of weights in random order; each answer must be a freshly started vLLM's, bit for bit."""
    for scheme in filter(record.wants, schemes):
        with tempfile.TemporaryDirectory() as parent:
            tensors, references = map(
                list, zip(*weight_sets(scheme, sets, Path(parent)), strict=True)
            )
        if len({json.dumps(reference) for reference in references}) != sets:
            raise RuntimeError(
                "two sets of weights generate the same: the comparison would show nothing"
            )
        settings = EngineConfig(
            str(TINY),
            get_scheme(scheme, group_size=32),
            IGNORE,
            max_model_len=64,
            kv_cache_gib=0.25,
        )
        order = random.Random(0)
        equal = 0
        with RolloutEngine(settings) as engine:
            for number in range(publishes):
                chosen = order.randrange(sets)
                engine.publish(tensors[chosen], version=number)
                equal += _greedy(engine, STRESS_PROMPTS, 24) == references[chosen]
                if number == min(9, publishes - 1):
                    pointers = {name: p.data_ptr() for name, p in engine.model().named_parameters()}
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            moved = sum(
                p.data_ptr() != pointers[name] for name, p in engine.model().named_parameters()
            )
            growth = round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1e3, 1)
            back = []
            for chosen in (0, 1, 0):
                engine.publish(tensors[chosen], version=chosen)
                back.append(_greedy(engine, STRESS_PROMPTS, 24))
        returns = back[0] == back[2] != back[1]
        row = {"scheme": scheme, "publishes": publishes, "equal_to_a_fresh_engine": equal}
        row |= {
            "a_b_a_returns_to_a": returns,
            "tensors_moved": moved,
            "peak_memory_growth_mb": growth,
        }
        record.add(
            scheme, row, ok=equal == publishes and returns and not moved and growth < GROWTH_MB
        )


EXPORTED = {"dense": "quickstart.yaml", "experts": "quickstart_moe.yaml"}


def export_check(
    record: Record,
    *,
    kinds: tuple[str, ...] = ("dense", "experts"),
    schemes: tuple[str, ...] = ("bf16", "w4a16", "w8a8", "fp8"),
    prompts: int = 64,
) -> None:
    """Train two steps, export, and compare the log-probs of a fresh vLLM on its greedy responses with three others.

    `exact`, `model`: the trainer's forward with the checkpoint's BF16 weights. `transformers`: the export in stock
    transformers with compressed-tensors, or the numbers of tensors that did not fit.
    """
    for kind, scheme in ((kind, scheme) for kind in kinds for scheme in schemes):
        if record.wants(name := f"{kind} | {scheme}"):
            (row,) = in_process(exported_row, scheme, prompts, kind)
            record.add(name, row, ok=row["published"] and row["exact"]["max"] == 0)


def exported_row(scheme: str, prompts: int, kind: str = "dense") -> Row:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as parent:
        steps = {
            "name": "run",
            "trainer.total_training_steps": 2,
            "trainer.save_freq": 2,
            "trainer.logger": [],
        }
        settings = QUIET | steps | {"output_dir": parent, "quant.scheme": scheme, "optim.lr": 2e-4}
        config = run_config(EXPORTED[kind], settings)
        train(config)
        checkpoint = config.run_dir / "checkpoints" / "step_2"
        exported = Path(parent) / "exported"
        export(ExportRequest(config.run_dir, exported))
        configure_vllm_process()
        tokens = prompt_tokens(config, prompts)
        (answers,) = in_process(fresh_vllm, str(exported), tokens, 80, 112, False)
        rollout = RolloutBatch(
            tokens, answers[0], answers[1], ["stop"] * len(tokens), weight_version=0
        )
        batch = batch_of(rollout)
        stock, unfit = transformers_log_probs(exported, rollout)
        forwards = {"exact": trainer_log_probs(config, checkpoint, batch)}
        digests = {name: tensor_digest(tensor) for name, tensor in read_tensors(exported)}
        row: Row = {"kind": kind, "scheme": scheme, "tokens": int(batch.response_mask.sum())}
        row["published"] = digests == open_checkpoint(checkpoint).state["published"]
    if not unfit:
        forwards["transformers"] = torch.nn.utils.rnn.pad_sequence(
            list(map(torch.tensor, stock)), batch_first=True
        )
    for name, values in forwards.items():
        apart = (values - batch.rollout_log_probs)[batch.response_mask].abs()
        row[name] = {"mean": float(apart.mean()), "max": float(apart.max())}
    return row | ({"transformers": unfit} if unfit else {})


def prompt_tokens(config: Config, count: int) -> list[list[int]]:
    tokenizer, _ = load_tokenizer(config.model.path)
    prompts = load_prompts(
        config.data.val_files, tokenizer=tokenizer, max_prompt_length=32, limit=count
    )
    return [prompt.prompt_token_ids for prompt in prompts]


@torch.no_grad()
def transformers_log_probs(
    folder: Path, rollout: RolloutBatch
) -> tuple[list[list[float]], dict[str, int]]:
    """Return the log-probs of each response by itself, and the numbers of tensors that did not fit."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    model, told = loaded
    if any(told.values()):
        return [], {kind: len(names) for kind, names in told.items() if names}
    rows = []
    for prompt, response in zip(rollout.prompt_token_ids, rollout.response_token_ids, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        rows.append(
            logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
        )
    return rows, {}


def trainer_log_probs(config: Config, checkpoint: Path, batch: Any) -> torch.Tensor:
    """Return the log-probs of the trainer's forward at level `exact`, with the weights of the checkpoint."""
    path = config.model.model_copy(update={"path": str(checkpoint)})
    policy = Policy.load(
        with_keys(config.model_copy(update={"model": path}), {"quant.align": Level.EXACT})
    )
    own: torch.Tensor = log_probs(policy, batch, rows=len(batch))
    return own
