"""The pieces of verl that read its config, run without Ray and vLLM: what test_config_reach_verl.py looks at.

    python reach_verl.py FOLDER OUTPUT KEY ...

observes every row of these keys in one process, because verl's platform is chosen once and has to be the CPU. The
trainer is verl's own with a stand-in for the stages that need a rollout; the actor's worker is real, on one gloo rank;
the server is real up to the engine's arguments, which vLLM's own parser reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import io
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reach_rows import Notes, Refused, make_files, merged
from reach_verl_actor import Actor, Store, tq_replaced

from qarl.process import vllm_without_device

VERL = {"backend": "verl", "trainer.num_threads": 1}
"""On top of reach_local's base."""


class Verl:
    """The run of `changes`, in the current folder."""

    def __init__(self, changes: dict[str, Any], noise: float = 0.0) -> None:
        from qarl.config import build_config

        self.config, self.noise = build_config(merged(**VERL | changes)), noise

    @functools.cached_property
    def resolved(self) -> Any:
        """verl's whole config, as `python -m qarl.train` hands it over."""
        from omegaconf import OmegaConf

        from qarl.verl.run import verl_config

        composed = verl_config(self.config, on_cpu=True)
        OmegaConf.resolve(composed)
        return composed

    @functools.cached_property
    def trainer(self) -> Any:
        """verl's trainer with its tokenizer, data and what the config decides; `global_steps` is 1."""
        from verl.trainer.ppo.v1 import get_trainer_cls

        trainer: Any = object.__new__(get_trainer_cls(self.resolved.trainer.v1.trainer_mode))
        trainer.config, trainer.trainer_mode, trainer.parameter_sync_step = self.resolved, "sync", 1
        trainer.use_critic = trainer.use_reference_policy = trainer.use_teacher_policy = False
        trainer.global_steps, trainer.local_trigger_step = 1, 0
        trainer.checkpoint_callback = SimpleNamespace(on_save=lambda **more: None)
        trainer._init_tokenizer()
        trainer._init_dataloader()
        return trainer

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        """The first training batch as verl's dataset gives it: messages rendered by the model's tokenizer."""
        batch = next(iter(self.trainer.train_dataloader))
        tokenizer = self.trainer.tokenizer
        return [tokenizer.apply_chat_template(list(row), return_dict=False) for row in batch["raw_prompt"]]

    @functools.cached_property
    def events(self) -> list[tuple[str, int]]:
        """The actions of verl's training loop by step: `step`, `validate`, `save`."""
        trainer, events = copy.copy(self.trainer), []

        def note(what: str, answer: Any = None) -> Any:
            def noted(*arguments: Any, **more: Any) -> Any:
                events.append((what, trainer.global_steps))
                return answer

            return noted

        def nothing(*arguments: Any, **more: Any) -> dict[str, Any]:
            return {}

        trainer.step = note("step", SimpleNamespace(keys=[], partition_id="train"))
        trainer._validate, trainer._save_checkpoint = note("validate", {"x": 1.0}), note("save")
        trainer.checkpoint_manager = SimpleNamespace(update_weights=nothing)
        hooks = ("on_step_begin", "on_validate_begin", "on_validate_end", "on_train_begin")
        stages = ("_start_profiling", "_stop_profiling", "_consume_sync_metrics", "_compute_metrics")
        for name in (*hooks, *stages, "_reissue_inflight_prompts", "on_train_end", "_shutdown_dump_executor"):
            setattr(trainer, name, nothing)
        trainer.global_steps = 0
        with tq_replaced("verl.trainer.ppo.v1.trainer_base", Store()):
            trainer.fit(None)
        return events

    @functools.cached_property
    def saved(self) -> dict[str, Any]:
        """The calls of verl's `_save_checkpoint` to the workers, and where it wrote."""
        found: dict[str, Any] = {}

        def save(path: str, remote: Any, step: int, max_ckpt_to_keep: Any) -> None:
            found.update(path=os.path.relpath(Path(path).parent), keep=max_ckpt_to_keep)

        trainer = copy.copy(self.trainer)
        trainer.actor_rollout_wg = SimpleNamespace(save_checkpoint=save)
        trainer._save_checkpoint()
        return found

    @functools.cached_property
    def resumed(self) -> int:
        """The step that verl resumes from; steps 1 and 2 were saved."""
        for step in (1, 2):
            Path(f"runs/reach/checkpoints/global_step_{step}").mkdir(parents=True, exist_ok=True)
        Path("runs/reach/checkpoints/latest_checkpointed_iteration.txt").write_text("2")
        trainer = copy.copy(self.trainer)
        trainer.actor_rollout_wg = SimpleNamespace(load_checkpoint=lambda **more: None)
        trainer._load_checkpoint()
        return int(trainer.global_steps)

    @functools.cached_property
    def pools(self) -> dict[str, list[int]]:
        """GPUs of each node, as verl asks Ray for them."""
        self.trainer._init_resource_pool_mgr()
        return dict(self.trainer.resource_pool_manager.resource_pool_spec)

    @functools.cached_property
    def server(self) -> Any:
        """verl's server, up to the engine: `arguments` is vLLM's `AsyncEngineArgs`."""
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.rollout.vllm_rollout.vllm_async_server import AsyncEngineArgs, vLLMHttpServer

        if why_not := vllm_without_device():
            raise NoDeviceError(why_not)

        class Server(vLLMHttpServer):
            async def run_server(self, args: Any) -> None:
                self.arguments = AsyncEngineArgs.from_cli_args(args)

        server: Any = object.__new__(Server)
        rollout, model = self.resolved.actor_rollout_ref.rollout, self.resolved.actor_rollout_ref.model
        server.config, server.model_config = omega_conf_to_dataclass(rollout), omega_conf_to_dataclass(model)
        server.replica_rank = server.node_rank = 0
        server.nnodes, server.gpus_per_node, server.workers = 1, 1, []
        server._disaggregation_role, server._should_profile = "null", lambda: False
        asyncio.run(server.launch_server())
        return server

    @property
    def engine(self) -> Any:
        """vLLM's arguments."""
        return self.server.arguments

    def sampled(self, validate: bool = False) -> list[dict[str, Any]]:
        """The sampling parameters of each response to one prompt, from verl's agent loop worker."""
        from verl.trainer.ppo.v1 import agent_loop_tq

        found: list[dict[str, Any]] = []

        async def run_agent_loop(worker: Any, sampling_params: dict[str, Any], **more: Any) -> None:
            found.append(dict(sampling_params))

        actor: Any = agent_loop_tq.AgentLoopWorkerTQ
        base = actor.__ray_metadata__.modified_class
        worker: Any = object.__new__(type("AgentLoops", (base,), {"_run_agent_loop": run_agent_loop}))
        worker.config, worker.background_tasks = self.resolved, set()

        async def generate() -> None:
            from verl.utils import tensordict_utils as tu

            batch = tu.get_tensordict({"uid": ["a"], "index": [0]}, {"global_steps": 1, "validate": validate})
            await worker.generate_sequences(batch)
            await asyncio.gather(*worker.background_tasks)

        with tq_replaced("verl.trainer.ppo.v1.agent_loop_tq", Store()):
            asyncio.run(generate())
        return found

    @functools.cached_property
    def reward(self) -> float:
        from verl.trainer.ppo.reward import get_custom_reward_fn

        function: Any = get_custom_reward_fn(self.resolved)
        return float(function(data_source="x", solution_str="t5 t40", ground_truth="7", extra_info={}))

    @functools.cached_property
    def actor(self) -> Actor:
        return Actor(self)

    @property
    def notes(self) -> Notes:
        return self.actor.notes

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Values of each step of the actor."""
        return self.actor.metrics

    @property
    def module(self) -> Any:
        """The model of verl's engine."""
        return self.actor.worker.actor.engine.module

    @functools.cached_property
    def published(self) -> dict[str, tuple[int, ...]]:
        stream, _ = self.actor.worker.actor.engine.get_per_tensor_param()
        return {name: tuple(tensor.shape) for name, tensor in stream if not name.startswith("qarl.")}

    def first_words(self, dataset: Any) -> set[str]:
        """The first word of each prompt of a dataset of verl's."""
        return {dataset[i]["raw_prompt"][0]["content"].split()[0] for i in range(len(dataset))}

    @functools.cached_property
    def dispatched(self) -> str:
        """Which backend the command line starts."""
        import qarl.trainer.loop
        import qarl.verl.run
        from qarl import train

        started = ["nothing"]

        def start(name: str) -> Any:
            def run(*arguments: Any, **more: Any) -> dict[str, Any]:
                started.append(name)
                return {"steps": 0, "interrupted": False}

            return run

        Path("dispatched.yaml").write_text(self.config.resolved_yaml())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(qarl.verl.run, "train", start("verl"))
            patch.setattr(qarl.trainer.loop, "train", start("local"))
            train.main(["config=dispatched.yaml"])
        return started[-1]

    @functools.cached_property
    def ended(self) -> dict[str, Any]:
        """Our side of a verl run while verl logs a step, and at the end."""
        import qarl.verl.run as backend
        from qarl.verl.keys import set_environment

        def run_ppo(resolved: Any, **more: Any) -> None:
            line = {"step": 1, "data": {"critic/score/mean": 0.5, "timing_s/step": 1.0}}
            Path(os.environ["VERL_FILE_LOGGER_PATH"]).write_text(json.dumps(line) + "\n")

        exports: list[Any] = []

        def export(*arguments: Any) -> dict[str, Any]:
            exports.append(arguments)
            return {}

        output = io.StringIO()
        config = self.config.model_copy(update={"output_dir": tempfile.mkdtemp(dir=".")})
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
            set_environment(config, True)
            patch.setattr("verl.trainer.main_ppo.run_ppo", run_ppo)
            patch.setattr(backend, "export_final", export)
            backend.run(config, self.resolved, 0.0, 0)
        files = {path.name for path in config.run_dir.iterdir()}
        return {"files": files, "exports": len(exports), "output": output.getvalue()}

    @functools.cached_property
    def environment(self) -> dict[str, str]:
        """The environment of every worker of Ray, as verl merges it."""
        from omegaconf import OmegaConf
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        runtime = self.resolved.ray_kwargs.ray_init.runtime_env
        merged_env = OmegaConf.merge(get_ppo_ray_runtime_env(self.resolved), runtime)
        environment: Any = OmegaConf.to_container(merged_env, resolve=True)
        found: dict[str, str] = environment["env_vars"]
        return found


