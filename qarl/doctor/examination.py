"""Makes every check, topic by topic, and shows the findings as text or as JSON.

Beside the checks of a run (`qarl.checks.registry`) and of its model (`qarl.doctor.model`) these are checks of the
config's values and of its machine: backend, GPUs, threads, packages and disk.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args

from packaging.requirements import Requirement

from qarl.checkpoint import storage
from qarl.checks import registry
from qarl.checks.bands import band_widths, narrow_bands
from qarl.checks.check import (
    Check,
    Finding,
    Findings,
    RunInputs,
    Status,
    error,
    examine,
    note,
    ok,
    warning,
)
from qarl.checks.exact_threads import run_threads
from qarl.checks.inputs_record import Record
from qarl.checks.machine import Machine
from qarl.checks.memory import readable
from qarl.checks.memory_parts import ranks
from qarl.checks.model_size import ModelSize
from qarl.checks.room import check_room_of_size, run_bytes
from qarl.config import Config, check_writable
from qarl.config.hints import unread_paper_keys, unusual_values
from qarl.console import fit_terminal
from qarl.doctor import model
from qarl.process import package_versions
from qarl.trainer.resume import find_start, may_resume
from qarl.trainer.run_lock import check_free
from qarl.verl.resume import find_verl_start


def values(config: Config) -> Findings:
    for value in unusual_values(config):
        yield Finding.of(value, "warning")
    for text in unread_paper_keys(config):
        yield note(text, fix="nothing to do, if the key stands there only for completeness")


def bands(config: Config) -> Findings:
    """Say whether TBPO's bands are wide enough for the length of the responses."""
    if config.actor.loss != "tbpo":
        return
    if (narrow := narrow_bands(config)) is not None:
        yield Finding.of(narrow, "warning")
        return
    widths = band_widths(config).values()
    length = config.data.max_response_length
    yield ok(f"bands of {min(widths):.1e} to {max(widths):.1e} suit {length} tokens")


def backend(config: Config, machine: Machine) -> Findings:
    count = ranks(config)
    engines = ""
    if config.backend == "verl":
        from qarl.verl.checks import refuse_unsupported
        from qarl.verl.run import verl_config

        refuse_unsupported(config)
        verl_config(config, on_cpu=machine.on_cpu)
        workers = config.rollout.tensor_model_parallel_size
        copies = own_engines(config) or count // workers
        engines = f", {copies} rollout engines of {workers}"
    yield ok(
        f"backend={config.backend}: {count} trainer process{'es' if count > 1 else ''}{engines}"
    )


def own_engines(config: Config) -> int:
    """Return the number of engines that have GPUs of their own."""
    return config.rollout.n_gpus_per_node if config.trainer.staleness else 0


def gpus(config: Config, machine: Machine) -> Findings:
    required = config.trainer.n_gpus_per_node
    words = f"trainer.n_gpus_per_node is {required}"
    fix = f"set trainer.n_gpus_per_node={machine.gpus} or less"
    if engines := own_engines(config):
        words += f", and rollout.n_gpus_per_node {engines}"
        fix = f"make their sum at most {machine.gpus}, or set trainer.staleness=0"
        required += engines
    if machine.gpus is not None and machine.gpus < required:
        yield error(
            f"this machine has {machine.gpus} GPUs, but {words}",
            where="trainer.n_gpus_per_node",
            fix=fix,
        )


