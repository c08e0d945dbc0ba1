"""What the proofs share: results that are written row by row, trainers, whole runs, and work in other processes."""

from __future__ import annotations

import datetime
import json
import math
import os
import pkgutil
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qarl.checkpoint.storage import METRICS_FILE, json_safe, write_text
from qarl.config import Config, load_config
from qarl.config.level import Level
from qarl.metrics.tracker import cpu, read_metrics, write_versions

ROOT = Path(__file__).resolve().parents[2]
LEVELS = tuple(Level)
SCHEMES = ("bf16", "w4a16", "w8a8", "fp8")
TINY = ROOT / "models" / "tiny-qwen3"
Row = dict[str, Any]
VARYING = re.compile(
    r"(^|_)(s|seconds|minutes|mb|gib|tokens|peak\w*|date|commit|cpu|imports|measured|parts|ratios?)(_median)?$|timing_s/"
)
"""Names of values that differ from run to run: time, memory, what was sampled, and where they were measured."""
QUIET = {
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_final": False,
    "trainer.plots": False,
    "trainer.logger": ["console"],
}
"""Keys of a run of which only the metrics are read."""


def rows_of(document: Any, key: Sequence[str] = ()) -> dict[str, Row]:
    """Return the rows of a committed result by name. Those of a list are named by the values of `key`."""
    for part in ("rows", "results", "runs", "kills"):
        if isinstance(document, dict) and part in document:
            document = document[part]
            break
    if isinstance(document, list):
        return {
            " | ".join(str(row[name]) for name in key) or str(i): row
            for i, row in enumerate(document)
        }
    return dict(document)


class Record:
    """The rows of a result. The file is written after each row; rows that it has are not measured again."""

    def __init__(
        self,
        path: Path,
        command: str,
        key: Sequence[str] = (),
        *,
        only: str = "",
        again: bool = False,
    ):
        self.path, self.command, self.only, self.again = path, command, re.compile(only), again
        self.rows = (
            rows_of(json.loads(path.read_text(encoding="utf-8")), key) if path.is_file() else {}
        )
        self.measured: dict[str, Row] = {}
        with tempfile.TemporaryDirectory() as folder:
            versions: Row = json.loads(write_versions(folder).read_text())
        self.commit = versions.pop("git_commit", None)
        self.facts: Row = {
            "command": command,
            "versions": versions,
            "cpu": cpu(),
            "amx_tiles": amx_tiles(),
        }

    def wants(self, name: str) -> bool:
        return (
            bool(self.only.search(name))
            and (self.again or name not in self.rows)
            and name not in self.measured
        )

    def add(self, name: str, row: Row, *, ok: bool = True) -> None:
        """Keep a row and write the file. `ok`: whether it shows what the proof says."""
        origin = {
            "date": str(datetime.date.today()),
            "commit": self.commit,
            "cpu": self.facts["cpu"]["model"],
        }
        self.rows[name] = self.measured[name] = row | {"ok": ok} | origin
        print(
            f"{name}: {json.dumps(row, ensure_ascii=False)[:600]}{'' if ok else '  NOT OK'}",
            flush=True,
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps(
            json_safe(origin | self.facts), indent=1, ensure_ascii=False
        ).removesuffix("\n}")
        lines = (
            f"{json.dumps(n)}: {json.dumps(json_safe(r), ensure_ascii=False)}"
            for n, r in self.rows.items()
        )
        write_text(self.path, f'{head},\n "rows": {{\n  ' + ",\n  ".join(lines) + "\n }\n}\n")

    @property
    def ok(self) -> bool:
        return bool(self.measured) and all(row["ok"] for row in self.measured.values())


def amx_tiles() -> bool:
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Yield where `new` is not `old`. Measured figures may be apart by half; names of `VARYING` are not compared."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() & new.keys(), key=str):
            if not VARYING.search(str(name)):
                yield from differences(
                    old[name], new[name], f"{where}.{name}" if where else str(name)
                )
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{where}[{i}]")
    elif isinstance(old, float) or isinstance(new, float):
        if not math.isclose(float(old), float(new), rel_tol=0.5):
            yield f"{where}: {old} is now {new}"
    elif old != new:
        yield f"{where}: {old!r} is now {new!r}"


def arguments(settings: Row) -> list[str]:
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | Path) else json.dumps(value)


def run_config(config: str = "quickstart.yaml", settings: Row | None = None) -> Config:
    return load_config([f"config={config}", *arguments(settings or {})])


@contextmanager
def local_trainer(config: str = "quickstart.yaml", **settings: Any) -> Iterator[Any]:
    """Yield a `LocalTrainer` whose engine has its weights. A key's dot is written as two underscores."""
    from qarl.trainer.local import LocalTrainer
    from qarl.trainer.prepare import prepare_run

    with tempfile.TemporaryDirectory() as folder:
        keys = {name.replace("__", "."): value for name, value in settings.items()}
        run = run_config(config, {"output_dir": folder} | keys)
        trainer = LocalTrainer(run, prepare_run(run))
        with trainer.engine:
            trainer.publish()
            yield trainer


