"""One rank of verl's FSDP2 engine as QaRL registers it, without Ray: run by test_verl_engine.py.

    verl_engine.py JOBS_FILE OUTPUT_FILE

The jobs file (torch.save) holds `model`, `rows` (padded tensors, as `make_rows` of the test makes them) and `jobs`, a
list of dicts: `micro` responses a micro-batch, `log_prob_micro` for the pass before, `lr`, `steps`, `quant`, `rows` and
`model` if they are others, `update` the rows of each rank's update if not all, `remove_padding`, `tokens` for
micro-batches of at most so many tokens, `gradient_checkpointing`, and `engine` and `optim` with more of verl's FSDP and
optimizer keys. `quant` may be None, and `loss` a loss of verl's.
`guard`: what the first update answers to these rollout log-probs. `servers`: what each rank's publish does while the
first rank asks the rollout's servers, which answer late or are dead.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import verl  # noqa: F401  registers its platform
from fsdp_ranks import draw_b
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from qarl.errors import UserError
from qarl.rollout.remote.records import BEGIN, read_record
from qarl.verl.config_classes import QaRLPolicyLossConfig, QuantFSDPEngineConfig

rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]


def build(model: str, job: dict[str, Any]) -> tuple[Any, Any]:
    settings = {"strategy": "fsdp2", "use_torch_compile": False} | job.get("engine", {})
    quant = job["quant"]
    engine_config = (
        FSDPEngineConfig(**settings)
        if quant is None
        else QuantFSDPEngineConfig(quant=quant, **settings)
    )
    verls = PolicyLossConfig(loss_mode=job["loss"]) if "loss" in job else None
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-mean",
        policy_loss=verls or QaRLPolicyLossConfig(**job.get("bands", {})),
        fsdp_config=engine_config,
    )
    parts = ["model", "optimizer", "extra"]
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=model,
            use_remove_padding=job.get("remove_padding", False),
            enable_gradient_checkpointing=job.get("gradient_checkpointing", False),
            override_config={"attn_implementation": "sdpa", "attention_dropout": 0.0},
        ),
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(
            lr=job["lr"],
            total_training_steps=10,
            **{"clip_grad": 1e9, "weight_decay": 0.0} | job.get("optim", {}),
        ),
        checkpoint_config=CheckpointConfig(save_contents=parts, load_contents=parts),
    )
    engine.initialize()
    return engine, partial(ppo_loss, config=actor)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make_data(
    rows: dict[str, torch.Tensor],
    mine: list[int],
    micro: int,
    remove_padding: bool = False,
    tokens: int | None = None,
) -> Any:
    """verl's no-padding TensorDict of the rows `mine` of padded tensors."""
    columns: dict[str, list[torch.Tensor]] = {}
    for i in mine:
        prompt, length = int(rows["prompt_lengths"][i]), int(rows["response_lengths"][i])
        row = {
            "input_ids": rows["input_ids"][i, : prompt + length],
            "responses": rows["responses"][i, :length],
        }
        row["prompts"] = row["input_ids"][:prompt]
        row["position_ids"] = torch.arange(prompt + length)
        row["response_mask"] = rows["response_mask"][i, :length].long()
        row["loss_mask"] = row["response_mask"]
        row["advantages"] = rows["advantages"][i].expand(length)
        for name in ("old_log_probs", "rollout_log_probs"):
            row[name] = rows[name][i, :length]
        if "routed_experts" in rows:
            row["routed_experts"] = rows["routed_experts"][i, : prompt + length]
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    data = tu.get_tensordict({name: nested(values) for name, values in columns.items()}, {})
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=False,
        use_remove_padding=remove_padding,
        use_dynamic_bsz=tokens is not None,
        max_token_len_per_gpu=tokens,
        use_fused_kernels=False,
        micro_batch_size_per_gpu=micro,
        global_batch_size=len(rows["input_ids"]),
        pad_token_id=2,
        update_lr_scheduler=True,
    )
    return data


