"""Prepares a verl run before verl is imported: environment variables, paths for workers and a memory estimate."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from qarl.config import Config
from qarl.errors import UserError
from qarl.process import VLLM_ENVIRONMENT

UNKNOWN_GPU_BYTES = int(79.2 * 2**30)
"""Memory that an 80 GB GPU reports. Estimates on a machine without a GPU use it."""


def set_environment(config: Config, on_cpu: bool) -> None:
    """Set the variables of `worker_environment` in this process too. If verl has been imported before, its plugins did
    not see VERL_PLATFORM, so register QaRL's platform now."""
    os.environ.update(worker_environment(config, on_cpu))
    if "verl" in sys.modules:
        from qarl.verl.plugin.plugin import install

        install()


def worker_environment(config: Config, on_cpu: bool) -> dict[str, str]:
    """Return the variables that verl, Ray and vLLM read in every process. Values that the user has set are kept.

    Ray's runtime environment carries them to the workers. Without it a worker inherits only the environment of the Ray
    daemon on its machine. The daemon lacks the driver's variables if Ray was started earlier or on a different machine.
    """
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOG_STATS_INTERVAL": "600",  # otherwise vLLM logs a line every ten seconds
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "true",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    if on_cpu:
        defaults |= {
            "VERL_PLATFORM": "cpu",
            # Even in eager mode vLLM compiles two sampling helpers, which takes half a minute at the first request.
            "TORCHDYNAMO_DISABLE": "1",
            # This turns off multiprocessing, so vLLM's worker runs in the engine's process, which saves an import.
            **VLLM_ENVIRONMENT,
        }
    elif platform := os.environ.get("VERL_PLATFORM"):
        defaults["VERL_PLATFORM"] = platform
    if limit := os.environ.get("QARL_PUBLISH_TIMEOUT"):
        defaults["QARL_PUBLISH_TIMEOUT"] = limit
    variables = {name: os.environ.get(name, value) for name, value in defaults.items()}
    if threads := worker_threads(config, on_cpu):
        variables["OMP_NUM_THREADS"] = threads
    if config.trainer.report:
        variables |= {"QARL_SAMPLES_IN": str(config.run_dir.resolve())}
    return variables | {"VERL_FILE_LOGGER_PATH": str((config.run_dir / "verl.jsonl").resolve())}


def worker_threads(config: Config, on_cpu: bool) -> str | None:
    """Return OMP_NUM_THREADS for a worker, or None to let Ray set it to the number of CPUs that the worker requested.

    On a CPU the trainer processes share a machine's cores equally. Rollout engines use the same cores at other times.
    """
    wanted, given = config.trainer.num_threads, os.environ.get("OMP_NUM_THREADS", "")
    if wanted is not None:
        return str(wanted)
    if given.partition(",")[0].isdecimal():
        return given
    return str(max(1, len(os.sched_getaffinity(0)) // config.trainer.n_gpus_per_node)) if on_cpu else None


def local_path(path: str) -> str:
    """Return a folder as an absolute path, because workers start in other folders. Return a Hub name unchanged."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def memory_lines(config: Config, *, on_cpu: bool) -> list[str]:
    """Return the memory estimate of one rank as lines, one per part. If there is no GPU, assume one of 80 GB."""
    import torch

    from qarl.checks.memory import OFFLOAD, estimate, readable
    from qarl.checks.model import applied_level
    from qarl.checks.model_folder import hf_config_or_carried
    from qarl.checks.model_size import ModelSize

    device, gpu_memory = ("cpu", 0) if on_cpu else ("cuda", UNKNOWN_GPU_BYTES)
    if not on_cpu and torch.cuda.is_available():
        gpu_memory = torch.cuda.get_device_properties(0).total_memory
    try:
        hf_config, _ = hf_config_or_carried(config.model.path, config.model.trust_remote_code)
        size = ModelSize.from_config(hf_config)
    except (UserError, KeyError) as error:
        return [f"memory: not estimated ({str(error).splitlines()[0]}); python -m qarl.doctor says more"]
    found = estimate(
        size,
        config,
        device=device,
        gpu_memory_bytes=gpu_memory,
        align=applied_level(config, hf_config, device)[0],
        kernels={},
        offload=all(config.verl.get(key) for key in OFFLOAD),
    )
    phase, needed = found.peak
    where = f"{device} of {readable(gpu_memory)}" if gpu_memory else device
    host = [f"host memory, {line}" for line in found.host_lines()]
    return [f"memory of one rank ({where}): {readable(needed)} at most ({phase})", *found.table(), *host]