def compose_once() -> None:
    """Hydra reads verl's files at every composition: here it does once, which is a third of the time."""
    import hydra

    module: Any = hydra
    compose = functools.cache(hydra.compose)
    module.compose = lambda config_name: copy.deepcopy(compose(config_name=config_name))


class NoDeviceError(Exception):
    """vLLM has none, so it parses no arguments."""


def observe(folder: Path, keys: list[str]) -> dict[str, Any]:
    """For each row of `keys`, by its place in the table, what it observes before and after, or the traceback, or why it
    is skipped."""
    from reach_verl_rows import ROWS

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("cpu:gloo", rank=0, world_size=1, store=store)
    make_files(folder)
    os.chdir(folder)
    compose_once()
    import verl.trainer.main_ppo  # noqa: F401  what is collected in vain

    gc.collect()
    gc.freeze()  # verl collects whenever it builds an actor
    made: dict[str, Verl] = {}
    found: dict[str, Any] = {}
    for parameter in ROWS:
        key, row = parameter.values
        if isinstance(row, Refused) or parameter.id not in keys:
            continue
        try:
            before = made.setdefault(repr((row.given, row.stub)), Verl(row.given, **row.stub))
            after = Verl(row.given | row.also | {key: row.value}, **row.stub)
            found[parameter.id] = (row.observe(before), row.observe(after))
        except NoDeviceError as error:
            found[parameter.id] = {"skipped": str(error)}
        except Exception:
            found[parameter.id] = traceback.format_exc()
    return found


if __name__ == "__main__":
    os.environ["VERL_PLATFORM"] = "cpu"
    torch.save(observe(Path(sys.argv[1]), sys.argv[3:]), sys.argv[2])
    torch.distributed.destroy_process_group()
