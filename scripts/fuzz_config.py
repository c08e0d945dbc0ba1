"""Mutated configurations through the config reader and the doctor, and every second one through the set-up of a run.

    python scripts/fuzz_config.py --output result.json
    python scripts/fuzz_config.py --only 1234          # one case again, with everything that it printed

Each case, of 3000 drawn from a seed (see `fuzz_cases.py`), must end within 2 seconds in one of three ways: accepted
with sane values, accepted with a warning, or refused by one error of ours. Anything else is a finding: another
exception, a check of the doctor that breaks, nonsense that is accepted without a word, a run that is refused though the
doctor found nothing. The set-up is all of `qarl.train` up to the rollout engine, which is a stub; likewise verl's
trainer. It runs in one process, in a temporary folder with a tiny model. The result is JSON; the exit code is 1 on any
finding.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from fuzz_cases import Case, draw_case, sane

from qarl import train
from qarl.checks import memory
from qarl.config import load_config
from qarl.config.bounds import unusual_values
from qarl.doctor import __main__ as doctor
from qarl.rollout.engine import RolloutEngine
from qarl.verl import run as verl

SECONDS = 2.0
REWARDS = """\
def good(data_source, solution_str, ground_truth, extra_info): return 1.0
def raises(data_source, solution_str, ground_truth, extra_info): return 1 / 0
def text(data_source, solution_str, ground_truth, extra_info): return "good"
def nan(data_source, solution_str, ground_truth, extra_info): return float("nan")
def none(data_source, solution_str, ground_truth, extra_info): return None
def huge(data_source, solution_str, ground_truth, extra_info): return 10**400
class class_: pass
value = 1.0
"""


class Reached(BaseException):
    """The run got as far as its engine. Not an Exception: nothing on the way out may take it for bad input."""


class TooLong(BaseException):
    """The time of a case is over."""


@dataclass(frozen=True)
class Outcome:
    """`kind`: accepted, warned, refused or finding; `where` groups findings that have one cause."""

    case: int
    stage: str
    kind: str
    seconds: float
    where: str = ""
    detail: str = ""


def make_model(folder: Path) -> None:
    """A random Qwen3 of two layers, with a tokenizer of 64 words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="t1", pad_token="t2", unk_token="t0"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def make_folder(folder: Path) -> None:
    """The working folder of every case: a run that would start, and files that are none."""
    make_model(folder / "model")
    for name, start in (("train.jsonl", 3), ("val.jsonl", 20)):
        rows = [
            {
                "data_source": "test",
                "prompt": [{"role": "user", "content": f"t{start + i} t{i}"}],
                "reward_model": {"style": "rule", "ground_truth": "7"},
            }
            for i in range(8)
        ]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "broken.jsonl").write_text('{"data_source": \n')
    (folder / "broken.parquet").write_bytes(b"PAR1 and nothing")
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 4)
    for name in ("empty", "empty.jsonl", "empty.parquet"):
        (folder / name).touch()
    (folder / "folder").mkdir()
    (folder / "locked").mkdir(mode=0)
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "linked.jsonl").symlink_to("train.jsonl")
    for name in ("fifo.jsonl", "fifo.py"):
        os.mkfifo(folder / name)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TooLong after that many seconds, those not counted in which the machine was busy with other processes."""
    began, waited = time.perf_counter(), seconds_waited()

    def handler(signum: int, frame: FrameType | None) -> None:
        left = seconds - (time.perf_counter() - began - (seconds_waited() - waited))
        if left > 0.01:
            signal.setitimer(signal.ITIMER_REAL, left)
        else:
            raise TooLong("".join(traceback.format_stack(frame)[-3:]))

    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def seconds_waited() -> float:
    """How long this thread was ready to run and had no CPU (Linux; elsewhere 0)."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Fuzzer:
    """Runs cases in the working folder, which is the current directory; `known` are its files."""

    def __init__(self, *, seconds: float = SECONDS, verbose: bool = False) -> None:
        self.seconds, self.verbose = seconds, verbose
        self.known = {*Path().iterdir(), *Path().glob("*/*")}
        self.usual: set[str] = set()
        self.printed = self.errors = ""
        for stage in (self.examine, self.start):
            outcome = stage(Case(-1, ()), 600.0)
            if outcome.kind != "accepted":
                raise RuntimeError(
                    f"the config without mutations is not accepted: {outcome}\n{self.printed}{self.errors}"
                )
            self.usual |= warnings_of(self.printed)

    def examine(self, case: Case, seconds: float | None = None) -> Outcome:
        """The config reader and the doctor."""
        return self.run("doctor", doctor.main, case, seconds)

    def start(self, case: Case, seconds: float | None = None) -> Outcome:
        """The set-up of a run, which knows no options of the doctor."""
        case = replace(case, arguments=tuple(one for one in case.arguments if not one.startswith("doctor.")))
        return self.run("set-up", train.main, case, seconds)

    def run(self, stage: str, main: Callable[[list[str]], int], case: Case, seconds: float | None) -> Outcome:
        """One case; if it takes too long it is run once more, as the machine may have been busy."""
        self.clean()
        text = case.text if isinstance(case.text, bytes) else case.text.encode()
        Path("run.yaml").write_bytes(text)
        named = any(argument.startswith("config=") for argument in case.arguments)
        arguments = [*([] if named else ["config=run.yaml"]), *case.arguments]
        printed, errors = io.StringIO(), io.StringIO()
        dtype, began, waited = torch.get_default_dtype(), time.perf_counter(), seconds_waited()
        found: tuple[str, str] | None = None
        code = 0
        with mock.patch.dict(os.environ), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            try:
                with time_limit(seconds or self.seconds):
                    code = main(arguments)
            except Reached:
                pass
            except TooLong as error:
                found = "too long", str(error)
            except BaseException as error:
                found = place_of(error), traceback.format_exc()
        took = time.perf_counter() - began - (seconds_waited() - waited)
        self.printed, self.errors = printed.getvalue(), errors.getvalue()
        if found is not None and found[0] == "too long" and seconds is None:
            return self.run(stage, main, case, self.seconds)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
            found = "torch's default dtype is changed", ""
        found = found or self.judge(stage, code, arguments)
        if self.verbose:
            sys.stdout.write(self.printed + self.errors)
        if found is not None:
            return Outcome(case.number, stage, "finding", took, *found)
        return Outcome(case.number, stage, self.kind(code), took)

    def clean(self) -> None:
        """Remove what a case has written."""
        for path in [*Path().glob("*/*"), *Path().iterdir()]:
            if path not in self.known and path.name != "run.yaml" and os.path.lexists(path):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def kind(self, code: int) -> str:
        if code:
            return "refused"
        return "warned" if warnings_of(self.printed + self.errors) - self.usual else "accepted"

    def judge(self, stage: str, code: int, arguments: list[str]) -> tuple[str, str] | None:
        """The fault of a case that ended by itself, and its details."""
        said = self.printed + self.errors
        if "Traceback (most" in said:
            return "traceback printed", said[-2000:]
        if broken := [line for line in said.splitlines() if "the check broke" in line]:
            after = said[said.index(broken[0]) :].splitlines()[1:3]
            return "the check broke: " + " ".join(" ".join(after).split())[:120], broken[0]
        if code == 2:
            refusal = self.errors[self.errors.find("error: ") :]
            if self.errors.count("error: ") < 1 or not ("fix: " in refusal and len(refusal) < 30_000):
                return "a refusal without a fix, or too long", refusal[:1000]
            return None
        if code not in (0, 1) or (stage == "set-up" and code):
            return f"exit code {code}", said[-500:]
        config = load_config([argument for argument in arguments if not argument.startswith("doctor.")])
        questioned = {unusual.key.partition("[")[0] for unusual in unusual_values(config)}
        nonsense = [
            what for what in sane(config.model_dump()) if what.partition("=")[0].split(" ")[0] not in questioned
        ]
        if nonsense and not code:
            return f"nonsense accepted: {nonsense[0][:60]}", str(nonsense)
        if not code and questioned and not warnings_of(said) - self.usual:
            return "questioned values are not printed", str(questioned)
        return None