def threads(config: Config, machine: Machine) -> Findings:
    cores = len(os.sched_getaffinity(0))
    workers = config.trainer.n_gpus_per_node
    share = max(1, cores // workers)
    count = run_threads(config) if workers == 1 else config.trainer.num_threads or share
    what = f"{count} threads in each of {workers} processes on {cores} cores"
    if count * workers <= cores or (config.backend == "verl" and not machine.on_cpu):
        yield ok(what)
        return
    why = "more threads than cores wait for each other and make a step tens of times slower"
    yield warning(
        what, where="trainer.num_threads", why=why, fix=f"set trainer.num_threads={share}"
    )


def supported_versions(config: Config, machine: Machine) -> Findings:
    extra = {"extra": "cpu" if machine.on_cpu else "gpu"}
    for requirement in map(Requirement, importlib.metadata.requires("qarl") or []):
        marker = requirement.marker
        vllm = requirement.name.startswith("vllm")
        if marker and (not marker.evaluate(extra) or (not vllm and config.backend != "verl")):
            continue  # the extras hold vLLM, and packages that only verl needs
        version = package_versions([requirement.name]).get(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            supported = f"{requirement.name}{requirement.specifier}"
            yield warning(
                f"{requirement.name} {version} is installed, but only {supported} is supported",
                why="other versions are not tested: names of weights, kernels and settings change between versions",
                fix=f"pip install '{supported}', or make setup",
            )


def writable(config: Config) -> None:
    check_writable(config.run_dir)


def start(config: Config, read_record: Callable[[], Record]) -> Findings:
    """Say whether the run starts fresh or resumes from a checkpoint."""
    run_dir = config.run_dir
    record = read_record() if may_resume(config) else None
    check_free(run_dir)
    if config.backend == "verl":
        step, stays = find_verl_start(config, record)
        origin = config.trainer.resume_from_path or str(run_dir)
    else:
        begin = find_start(config, record)
        stays = begin.stays_in(run_dir)
        step = 0
        origin = ""
        if begin.checkpoint:
            step = begin.checkpoint.step
            origin = str(begin.checkpoint.folder)
        for folder, problem in begin.damaged:
            fix = "replace it with a good copy, or let the run continue from the earlier checkpoint"
            yield warning(
                f"{problem.what}: it will be renamed", where=str(folder), why=problem.why, fix=fix
            )
        for text in begin.notes:
            yield note(text, fix="nothing to do, if that is what you want")
    moves = not stays and storage.holds_a_run(run_dir)
    if step or not moves:
        yield ok(f"the run resumes from step {step} ({origin})" if step else "the run starts fresh")
    if moves:
        yield note(
            f"{run_dir} contains an earlier run, which will be moved to {run_dir}.1 or the next free number",
            fix="nothing to do, or choose a different name=...",
        )


def space(config: Config, size: ModelSize) -> Findings:
    try:
        check_room_of_size(config, size)
    except storage.StorageError as refusal:
        yield Finding.of(refusal)
        return
    run_dir = config.run_dir.absolute()
    trainer = config.trainer
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    sizes = run_bytes(config, size)
    free = shutil.disk_usage(existing).free
    verl = config.backend == "verl"
    keep = trainer.max_ckpt_to_keep
    saves = -(-trainer.total_training_steps // trainer.save_freq) if trainer.save_freq > 0 else 0
    if trainer.save_final and verl:
        saves = max(saves, 1)  # the export is made from a checkpoint
    if (
        keep is not None
    ):  # verl deletes an old checkpoint before the new one; the local backend, when that is complete
        saves = min(saves, keep if verl else keep + 1)
    export = sizes.export if trainer.save_final else 0
    needed = sizes.logs + export + saves * sizes.checkpoint
    what = (
        f"{readable(free)} free; the run needs {readable(needed)}: export {readable(export)}, and up to {saves} "
        f"checkpoints of {readable(sizes.checkpoint)} each"
    )
    by_time = 0
    if trainer.save_minutes > 0 and trainer.total_training_steps > 2:
        by_time = 2 * sizes.checkpoint
        what += (
            f"; if it takes longer than trainer.save_minutes={trainer.save_minutes:g}, up to 2 more"
        )
    status: Status = (
        "error" if free < needed else "warning" if free < needed + max(needed, by_time) else "ok"
    )
    fix = "free some space, set output_dir to another disk, or lower trainer.max_ckpt_to_keep"
    yield Finding(status, what, where=str(existing), fix=None if status == "ok" else fix)


MACHINE_CHECKS = (
    Check("values", "all values are usual", values),
    Check("backend", "the backend supports the config", backend),
    Check("machine", "the GPUs suffice", gpus, device="cuda"),
    Check("machine", "threads have cores", threads, here=True),
    Check("packages", "all packages have supported versions", supported_versions, here=True),
    Check("disk", "the run folder can be written to", writable, here=True),
    Check("disk", "the run can start", start, here=True),
    Check("disk", "the disk has space", space, here=True),
    Check("loss", "TBPO's bands suit the responses", bands),
)


TOPICS = (
    *(
        "values",
        "backend",
        "machine",
        "packages",
        "model",
        "weights",
        "ignore list",
        "layer sizes",
        "kernels",
    ),
    *("published tensors", "memory", "disk", "data", "loss"),
)
CHECKS = (*registry.CHECKS, *MACHINE_CHECKS, *model.CHECKS)
STATUSES: tuple[Status, ...] = get_args(Status)
_WIDTH = 118


def run_checks(config: Config, target: Machine) -> Report:
    """Make every check for `config` on `target`, without starting an engine, loading weights or writing files."""
    inputs = RunInputs(config, target, plan=True)
    findings = [*examine(inputs, CHECKS)]
    findings.sort(key=lambda finding: TOPICS.index(finding.topic))
    return Report(config.name, target.name, tuple(findings))


@dataclass(frozen=True)
class Report:
    """All findings, ordered by topic."""

    name: str
    target: str
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> dict[Status, int]:
        return {
            status: sum(finding.status == status for finding in self.findings)
            for status in STATUSES
        }

    @property
    def exit_code(self) -> int:
        """1 if the run would fail, else 0."""
        return 1 if self.counts["error"] else 0

    def __str__(self) -> str:
        lines = [f"{self.name}, on {self.target}"]
        for topic, findings in itertools.groupby(self.findings, key=lambda finding: finding.topic):
            lines += ["", topic, *map(as_text, findings)]
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        verdict = (
            "the run would fail" if self.exit_code else "nothing was found that would stop the run"
        )
        return "\n".join([*lines, "", f"{verdict}: {counts}"])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types: exit code, counts, and one mapping per finding, without empty fields."""
        findings = [
            {key: value for key, value in asdict(finding).items() if value}
            for finding in self.findings
        ]
        about = {"name": self.name, "target": self.target, "exit_code": self.exit_code}
        return {**about, "counts": self.counts, "findings": findings}


def as_text(finding: Finding) -> str:
    told = [(label, getattr(finding, label)) for label in ("where", "why", "fix")]
    lines = [
        f"  {finding.status:8} {finding.what}",
        *(f"{'':11}{label}: {text}" for label, text in told if text),
    ]
    text = fit_terminal("\n".join(lines), _WIDTH)
    indented = [" " * 11 + line for line in finding.lines]
    return "\n".join([text, *indented])
