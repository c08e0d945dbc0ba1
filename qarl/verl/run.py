"""The verl backend: translates our config into verl's and runs verl's PPO trainer with it.

`verl_config` starts from verl's own `ppo_trainer` config, so a key that verl no longer has is an error here, not a
silent no-op. Configs that verl cannot run are refused (`qarl.verl.checks`).

The algorithm is that of `qarl.trainer.local`, but it runs on Ray, FSDP2 and vLLM servers. `qarl.verl` adds the
parts that verl lacks. Statements here about verl were checked against the source of verl 0.9.1.

verl's logger writes one line `{"step": n, "data": {...}}` per step to `VERL_FILE_LOGGER_PATH`
(verl/utils/tracking.py). During the run a thread reads this file and logs each step through QaRL's tracker
(`MetricsFollower`). A metric that the local backend also logs gets the local backend's name. `trainer.logger` chooses
QaRL's loggers, not verl's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from qarl.checkpoint.read_weights import whole_and_torn
from qarl.checkpoint.storage import StorageError, checkpoints_dir, write_json, write_text, writing
from qarl.checks.inputs_record import RECORD_FILE
from qarl.checks.machine import this_machine
from qarl.checks.model import applied_level, lower_level
from qarl.checks.registry import check_run
from qarl.config import Config, write_resolved
from qarl.console import say, stage
from qarl.errors import UserError
from qarl.metrics.tracker import Tracker, read_metrics, write_versions
from qarl.process import runs_on_cpu
from qarl.report.page import update_report
from qarl.trainer.finish import finish_run
from qarl.verl import checks
from qarl.verl.ask_servers import KILLED, RESUME
from qarl.verl.checkpoint import check_room, open_verl_run
from qarl.verl.config import hf_config_of, set_environment, verl_keys

UNKNOWN_GPU_BYTES = int(79.2 * 2**30)
"""Memory that an 80 GB GPU reports. Estimates on a machine without a GPU use it."""
RENAMED = {
    "timing_s/gen": "timing_s/rollout",
    "timing_s/update_actor": "timing_s/update",
    "timing_s/update_weights": "timing_s/publish",
    "timing_s/testing": "timing_s/eval",
}
"""Maps verl's metric names to the local backend's names, for quantities that both backends log."""

_OURS = tuple(f"actor/{group}/" for group in ("correction", "mismatch", "publish", "tokens", "error_tokens", "rollout"))
_ACCURACY = re.compile(r"val-core/.*/(acc|reward)/mean@1$")


def train(config: Config, *, started: float | None = None) -> dict[str, Any]:
    """Run `config` in verl until it ends or Ctrl-C stops it. Return the content of `summary.json`."""
    start = time.perf_counter() if started is None else started
    on_cpu = runs_on_cpu(config.backend)
    checks.refuse_unsupported(config)
    set_environment(config, on_cpu)
    with stage("checking data, model and machine", imports=True):
        run = check_run(config)
        check_room(config, run)
        record = run.record
        run.reward_fn.stop()  # from now on Ray's workers call it
    resolved = verl_config(config, on_cpu=on_cpu)
    with open_verl_run(config, record) as start_step:
        write_resolved(config, config.run_dir / "config.yaml")
        write_json(config.run_dir / RECORD_FILE, record)
        return _run(config, resolved, start, start_step)


def _run(config: Config, resolved: Any, start: float, start_step: int) -> dict[str, Any]:
    """Run verl's trainer from `start_step` and return the summary. The caller must hold the lock of the run folder."""
    import ray
    from verl.trainer.main_ppo import run_ppo

    from qarl.trainer.loop import summarize
    from qarl.verl.task_runner import TaskRunner

    write_versions(config.run_dir)
    write_text(config.run_dir / "verl.yaml", as_yaml(resolved))
    say("starting Ray, verl's trainer and the rollout engines (vLLM) ...")
    failure: BaseException | None = None
    checkpoints = checkpoints_dir(config.run_dir)
    with MetricsFollower(config, Path(os.environ["VERL_FILE_LOGGER_PATH"]), start, start_step=start_step) as follower:
        try:
            with answered_interrupt(lambda: what_resumes(checkpoints)):
                run_ppo(resolved, task_runner_class=TaskRunner)
        except BaseException as error:
            failure = as_user_error(error, checkpoints) or error
        finally:
            ray.shutdown()
    history, total = read_metrics(config.run_dir), config.trainer.total_training_steps
    # A run that did not end by itself is not finished, even if its last step was logged.
    step = max((entry["step"] for entry in history), default=0) if failure is None else 0
    interrupted = isinstance(failure, KeyboardInterrupt)
    summary = summarize(history) | {
        "backend": "verl",
        **{f"quant_{key}": getattr(config.quant, key) for key in ("scheme", "kernels", "align")},
        "interrupted": interrupted,
        "seconds": time.perf_counter() - start,
    }
    return finish_run(
        config.run_dir,
        summary,
        None if interrupted else failure,
        follower.problem,
        step=step,
        total=total,
        save=partial(export_final, config) if config.trainer.save_final and step >= total else None,
        plots=config.trainer.plots and bool(history),
        report=config.trainer.report,
    )


