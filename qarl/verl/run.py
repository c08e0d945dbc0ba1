"""The verl backend: translates our config into verl's and runs verl's PPO trainer with it.

`verl_config` starts from verl's own `ppo_trainer` config, so a key that verl no longer has is an error here, not a
silent no-op. Configs that verl cannot run are refused (`qarl.verl.checks`).

The algorithm is that of `qarl.trainer.local`, but it runs on Ray, FSDP2 and vLLM servers. `qarl.verl` adds the
parts that verl lacks. Statements here about verl were checked against the source of verl 0.9.1.

Its metrics are read from verl's log (`qarl.verl.followed_log`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

from qarl.checkpoint.read_weights import whole_and_torn
from qarl.checkpoint.storage import (
    METRICS_FILE,
    StorageError,
    checkpoints_dir,
    write_json,
    write_text,
)
from qarl.checks.inputs_record import RECORD_FILE
from qarl.checks.machine import UNKNOWN_GPU_BYTES, this_machine
from qarl.checks.model import applied_level, lower_level
from qarl.checks.registry import check_run
from qarl.checks.room import check_run_room
from qarl.config import Config, write_resolved
from qarl.console import say, stage
from qarl.errors import UserError, in_one_line
from qarl.metrics.tracker import read_metrics, write_versions
from qarl.metrics.validation import MEAN
from qarl.process import runs_on_cpu
from qarl.trainer.finish import finish_run
from qarl.trainer.repeat import keys_that_resume
from qarl.verl import checks
from qarl.verl.config import hf_config_of, verl_keys
from qarl.verl.environment import set_environment
from qarl.verl.failures import as_user_error, what_resumes
from qarl.verl.followed_log import MetricsFollower
from qarl.verl.interrupts import AfterStart, answered_interrupt
from qarl.verl.keys import FILES
from qarl.verl.resume import open_verl_run


def train(config: Config, *, started: float | None = None) -> dict[str, Any]:
    """Run `config` in verl until it ends or Ctrl-C stops it. Return the content of `summary.json`."""
    start = time.perf_counter() if started is None else started
    on_cpu = runs_on_cpu(config.backend)
    checks.refuse_unsupported(config)
    set_environment(config, on_cpu)
    with stage("checking data, model and machine", imports=True):
        run = check_run(config)
        check_run_room(config, run)
        record = run.record
        run.reward_fn.stop()  # from now on Ray's workers call it
        if run.conversations is not None:
            run.conversations.environment.stop()
    resolved = verl_config(config, on_cpu=on_cpu)
    with open_verl_run(config, record) as start_step:
        write_resolved(config, config.run_dir / "config.yaml")
        write_json(config.run_dir / RECORD_FILE, record)
        if _lacks_last_evaluation(config, start_step):
            resolved.trainer.val_before_train = True
        return _run(config, resolved, start, start_step)


def _lacks_last_evaluation(config: Config, start_step: int) -> bool:
    """Return whether the run resumes after its last step, which verl has saved, and was ended in the evaluation that
    follows. verl would not make it again."""
    trainer = config.trainer
    if start_step < trainer.total_training_steps or trainer.test_freq < 1:
        return False
    path = config.run_dir / METRICS_FILE
    entries = read_metrics(config.run_dir) if path.is_file() else []
    return bool(config.data.val_files) and not any(
        MEAN in entry for entry in entries if entry["step"] == start_step
    )


def _run(config: Config, resolved: Any, start: float, start_step: int) -> dict[str, Any]:
    """Run verl's trainer from `start_step` and return the summary. The caller must hold the lock of the run folder."""
    import ray
    from verl.trainer.main_ppo import run_ppo

    from qarl.verl.task_runner import TaskRunner

    write_versions(config.run_dir)
    write_text(config.run_dir / "verl.yaml", as_yaml(resolved))
    say("starting Ray, verl's trainer and the rollout engines (vLLM) ...")
    failure: BaseException | None = None
    checkpoints = checkpoints_dir(config.run_dir)
    keys = keys_that_resume(config)
    with MetricsFollower(
        config, Path(os.environ["VERL_FILE_LOGGER_PATH"]), start, start_step=start_step
    ) as follower:
        try:
            with answered_interrupt(lambda: what_resumes(checkpoints, keys)) as answer_again:
                run_ppo(resolved, task_runner_class=AfterStart(TaskRunner, answer_again))
        except BaseException as error:
            failure = error
        with suppress(Exception):  # here and below: the run's own error is the one to see
            failure = (
                as_user_error(failure, checkpoints, keys) or failure
                if failure is not None
                else None
            )
        with suppress(Exception):
            ray.shutdown()
    return _finish(config, failure, follower, start)


