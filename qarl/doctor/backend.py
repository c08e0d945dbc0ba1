"""Checks whether the backend supports the config, and whether its ranks divide into rollout engines."""

from __future__ import annotations

from qarl.checks.memory_terms import ranks
from qarl.checks.verl_plugin import refuse_hidden_code
from qarl.doctor.context import Context
from qarl.doctor.findings import Topic


def check_backend(context: Context, topic: Topic) -> None:
    """Whether the backend supports the config."""
    config = context.config
    if config.backend == "verl":
        from qarl.verl.checks import refuse_unsupported
        from qarl.verl.run import verl_config

        refused = not topic.passes(refuse_unsupported, config)
        verl_config(config, on_cpu=context.target.device == "cpu")
        if refused:
            return
    count, parallel = ranks(config), config.rollout.tensor_model_parallel_size
    replicas = f", {count // parallel} rollout engines of {parallel}" if config.backend == "verl" else ""
    topic.ok(f"backend={config.backend}: {count} trainer process{'es' * (count > 1)}{replicas}")


def check_engines(context: Context, topic: Topic) -> None:
    """Whether the ranks divide evenly into rollout engines. verl asserts this when it starts."""
    config = context.config
    count, parallel = ranks(config), config.rollout.tensor_model_parallel_size
    if config.backend != "verl":
        return
    if count % parallel:
        topic.error(
            f"trainer.nnodes * trainer.n_gpus_per_node = {count} ranks do not split into rollout engines of {parallel}",
            where="rollout.tensor_model_parallel_size",
            fix=f"choose a divisor of {count}",
        )
    if parallel > config.trainer.n_gpus_per_node:
        topic.warning(
            f"an engine of {parallel} GPUs spans several machines, which have {config.trainer.n_gpus_per_node} each",
            where="rollout.tensor_model_parallel_size",
            why="tensor parallelism across machines waits for the network in every layer",
            fix=f"choose at most {config.trainer.n_gpus_per_node}",
        )


def check_hidden_code(context: Context, topic: Topic) -> None:
    """Whether verl would run Python code from the model's folder."""
    if context.config.backend == "verl":
        refuse_hidden_code(context.config, context.tokenizer.get(), context.hf_config.get())


CHECKS = (check_backend, check_engines, check_hidden_code)