def warnings_of(text: str) -> set[str]:
    """The warnings of the doctor or of a run."""
    lines = (line.strip() for line in text.splitlines())
    return {line for line in lines if line.startswith(("warning  ", "warning: "))}


def place_of(error: BaseException) -> str:
    """Kind of exception, and the innermost line of ours on its way."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "qarl" in frame.filename]
    ours = [frame for frame in frames if "site-packages" not in frame.filename and "scripts" not in frame.filename]
    last = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}" if ours else "?"
    return f"{type(error).__name__} at {last}"


def compare(case: Case, doctors: Outcome, run: Outcome) -> Outcome | None:
    """A finding if the run is refused and the doctor, asked about this machine, found nothing."""
    if any(argument.startswith("doctor.") for argument in case.arguments):
        return None
    if run.kind == "refused" and doctors.kind in ("accepted", "warned"):
        return Outcome(run.case, "both", "finding", 0.0, "the doctor found nothing, and the run is refused")
    return None


def fuzz(seed: int, numbers: Sequence[int], *, seconds: float = SECONDS, verbose: bool = False) -> list[Outcome]:
    """All outcomes: of the doctor for every case, of the set-up for every second one."""
    outcomes: list[Outcome] = []

    def reached(*args: Any, **kwargs: Any) -> None:
        raise Reached

    with (
        mock.patch.object(RolloutEngine, "__init__", reached),
        mock.patch.object(verl, "run", reached),
        # How much memory is free here is not the subject.
        mock.patch.object(memory, "available_memory", lambda: 2**40),
    ):
        fuzzer = Fuzzer(seconds=seconds, verbose=verbose)
        for count, number in enumerate(numbers):
            case = draw_case(seed, number)
            outcomes.append(fuzzer.examine(case))
            if number % 2 == 0:
                outcomes.append(fuzzer.start(case))
                if (found := compare(case, *outcomes[-2:])) is not None:
                    detail = fuzzer.errors[fuzzer.errors.find("error: ") :]
                    outcomes.append(
                        Outcome(**asdict(found) | {"detail": detail, "where": f"{found.where}: {detail[7:70]}"})
                    )
            if count % 100 == 99:
                gc.collect()
    return outcomes


def summarize(seed: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts by stage, the slowest case, and findings grouped by cause with the cases that show them."""
    stages = {
        stage: dict(collections.Counter(outcome.kind for outcome in outcomes if outcome.stage == stage))
        for stage in ("doctor", "set-up", "both")
    }
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.kind == "finding":
            groups.setdefault(f"{outcome.stage}: {outcome.where}", []).append(outcome)
    findings = [
        {
            "cause": cause,
            "count": len(found),
            "cases": [outcome.case for outcome in found[:10]],
            "example": str(draw_case(seed, found[0].case)),
            "detail": found[0].detail[-1500:],
        }
        for cause, found in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    return {
        "stages": stages,
        "slowest_s": round(slowest.seconds, 2),
        "slowest_case": slowest.case,
        "findings": findings,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="run this case alone and print what it says")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args(argv)
    numbers = [args.only] if args.only is not None else range(args.first, args.first + args.cases)
    output = args.output and args.output.absolute()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "outer" / "work"
        work.mkdir(parents=True)
        os.chdir(work)
        make_folder(work)
        outcomes = fuzz(args.seed, numbers, verbose=args.only is not None)
        os.chdir("/")
    result = {"seed": args.seed, "cases": len(numbers), "seconds": round(time.perf_counter() - began, 1)}
    result |= summarize(args.seed, outcomes)
    if output:
        output.write_text(json.dumps(result, indent=1, ensure_ascii=False))
    print(json.dumps(result, indent=1, ensure_ascii=False))
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