def log_probs(policy: Any, batch: Any, rows: int = 8, **how: Any) -> Any:
    """Return the policy's log-probs of a batch, at temperature 1 unless `how` says otherwise."""
    import torch

    with torch.no_grad():
        how = {"temperature": 1.0} | how
        return torch.cat(
            [policy.response_log_probs(batch, part, **how) for part in batch.micro_batches(rows)]
        )


def delta(policy: Any, batch: Any, **how: Any) -> Any:
    """Return |δ| of every token."""
    return (log_probs(policy, batch, **how) - batch.rollout_log_probs)[batch.response_mask].abs()


def batch_of(rollout: Any) -> Any:
    """Return a batch without rewards."""
    import torch

    from qarl.trainer.batch import make_batch

    zeros = torch.zeros(len(rollout.response_token_ids))
    return make_batch(rollout, zeros, zeros, pad_token_id=0)


@dataclass
class Run:
    """One `qarl train` in a process; `log` is what it printed."""

    folder: Path
    log: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(
        cls, name: str, root: Path, config: str, settings: Row, *, verl: Row | None = None
    ) -> Run:
        """Start a run in `root/name`. `verl`: keys of verl's own."""
        root = root.resolve()
        root.mkdir(parents=True, exist_ok=True)
        if verl is not None:
            values = yaml.safe_load((ROOT / "configs" / config).read_text()) | {"verl": verl}
            config = str(root / f"{name}.yaml")
            Path(config).write_text(yaml.safe_dump(values))
        overrides = arguments({"name": name, "output_dir": root} | settings)
        with (root / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "qarl.train", f"config={config}", *overrides]
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        return cls(root / name, root / f"{name}.log", process)

    @classmethod
    def train(
        cls, name: str, root: Path, config: str, settings: Row, *, verl: Row | None = None
    ) -> Run:
        """Make a run in an empty folder, to its end."""
        cls.clear(name, root)
        run = cls.start(name, root, config, settings, verl=verl)
        run.process.wait()
        return run

    @staticmethod
    def clear(name: str, root: Path) -> None:
        """Remove what an earlier run of that name left."""
        shutil.rmtree(root / name, ignore_errors=True)
        (root / f"{name}.log").unlink(missing_ok=True)

    @property
    def code(self) -> int:
        return self.process.wait()

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def error(self) -> list[str]:
        """The first lines of the run's error."""
        return (
            self.text[self.text.rfind("\nerror: ") + 1 :].strip().splitlines()[:4]
            if self.code
            else []
        )

    @property
    def history(self) -> list[Row]:
        return read_metrics(self.folder) if (self.folder / METRICS_FILE).is_file() else []

    @property
    def steps(self) -> list[Row]:
        """What was logged of each training step."""
        return [entry for entry in self.history if "mismatch/abs_mean" in entry]

    @property
    def step(self) -> int:
        return max((int(entry["step"]) for entry in self.history), default=0)

    @property
    def summary(self) -> Row:
        contents: Row = json.loads((self.folder / "summary.json").read_text())
        return contents


def in_process(
    function: Callable[..., Any], *args: Any, launch: Sequence[str] = (), **env: str
) -> list[Any]:
    """Call a function of a module in a new process, or in those that `launch` starts; return what each returned."""
    name = f"{function.__module__}:{function.__qualname__}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | env
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            *launch,
            "-m",
            "benchmarks.proofs.harness",
            name,
            json.dumps(args),
            folder,
        ]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        outputs = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    if run.returncode or not outputs:
        raise RuntimeError(
            f"{name} ended with {run.returncode}\n{run.stdout[-1500:]}\n{run.stderr[-3000:]}"
        )
    return outputs


def on_ranks(
    function: Callable[..., Any], world: int, *args: Any, backend: str = "cpu:gloo"
) -> list[Any]:
    """Call a function in `world` processes of one process group; return what each rank returned."""
    import torch

    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
        }
        torch.multiprocessing.spawn(
            _rank, (function, world, port, folder, backend, args), nprocs=world
        )
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)
        ]


def _rank(
    rank: int, function: Any, world: int, port: str, folder: str, backend: str, args: Any
) -> None:
    import torch

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    torch.set_num_threads(1)
    torch.distributed.init_process_group(backend, rank=rank, world_size=world)
    torch.save(function(*args), Path(folder) / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@contextmanager
def timed(row: Row, name: str = "seconds") -> Iterator[None]:
    start = time.monotonic()
    yield
    row[name] = round(time.monotonic() - start, 1)


if __name__ == "__main__":
    returned = pkgutil.resolve_name(sys.argv[1])(*json.loads(sys.argv[2]))
    (Path(sys.argv[3]) / f"{os.getpid()}.json").write_text(json.dumps(returned))