def our_names(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one step under QaRL's names. A metric that QaRL has no name for keeps verl's name."""
    # verl adds the prefix to every metric of an actor.
    plain = {name.removeprefix("actor/") if name.startswith(_OURS) else name: value for name, value in metrics.items()}
    named = {RENAMED.get(name, name): value for name, value in plain.items() if isinstance(value, int | float)}
    accuracies = [value for name, value in named.items() if _ACCURACY.match(name)]
    if len(accuracies) == 1:  # for several data sources verl logs one accuracy each, but not their sizes
        named["val/accuracy"] = accuracies[0]
    return named


class MetricsFollower:
    """Logs the lines that verl adds to `path`, in a thread that runs from `__enter__` to `__exit__`.

    `start`: `time.perf_counter()` at the program's start. `start_step`: the step after which a resumed run continues.
    """

    def __init__(self, config: Config, path: Path, start: float, *, start_step: int = 0) -> None:
        self.config, self.path, self.start, self.start_step = config, path, start, start_step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._offset = 0
        self._lost: StorageError | None = None

    def __enter__(self) -> MetricsFollower:
        trainer, config = self.config.trainer, self.config.model_dump()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")
        steps: dict[str, Any] = {"total_steps": trainer.total_training_steps, "start_step": self.start_step}
        self._tracker = Tracker(self.config.run_dir, trainer.logger, config_dict=config, **steps)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        self._tracker.close()

    @property
    def problem(self) -> UserError | None:
        """The first error while storing metrics or of a logger. It does not stop the training."""
        return self._tracker.problem or self._lost

    def _follow(self) -> None:
        while not self._stop.wait(0.2):
            self._read()

    def _read(self) -> None:
        """Log all complete new lines. Keep the first StorageError for `problem`. Print a warning for other errors."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        for line in new.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            try:
                self._log(json.loads(line))
            except StorageError as error:
                self._lost = self._lost or error
            except Exception as error:  # later lines must still be logged
                say(f"warning: a line of {self.path} was not logged ({type(error).__name__}: {str(error)[:300]})")
            self._offset += len(line)

    def _log(self, entry: Mapping[str, Any]) -> None:
        metrics = our_names(entry["data"])
        if entry["step"] == self.start_step + 1:
            metrics["startup/seconds_to_first_step"] = time.perf_counter() - self.start
        self._tracker.log(metrics, step=entry["step"])
        update_report(self.config, entry["step"])


def export_final(config: Config, output: Path) -> Path:
    """Export the final model from verl's last checkpoint to the folder `output`, and return it.

    Raise UserError if the disk is full or the files of some ranks are not on this machine. The checkpoint stays.
    """
    from qarl.checkpoint.export import ExportRequest, export

    step, trust = config.trainer.total_training_steps, config.model.trust_remote_code
    try:
        print(export(ExportRequest(config.run_dir, output, step, overwrite=True, trust_remote_code=trust)))
    except UserError as error:
        fix = f"{error.fix}; then run python -m qarl.export run={config.run_dir} output={output}"
        what = f"the trained model could not be exported: {error.what}"
        raise UserError(what, where=error.where, why=error.why, fix=fix) from error
    return output


def dry_run(config: Config) -> str:
    """Return verl's whole config for this run as YAML, after verl's own checks. Start nothing."""
    on_cpu = runs_on_cpu(config.backend)
    set_environment(config, on_cpu)
    resolved = verl_config(config, on_cpu=on_cpu)
    lines = [f"# resolved for {'a machine without GPUs; VERL_PLATFORM=nvidia for GPUs' if on_cpu else 'GPUs'}"]
    if (hf_config := hf_config_of(config)) and (lower := lower_level(config, hf_config)):
        lines += [f"# note: {lower}"]
    lines += [f"# {line}" for line in memory_lines(config, on_cpu=on_cpu)]
    return "\n".join([*lines, as_yaml(resolved)])


def verl_config(config: Config, *, on_cpu: bool) -> Any:
    """Return verl's `ppo_trainer` config for this run, an OmegaConf DictConfig. verl's own validation has accepted it.

    Raise UserError if verl lacks a key of the section `verl`, or if a check of QaRL or verl refuses the config.
    """
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with initialize_config_module("verl.trainer.config", version_base=None):
        groups = ["hydra.searchpath=[pkg://qarl.verl]", *["+qarl_machine=cpu"] * on_cpu]
        composed = compose(config_name="ppo_trainer", overrides=groups)
    checks.refuse_own(config)
    for key, value in {**verl_keys(config, on_cpu), **config.verl}.items():
        try:
            OmegaConf.update(composed, key.removeprefix("+"), value, force_add=key.startswith("+"))
        except OmegaConfBaseException as error:
            raise UserError(
                f"verl's config does not take {key}={value!r}",
                where=f"verl.{key}" if key in config.verl else key,
                why=str(error).splitlines()[0],
                fix="look the key up in verl's ppo_trainer.yaml; to add a key, write +KEY in the YAML mapping `verl`",
            ) from error
    checks.check_run_config(config, composed)
    return composed


def as_yaml(resolved: Any) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(resolved, resolve=True)


def memory_lines(config: Config, *, on_cpu: bool) -> list[str]:
    """Return the memory estimate of one rank as lines, one per part. If there is no GPU, assume one of 80 GB."""
    from qarl.checks.memory import estimate, readable
    from qarl.checks.model_folder import hf_config_or_carried
    from qarl.checks.model_size import ModelSize

    device = "cpu" if on_cpu else "cuda"
    gpu_memory = 0 if on_cpu else this_machine().gpu_memory_bytes or UNKNOWN_GPU_BYTES
    try:
        hf_config, _ = hf_config_or_carried(config.model.path, config.model.trust_remote_code)
        size = ModelSize.from_config(hf_config)
    except (UserError, KeyError) as error:
        return [f"memory: not estimated ({str(error).splitlines()[0]}); python -m qarl.doctor says more"]
    align = applied_level(config, hf_config, device)[0]
    plan = estimate(size, config, device=device, gpu_memory_bytes=gpu_memory, align=align)
    phase, needed = plan.peak
    where = f"{device} of {readable(gpu_memory)}" if gpu_memory else device
    host = [f"host memory, {line}" for line in plan.host_lines()]
    return [f"memory of one rank ({where}): {readable(needed)} at most ({phase})", *plan.table(), *host]


@contextmanager
def answered_interrupt(what_resumes: Callable[[], str]) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM say at once that the run stops and what a repeated command does. Ray needs a
    while to end.

    verl's step cannot be finished from outside, so KeyboardInterrupt is raised. `ray.init` replaces the handler of
    SIGTERM by one that raises SystemExit(SIGTERM) (ray/_private/worker.py), which is answered here, too."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    previous = {number: before for number, before in previous.items() if before is not signal.SIG_IGN}

    def answer() -> None:
        text = f"\nstopping verl now, in the middle of its step; if you repeat the command, {what_resumes()}\n"
        with suppress(OSError):  # not print, because the signal may have interrupted a print
            os.write(2, text.encode())

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, previous[signal.Signals(number)])
        answer()
        raise KeyboardInterrupt

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        answer()
        raise KeyboardInterrupt from None
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def as_user_error(failure: BaseException, checkpoints: Path) -> UserError | None:
    """Return the `UserError` that a worker raised, or a new one if a process died or hangs. Otherwise return None.

    `checkpoints`: the folder of the run's checkpoints. A `fix` that advises to run again says what the run then does.
    """
    import ray
    import zmq

    error = failure
    while isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, zmq.Again):
        what = "a rollout engine stopped answering while the trainer published weights to it"
        why = "the engine or its server has died or is stuck; QARL_PUBLISH_TIMEOUT is the limit in seconds"
        error = UserError(what, where="the socket between trainer and engine", why=why, fix=RESUME)
    elif isinstance(error, ray.exceptions.RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        known = [line for line in lines if line.startswith(("class_name:", "pid:", "ip:", "name:"))]
        where = ", ".join(known) or lines[0][:200]
        error = UserError("a process of the verl run died", where=where, why=KILLED, fix=RESUME)
    if not isinstance(error, UserError):
        return None
    resumes = f": {what_resumes(checkpoints)}" if error.fix and error.fix.endswith(RESUME) else ""
    return UserError(error.what, where=error.where, why=error.why, fix=error.fix and error.fix + resumes)


def what_resumes(checkpoints: Path) -> str:
    """Return what a repeated command does with the complete checkpoints of verl in the folder `checkpoints`."""
    if whole := whole_and_torn(checkpoints)[0]:
        return f"it resumes after step {max(whole)}"
    return "it starts fresh, because there is no checkpoint yet (trainer.save_minutes, trainer.save_freq)"