def _finish(
    config: Config, failure: BaseException | None, follower: MetricsFollower, start: float
) -> dict[str, Any]:
    """Write the last files of a run that `failure` or nothing has ended. Return the summary.

    What decides on the export is the checkpoint of the last step, not the metrics: they may be missing, and the run may
    fail after that checkpoint, as in its last evaluation."""
    total = config.trainer.total_training_steps
    logged = follower.last_step
    whole = _whole_checkpoints(config)
    interrupted = isinstance(failure, KeyboardInterrupt)
    # A run that ended by itself has made all its steps, except if it was only to evaluate.
    step = max([logged, *whole]) if failure is None else min(logged, total - 1)
    save: Callable[[Path], Path] | str = partial(export_final, config)
    if not config.trainer.save_final:
        save = "trainer.save_final=false"
    elif follower.folder.is_lost:
        save = "the run folder, and with it the checkpoints, was deleted or moved"
    elif interrupted:
        save = "the run was interrupted"
    elif step < total and total not in whole:
        save = (
            f"the run ended after step {logged} of {total}, before the checkpoint of its last step"
        )
    facts = {
        "backend": "verl",
        **{f"quant_{key}": getattr(config.quant, key) for key in ("scheme", "kernels", "align")},
        "interrupted": interrupted,
        "seconds": time.perf_counter() - start,
    }
    return finish_run(
        follower.folder,
        facts,
        None if interrupted else failure,
        follower.problem,
        step=step,
        total=total,
        save=save,
        plots=config.trainer.plots,
        report=config.trainer.report,
        keys=keys_that_resume(config),
    )


def _whole_checkpoints(config: Config) -> Mapping[int, Path]:
    """Return the run's complete checkpoints by step. If they cannot be read, say so and return none."""
    try:
        return whole_and_torn(checkpoints_dir(config.run_dir))[0]
    except Exception as error:  # the run's own error is the one to see
        say(f"warning: the checkpoints could not be read ({in_one_line(error)})")
        return {}


def export_final(config: Config, output: Path) -> Path:
    """Export the final model from verl's last checkpoint to the folder `output`, and return it.

    Raise StorageError if the disk is full, and UserError if the files of some ranks are not on this machine. The
    checkpoint stays.
    """
    from qarl.checkpoint.export import ExportRequest, export

    step = config.trainer.total_training_steps
    trust = config.model.trust_remote_code
    try:
        print(
            export(
                ExportRequest(config.run_dir, output, step, overwrite=True, trust_remote_code=trust)
            )
        )
    except StorageError:
        raise
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
    lines = [
        f"# resolved for {'a machine without GPUs; VERL_PLATFORM=nvidia for GPUs' if on_cpu else 'GPUs'}"
    ]
    if (hf_config := hf_config_of(config)) and (lower := lower_level(config, hf_config)):
        lines += [f"# note: {lower}"]
    lines += [f"# {line}" for line in memory_lines(config, on_cpu=on_cpu)]
    return "\n".join([*lines, as_yaml(resolved)])


def verl_config(config: Config, *, on_cpu: bool) -> Any:
    """Return verl's `ppo_trainer` config for this run, an OmegaConf DictConfig. verl's own validation has accepted it.

    Raise UserError if verl lacks a key of the section `verl`, or if a check of QaRL or verl refuses the config.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    checks.refuse_own(config)
    composed = deepcopy(_verls_defaults(on_cpu))
    for key, value in {**verl_keys(config, on_cpu), **with_whole_paths(config.verl)}.items():
        try:
            OmegaConf.update(composed, key.removeprefix("+"), value, force_add=key.startswith("+"))
        except OmegaConfBaseException as error:
            raise UserError(
                f"verl's config does not take {key}={value!r}",
                where=f"verl.{key}" if key in config.verl else key,
                why=str(error).splitlines()[0],
                fix="look the key up in verl's ppo_trainer.yaml; to add a key, write +KEY in the YAML mapping `verl`",
            ) from error
    checks.refuse_words_for_booleans(config, _verls_defaults(on_cpu), composed)
    checks.check_run_config(config, composed)
    return composed


def with_whole_paths(verl: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `verl` with absolute paths for the files of agent loops and tools that are here."""
    return {
        key: str(Path(value).resolve())
        if key.removeprefix("+") in FILES and Path(str(value)).is_file()
        else value
        for key, value in verl.items()
    }


@cache
def _verls_defaults(on_cpu: bool) -> Any:
    """Return verl's `ppo_trainer` config with the group of the machine. Hydra reads 28 files for it, and a dry run and
    the doctor need it more than once."""
    from hydra import compose, initialize_config_module

    groups = ["hydra.searchpath=[pkg://qarl.verl]"]
    if on_cpu:
        groups.append("+qarl_machine=cpu")
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(config_name="ppo_trainer", overrides=groups)


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
        return [
            f"memory: not estimated ({str(error).splitlines()[0]}); python -m qarl.doctor says more"
        ]
    level = applied_level(config, hf_config, device).level
    plan = estimate(size, config, device=device, gpu_memory_bytes=gpu_memory, level=level)
    phase, needed = plan.peak
    where = f"{device} of {readable(gpu_memory)}" if gpu_memory else device
    host = [f"host memory, {line}" for line in plan.host_lines()]
    return [
        f"memory of one rank ({where}): {readable(needed)} at most ({phase})",
        *plan.table(),
        *host,
    ]