def run_adapters(content: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """An update of adapters whose B is not zero, the streams of two publishes, and a checkpoint: the same update after
    it, and once more after it was loaded."""
    engine, loss = build(content["model"], job)
    draw_b(engine.adapters)
    rows = content["rows"]
    mine = list(range(int(rank), len(rows["input_ids"]), int(world)))
    result: dict[str, Any] = {}

    def update() -> dict[str, torch.Tensor]:
        data = make_data(rows, mine, job["micro"])
        with engine.train_mode():
            output = engine.train_batch(data, loss)
            gradients = {
                n: p.grad.full_tensor()
                for n, p in engine.module.named_parameters()
                if p.grad is not None
            }
        engine.lr_scheduler_step()
        engine.optimizer_zero_grad()
        values = torch.tensor(sum(output["loss"]))
        torch.distributed.all_reduce(values)
        result.setdefault("update", (float(values) / int(world), gradients))
        return {
            name: tensor.full_tensor().clone() for name, tensor in engine.adapters.tensors().items()
        }

    states = [update()]
    result["streams"] = [list(engine.get_per_tensor_param(base_sync_done=True)[0])]
    result["streams"].append(list(engine.adapters.stream(1, with_base=False)))
    result["separate"] = refusal(engine.get_per_tensor_param)
    engine.save_checkpoint(job["checkpoint"], global_step=1)
    states.append(update())
    engine.load_checkpoint(job["checkpoint"])
    states += [
        {name: tensor.full_tensor().clone() for name, tensor in engine.adapters.tensors().items()},
        update(),
    ]
    engine.adapters._digests = {**engine.adapters._digests, "model.norm.weight": "another"}
    result["another base"] = gathered(
        refusal(partial(engine.adapters.check_base, job["checkpoint"]))
    )
    return result | {"states": states}


def run(content: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    if "lora" in (job["quant"] or {}):
        return run_adapters(content, job)
    engine, loss = build(job.get("model", content["model"]), job)
    rows = {name: tensor.clone() for name, tensor in job.get("rows", content["rows"]).items()}
    mine = list(range(int(rank), len(rows["input_ids"]), int(world)))
    packed, tokens = job.get("remove_padding", False), job.get("tokens")
    result: dict[str, Any] = {"metrics": []}
    if "guard" in job:
        spoilt = make_data(rows | {"rollout_log_probs": job["guard"]}, mine, job["micro"], packed)
        engine.module.train()
        result["guard"] = gathered(refusal(lambda: engine.train_batch(spoilt, loss)))
    for _ in range(job.get("steps", 1)):
        if "log_prob_micro" in job:
            padded = log_probs(engine, rows, mine, job)
            rows["old_log_probs"][mine, : padded.shape[1]] = (
                padded.float()
            )  # verl's own are of the logits' dtype
        data = make_data(
            rows, job.get("update", [mine, mine])[int(rank)], job["micro"], packed, tokens
        )
        quantized = generations(engine)
        with engine.train_mode():
            output = engine.train_batch(data, loss)
            result["gradients"] = {
                name: p.grad.full_tensor().clone()
                for name, p in engine.module.named_parameters()
                if p.grad is not None
            }
        engine.lr_scheduler_step()  # as verl's worker does after a training step
        result["made"] = [
            after - before for before, after in zip(quantized, generations(engine), strict=True)
        ]
        values = torch.tensor(sum(output["loss"]))
        torch.distributed.all_reduce(values)
        result["loss"] = float(values) / int(world)
        result["metrics"].append(
            {name: value for name, value in output["metrics"].items() if isinstance(value, list)}
        )
    result["masters"] = {
        name: p.full_tensor().detach().clone() for name, p in engine.module.named_parameters()
    }
    result["state_dtypes"] = {
        str(value.dtype)
        for state in engine.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    result["published"] = publish(engine)
    before = generations(engine)
    result["version"], result["made_again"] = (
        published_version(engine),
        generations(engine) != before,
    )
    if "servers" in job:
        result["servers"] = {dead: ask_servers(engine, dead) for dead in (False, True)}
    bypassed = rows | {
        "old_log_probs": rows["rollout_log_probs"]
    }  # verl's `rollout_correction.bypass_mode`
    result["bypass"] = refusal(
        lambda: engine.train_batch(make_data(bypassed, mine, job["micro"]), loss)
    )
    if "log_prob_micro" in job:
        result["log_probs"] = gathered((mine, log_probs(engine, rows, mine, job)))
    if "checkpoint" in job:
        result |= save_change_load(engine, loss, rows, mine, job)
    return result


def log_probs(
    engine: Any, rows: dict[str, torch.Tensor], mine: list[int], job: dict[str, Any]
) -> torch.Tensor:
    """The old log-probs of the rows `mine`, as verl's worker asks for them: [mine, longest response], 0 on padding."""
    tokens = job.get("tokens")
    data = make_data(
        rows, mine, job["log_prob_micro"], job.get("remove_padding", False), tokens and 2 * tokens
    )
    with engine.eval_mode():
        nested = engine.infer_batch(data)["model_output"]["log_probs"]
    return response_from_nested(nested, data["response_mask"]).to_padded_tensor(0.0)


def generations(engine: Any) -> list[int]:
    """How often each layer was quantized."""
    return [layer.generation for layer in engine.module.modules() if hasattr(layer, "generation")]


def publish(engine: Any) -> dict[str, torch.Tensor]:
    stream, _ = engine.get_per_tensor_param()
    return {name: tensor.clone() for name, tensor in stream if not name.startswith("qarl.")}


def published_version(engine: Any) -> int:
    """The contents of the first record of a publish."""
    stream, _ = engine.get_per_tensor_param()
    (begin,) = [read_record(BEGIN, record) for name, record in stream if name.startswith(BEGIN)]
    return int(begin["version"])


class Servers:
    """Those of the rollout, which take a while to answer."""

    def __init__(self, dead: bool) -> None:
        self._dead, self.answered = dead, 0.0

    def ask(self) -> None: ...

    def dead(self, timeout: float) -> dict[str, str]:
        time.sleep(0.5)
        self.answered = time.monotonic()
        return {"vllm_server_1_0": "ActorDiedError: gone"} if self._dead else {}


def ask_servers(engine: Any, dead: bool) -> list[dict[str, Any]]:
    """When each rank had its answers and its stream, and what it raised."""
    engine._servers = servers = Servers(dead)
    error = refusal(partial(engine.get_per_tensor_param, base_sync_done=True))
    return gathered({"answered": servers.answered, "begun": time.monotonic(), "error": error})


def gathered(text: Any) -> list[Any]:
    """`text` of each rank."""
    texts: list[Any] = [None] * int(world)
    torch.distributed.all_gather_object(texts, text)
    return texts


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return ""


def save_change_load(
    engine: Any, loss: Any, rows: dict[str, torch.Tensor], mine: list[int], job: dict[str, Any]
) -> dict[str, Any]:
    """Publishes after save, another update and load, of all parts and of some. Also loads files of rank 0 that are not
    those that were saved."""

    def change() -> dict[str, torch.Tensor]:
        engine.module.train()
        engine.train_batch(make_data(rows, mine, job["micro"]), loss)
        engine.lr_scheduler_step()
        engine.optimizer_zero_grad()  # as verl's worker does after a training step
        return publish(engine)

    folder, manager = job["checkpoint"], engine.checkpoint_manager
    engine.optimizer_zero_grad()
    engine.save_checkpoint(folder, global_step=1)
    changed = change()
    report: dict[str, Any] = {"changed": changed, "changed_version": published_version(engine)}
    engine.load_checkpoint(folder)
    report |= {"loaded": publish(engine), "loaded_version": published_version(engine), "parts": {}}
    for parts in (["model", "extra"], ["model"]):
        manager.checkpoint_save_contents = manager.checkpoint_load_contents = parts
        part_folder = f"{folder}_{'_'.join(parts)}"
        engine.save_checkpoint(part_folder, global_step=1)
        before, between = publish(engine), change()
        error = refusal(partial(engine.load_checkpoint, part_folder))
        report["parts"]["_".join(parts)] = {
            "error": error,
            "tensors": (before, between, publish(engine)),
        }
    manager.checkpoint_load_contents = ["model", "optimizer", "extra"]
    for what, alter in (
        ("extra_state", draw_random_number),
        ("optim", move_a_moment),
        ("model", move_one_bit),
    ):
        file = Path(folder) / f"{what}_world_size_{world}_rank_0.pt"
        good = file.read_bytes()
        torch.distributed.barrier()
        if rank == "0":
            state = torch.load(file, weights_only=False)
            alter(state)
            torch.save(state, file)
        torch.distributed.barrier()
        report[f"damaged_{what}"] = refusal(partial(engine.load_checkpoint, folder))
        torch.distributed.barrier()
        if rank == "0":
            file.write_bytes(good)
    return report


def draw_random_number(state: dict[str, Any]) -> None:
    generator = torch.Generator()
    generator.set_state(state["rng"]["cpu"])
    torch.rand(1, generator=generator)
    state["rng"]["cpu"] = generator.get_state()


def move_one_bit(state: dict[str, Any]) -> None:
    local = state["model.norm.weight"].to_local()
    local[0] = torch.nextafter(local[0], torch.tensor(torch.inf))


def move_a_moment(state: dict[str, Any]) -> None:
    moments = state["state"]
    local = moments[min(moments)]["exp_avg"].to_local()
    local.view(-1)[0] += 1


jobs_file, output_file = sys.argv[1:]
torch.distributed.init_process_group("cpu:gloo")
jobs = torch.load(jobs_file, weights_only=False)
results = [run(jobs, job) for job in jobs["jobs"]]
if rank == "0":
    torch.save(results, output_file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
