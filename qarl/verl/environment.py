"""The environment variables of the processes of a run in verl."""

from __future__ import annotations

import os
import sys

from qarl import plugins
from qarl.config import Config
from qarl.errors import UserError
from qarl.kernels.cuda import whole_sums
from qarl.process import VLLM_ENVIRONMENT, waiting_threads
from qarl.progress import live


def set_environment(config: Config, on_cpu: bool) -> None:
    """Set the variables of `worker_environment` in this process too. If verl has been imported before, its plugins did
    not see VERL_PLATFORM, so register QaRL's platform now."""
    check_sockets(config, on_cpu)
    os.environ.update(worker_environment(config, on_cpu))
    if "verl" in sys.modules:
        from qarl.verl.entry_point import register_cpu

        register_cpu()


LONGEST_SOCKET = 107
"""Most bytes in the path of a Unix socket."""
SOCKET = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""What Ray appends to its folder, with a process id of seven digits."""
TEMP_DIR = "ray_kwargs.ray_init._temp_dir"
"""verl's key for Ray's folder. Without it the folder is `ray` in that of temporary files."""


def check_sockets(config: Config, on_cpu: bool) -> None:
    """Raise UserError if the run would start a Ray whose sockets get too long a path, which Ray notices late.

    On a CPU a run always starts its own Ray, otherwise unless RAY_ADDRESS names one."""
    if os.environ.get("RAY_ADDRESS") and not on_cpu:
        return
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    folder = os.environ.get(name, "/tmp")
    appended = f"/ray{SOCKET}"
    where = f"the environment variable {name}"
    fix = "set RAY_TMPDIR to a short folder, such as /tmp"
    if own := config.verl.get(TEMP_DIR) or config.verl.get(f"+{TEMP_DIR}"):
        folder, appended, where = str(own), SOCKET, f"verl.{TEMP_DIR}"
        fix = "set it to a folder with a short path"
    limit = LONGEST_SOCKET - len(appended)
    if len(os.fsencode(folder)) > limit:
        raise UserError(
            f"the folder of temporary files is too long for Ray: {folder}",
            where=where,
            why=f"Ray's sockets are in it, whose paths have at most {LONGEST_SOCKET} bytes, so it has at most {limit}",
            fix=fix,
        )


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
            "RAY_worker_niceness": "0",  # Ray's default, 15, starves its workers beside any other job
            # Even in eager mode vLLM compiles two sampling helpers, which takes half a minute at the first request.
            "TORCHDYNAMO_DISABLE": "1",
            # This turns off multiprocessing, so vLLM's worker runs in the engine's process, which saves an import.
            **VLLM_ENVIRONMENT,
        }
    else:
        defaults |= whole_sums.variables(asked=config.quant.align.zero_mismatch)
    variables = {name: os.environ.get(name, value) for name, value in defaults.items()}
    variables |= {
        name: os.environ[name]
        for name in ("VERL_PLATFORM", "QARL_PUBLISH_TIMEOUT", plugins.VARIABLE, live.VARIABLE)
        if os.environ.get(name)
    }
    threads = config.trainer.num_threads or os.environ.get("OMP_NUM_THREADS")
    if (
        on_cpu and not threads
    ):  # trainer processes share the cores, and engines use the same cores at other times
        threads = max(1, len(os.sched_getaffinity(0)) // config.trainer.n_gpus_per_node)
    if threads:  # otherwise Ray sets it to the number of CPUs that the worker requested
        variables["OMP_NUM_THREADS"] = str(threads)
        variables |= waiting_threads(int(threads)) if str(threads).isdecimal() else {}
    if not config.trainer.progress:
        variables[live.VARIABLE] = live.OFF
    if config.trainer.report:
        variables |= {"QARL_SAMPLES_IN": str(config.run_dir.resolve())}
    return variables | {"VERL_FILE_LOGGER_PATH": str((config.run_dir / "verl.jsonl").resolve())}
