"""Checks the machine: the CPU's instructions or the GPUs, and the number of threads that the run will use."""

from __future__ import annotations

import os

import torch

from qarl.checks import driver, machine
from qarl.checks.kernels import check_capability
from qarl.checks.memory_terms import GIB
from qarl.doctor.context import Context
from qarl.doctor.findings import Topic
from qarl.rollout.engine_config import check_served

NEEDS_CAPABILITY = {
    "bf16": (80, "BF16 arithmetic"),
    "w4a16": (80, "vLLM's Marlin kernel"),
    "w8a8": (80, "BF16 arithmetic"),
    "fp8": (80, "BF16 arithmetic"),
}
"""The compute capability, times ten, that each scheme needs on a GPU, and the feature that needs this capability.
`check_capability` has the limits that training checks too."""


def check_cpu(context: Context, topic: Topic) -> None:
    """Whether this CPU has the instructions that the scheme needs."""
    if context.target.device != "cpu":
        return
    if topic.passes(machine.check_cpu, context.config):
        wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
        found = [flag for flag in wanted if flag in machine.cpu_flags()]
        topic.ok(f"this CPU can run quant.scheme={context.config.quant.scheme} ({', '.join(found) or 'flags unknown'})")
    if torch.cpu._is_amx_tile_supported():
        topic.note(
            "this CPU has AMX tiles",
            why="vLLM chooses different kernels with AMX. quant.align=exact stays exact, but at quant.align=model one "
            "attention output in 10,000 differs by a BF16 step, even for the first tokens",
            fix="set quant.align=exact if δ must be 0",
        )


def check_gpu(context: Context, topic: Topic) -> None:
    """Whether the GPUs suffice for the scheme and the number of ranks."""
    target, config = context.target, context.config
    if target.device != "cuda":
        return
    topic.passes(check_served, config.quant.scheme, config.quant.kernels)
    needed, why = NEEDS_CAPABILITY.get(config.quant.scheme, (0, ""))
    if target.capability is None:
        topic.note(
            "the GPU's compute capability is not known, so it was not checked against quant.scheme",
            fix="set doctor.gpu_capability, for example to 9.0",
        )
    elif not topic.passes(check_capability, config.quant.scheme, config.quant.kernels, target.capability):
        pass
    elif target.capability < needed:
        topic.error(
            f"compute capability {target.capability / 10} is too low for quant.scheme={config.quant.scheme}",
            where="quant.scheme",
            why=f"{needed / 10} is needed for {why}",
            fix="use a newer GPU",
        )
    elif needed:
        memory = "" if target.gpu_memory_bytes is None else f", {target.gpu_memory_bytes / GIB:.1f} GiB each"
        topic.ok(f"compute capability {target.capability / 10}{memory}: enough for quant.scheme={config.quant.scheme}")
    wanted = config.trainer.n_gpus_per_node
    if target.gpus is not None and target.gpus < wanted:
        topic.error(
            f"this machine has {target.gpus} GPUs, but trainer.n_gpus_per_node is {wanted}",
            where="trainer.n_gpus_per_node",
            fix=f"set trainer.n_gpus_per_node={target.gpus} or less",
        )
    topic.note("on GPUs the trainer's kernels and alignment have not been measured yet", fix="watch mismatch/abs_mean")


def check_elsewhere(context: Context, topic: Topic) -> None:
    """Report which parts of the machine were not checked."""
    if not context.target.here:
        topic.note(
            "the run is checked for a different machine, so this machine's CPU, threads, memory, disk and packages "
            "are not checked",
            fix="run the doctor there too, without doctor.device",
        )
    elif context.config.trainer.nnodes > 1:
        others = context.config.trainer.nnodes - 1
        topic.note(f"the other {others} machines are assumed to be like this one", fix="run the doctor there too")


def check_driver(context: Context, topic: Topic) -> None:
    """Whether the NVIDIA driver can run PyTorch's CUDA release."""
    version = driver.driver_version()
    if context.target.here and version is not None and topic.passes(driver.check_driver):
        topic.ok(f"NVIDIA driver {version}; PyTorch is built with CUDA {torch.version.cuda or 'none: a CPU build'}")


def check_compiler(context: Context, topic: Topic) -> None:
    """Whether Triton can compile on this machine."""
    if context.target.here and context.target.device == "cuda" and topic.passes(driver.check_compiler):
        topic.ok("Triton has a C compiler and Python's headers")


def check_threads(context: Context, topic: Topic) -> None:
    """Whether the run uses at most as many threads as there are cores."""
    if not context.target.here:
        return
    cores = len(os.sched_getaffinity(0))
    given, wanted = context.threads_given, context.config.trainer.num_threads
    number = (given or "").partition(",")[0]
    if given and not number.isdecimal():
        topic.note(f"OMP_NUM_THREADS={given} is not a number and is not used", fix="set it to a number, or unset it")
    verl = context.config.backend == "verl"
    ranks = context.config.trainer.n_gpus_per_node if verl else 1
    if verl and context.target.device == "cuda" and not wanted and not number.isdecimal():
        topic.ok("each worker runs as many threads as the CPUs that it requests from Ray")
        return
    threads = wanted or (int(number) if number.isdecimal() and int(number) else 0) or max(1, cores // ranks)
    default = "all cores" if ranks == 1 else "a worker's share of the cores"
    source = "trainer.num_threads" if wanted else "OMP_NUM_THREADS" if number.isdecimal() else default
    each = f" in each of {ranks} workers" if ranks > 1 else ""
    if threads * ranks > cores:
        topic.warning(
            f"{threads} threads ({source}){each} on {cores} cores",
            where=source,
            why="more threads than cores wait for each other and make a step tens of times slower",
            fix=fewer_threads(threads, ranks, cores),
        )
    else:
        topic.ok(f"{threads} thread{'s' * (threads > 1)} ({source}){each} on {cores} cores")


def fewer_threads(threads: int, ranks: int, cores: int) -> str:
    """Return the advice for `ranks` workers that run `threads` threads each on fewer than `threads * ranks` cores."""
    if ranks <= cores:
        return f"set trainer.num_threads={cores // ranks}" + (" or less" if cores // ranks > 1 else "")
    workers = f"use {cores} worker{'s' * (cores > 1)} or fewer: trainer.n_gpus_per_node={cores}"
    return workers if threads == 1 else f"set trainer.num_threads=1, and {workers}"


CHECKS = (check_elsewhere, check_cpu, check_driver, check_compiler, check_gpu, check_threads)
