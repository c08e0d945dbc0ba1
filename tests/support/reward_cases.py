"""Reward functions as users write them, and worse ones, each with what it must lead to in every backend.

A case is the source of a file with a function `score`, and the scores of `RESPONSES` or the words of the refusal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

GROUND_TRUTH = "42"
EXTRA_INFO = {"index": 7, "seen": []}
RESPONSES = ("the answer is 42", "naïve 🙂\x00 [tool]")
TIMEOUT_S = 1.0
"""Long enough for imports on a busy machine; every case that hangs takes as long in each backend."""
PATIENT = 120.0
"""The limit of the cases that do not hang."""
HANGS = "took longer than reward.timeout_s"
HEAD = "def score(data_source, solution_str, ground_truth, extra_info=None):\n"


def body(text: str, before: str = "") -> str:
    """A file whose function `score` has the body `text`, after the lines `before`."""
    lines = text.strip().splitlines()
    return f"{before}\n{HEAD}" + "".join(f"    {line}\n" for line in lines)


RIGHT = "float(ground_truth in solution_str)"
SCORES: dict[str, tuple[str, list[float]]] = {
    "plain": (body(f"return {RIGHT}"), [1, 0]),
    "keyword arguments": ("def score(*, solution_str, **others): return len(others)", [3, 3]),
    "int": (body("return int(ground_truth in solution_str)"), [1, 0]),
    "bool": (body("return ground_truth in solution_str"), [1, 0]),
    "numpy scalar": (body("return np.float32(0.5)", "import numpy as np"), [0.5, 0.5]),
    "torch scalar": (body("return torch.tensor(0.5)", "import torch"), [0.5, 0.5]),
    "dict": (
        body(f"return {{'score': {RIGHT}, 'length': len(solution_str), 'why': 'né'}}"),
        [1, 0],
    ),
    "class instance": (
        "class Judge:\n    def __call__(self, solution_str, ground_truth, **_):\n"
        f"        return {RIGHT}\nscore = Judge()\n",
        [1, 0],
    ),
    "partial": (
        "import functools\ndef scale(factor, solution_str, ground_truth, **_):\n"
        f"    return factor * {RIGHT}\nscore = functools.partial(scale, 0.5)\n",
        [0.5, 0],
    ),
    "counter of the module": (body("CALLS.append(1)\nreturn len(CALLS)", "CALLS = []"), [1, 2]),
    "changes its arguments": (
        body("extra_info['seen'].append(1)\nreturn len(extra_info['seen'])"),
        [1, 1],
    ),
    "sibling file": (body("return helper.VALUE", "import helper"), [0.25, 0.25]),
    "data file beside it": (
        body(
            "return json.loads(Path(__file__).with_name('table.json').read_text())['value']",
            "import json\nfrom pathlib import Path",
        ),
        [0.75, 0.75],
    ),
    "chdir": (
        body("os.chdir('/')\nreturn float(FOLDER != '/')", "import os\nFOLDER = os.getcwd()"),
        [1, 1],
    ),
    "environment": (body("os.environ['QARL_REWARD_CASE'] = '1'\nreturn 1.0", "import os"), [1, 1]),
    "grad mode": (
        body(
            "torch.set_grad_enabled(False)\nreturn float(not torch.is_grad_enabled())",
            "import torch",
        ),
        [1, 1],
    ),
    "seeds": (
        body("random.seed(3)\nreturn random.random()", "import random"),
        [0.23796462709189137] * 2,
    ),
    "monkeypatch": (body("json.dumps = None\nreturn 1.0", "import json"), [1, 1]),
    "prints": (
        body("print('x' * 300_000)\nprint('é', file=sys.stderr)\nreturn 1.0", "import sys"),
        [1, 1],
    ),
    "closes stdout": (body("sys.stdout.close()\nreturn 1.0", "import sys"), [1, 1]),
    "logging": (body("logging.error('a message')\nreturn 1.0", "import logging"), [1, 1]),
    "warnings as errors": (
        body(
            "try:\n    warnings.warn('old')\nexcept UserWarning:\n    return 0.5\nreturn 1.0",
            "import warnings\nwarnings.simplefilter('error')",
        ),
        [0.5, 0.5],
    ),
    "math_verify.parse in try": (
        body(
            "try:\n    return float(verify(*map(parse, (ground_truth, solution_str))))\n"
            "except Exception:\n    return 0.0",
            "from math_verify import parse, verify",
        ),
        [1, 0],
    ),
    "alarm of its own": (
        body(
            "signal.signal(signal.SIGALRM, late)\nsignal.setitimer(signal.ITIMER_REAL, 0.1)\n"
            "try:\n    time.sleep(60)\nexcept TimeoutError:\n    return 0.5",
            "import signal, time\ndef late(*_):\n    raise TimeoutError",
        ),
        [0.5, 0.5],
    ),
    "alarm left behind": (
        body(
            "time.sleep(0.6)\nsignal.setitimer(signal.ITIMER_REAL, 0.3)\nreturn 1.0",
            "import signal, time",
        ),
        [1, 1],
    ),
    "interrupt as a limit": (
        body(
            "timer = threading.Timer(0.1, _thread.interrupt_main)\ntimer.start()\n"
            "try:\n    while True: time.sleep(0.01)\nexcept KeyboardInterrupt:\n    return 0.5",
            "import _thread, threading, time",
        ),
        [0.5, 0.5],
    ),
    "threads": (
        body(
            f"with ThreadPoolExecutor(2) as pool:\n    return pool.submit(lambda: {RIGHT}).result()",
            "from concurrent.futures import ThreadPoolExecutor",
        ),
        [1, 0],
    ),
    "thread left behind": (
        body(
            "threading.Thread(target=time.sleep, args=(300,)).start()\nreturn 1.0",
            "import threading, time",
        ),
        [1, 1],
    ),
    "subprocess": (
        body(
            "return float(subprocess.run(['echo', '0.5'], capture_output=True, text=True).stdout)",
            "import subprocess",
        ),
        [0.5, 0.5],
    ),
    "multiprocessing": (
        body(
            "with multiprocessing.Pool(1) as pool:\n    return pool.map(half, [1.0])[0]",
            "import multiprocessing\ndef half(x):\n    return x / 2",
        ),
        [0.5, 0.5],
    ),
    "spawned pool": (
        body(
            "context = multiprocessing.get_context('spawn')\n"
            "with context.Pool(1) as pool:\n    return pool.map(math.sqrt, [0.25])[0]",
            "import math, multiprocessing",
        ),
        [0.5, 0.5],
    ),
    "fork that returns": (body("os.fork()\nreturn 1.0", "import os"), [1, 1]),
    "asyncio.run": (
        body("return asyncio.run(judge())", "import asyncio\nasync def judge():\n    return 0.5"),
        [0.5, 0.5],
    ),
    "async": ("async " + body(f"return {RIGHT}").strip(), [1, 0]),
    "awaitable": (body("return other()", "async def other():\n    return 0.5"), [0.5, 0.5]),
    "largest score of FP32": (body("return 3.4e38"), [3.4e38, 3.4e38]),
}
REFUSALS: dict[str, tuple[str, str]] = {
    "raises": (
        body("return 1 / 0"),
        r"raised ZeroDivisionError[\s\S]*line \d+, in score: return 1 / 0",
    ),
    "wrong signature": (
        "def score(answer): return 1.0",
        r"raised TypeError[\s\S]*fix: give it the parameters data_source, solution_str, ground_truth, extra_info",
    ),
    "without extra_info": (
        "def score(data_source, solution_str, ground_truth): return 1.0",
        r"raised TypeError[\s\S]*extra_info[\s\S]*fix: give it the parameters data_source",
    ),
    "breakpoint": (
        body("breakpoint()\nreturn 1.0"),
        r"a debugger has no terminal[\s\S]*fix: remove breakpoint",
    ),
    "exit": (body("sys.exit(0)", "import sys"), "raised SystemExit"),
    "os._exit": (body("os._exit(0)", "import os"), "ended its process[\\s\\S]*exit code 0"),
    "segmentation fault": (
        body("ctypes.string_at(0)", "import ctypes"),
        "ended its process[\\s\\S]*SIGSEGV",
    ),
    "killed": (body("os.kill(os.getpid(), 9)", "import os"), "ended its process[\\s\\S]*SIGKILL"),
    "KeyboardInterrupt": (body("raise KeyboardInterrupt"), "raised KeyboardInterrupt"),
    "recursion": (
        body("return score(data_source, solution_str, ground_truth)"),
        "raised RecursionError",
    ),
    "exception of its own": (
        body("raise Odd(solution_str)", "class Odd(Exception):\n    def __str__(self): raise self"),
        "raised Odd",
    ),
    "None": (body("pass"), "returned None"),
    "NaN": (body("return float('nan')"), "returned nan"),
    "Inf": (body("return float('-inf')"), "returned -inf"),
    "beyond FP32": (body("return 1e39"), "returned 1e\\+39[\\s\\S]*FP32"),
    "text": (body("return '1.0'"), "returned '1.0'"),
    "dict without a score": (body("return {'reward': 1.0}"), "returned {'reward': 1.0}"),
    "NaN in a dict": (body("return {'score': float('nan')}"), "returned {'score': nan}"),
    "list": (body("return [1.0]"), "returned \\[1.0\\]"),
    "generator": (body("yield 1.0"), "returned <generator"),
    "async that raises": (
        "async " + body("return 1 / 0").strip(),
        r"raised ZeroDivisionError[\s\S]*line \d+, in score: return 1 / 0",
    ),
    "value of its own class": (
        body("return {'score': 1.0, 'judge': Judge()}", "class Judge: pass"),
        "returned {'score'[\\s\\S]*Judge",
    ),
    "value that cannot be pickled": (
        body("return {'score': 1.0, 'f': lambda: 0}"),
        "returned {'score'[\\s\\S]*beside",
    ),
    "syntax error": ("def score(:", "cannot load[\\s\\S]*SyntaxError"),
    "exits when loaded": (
        "import os; os._exit(3)",
        "loading[\\s\\S]*ended its process[\\s\\S]*exit code 3",
    ),
    "no such function": ("def scores(): pass", "has no function 'score'[\\s\\S]*scores"),
    "loop": (body("while True: pass"), HANGS),
    "loop that catches all": (
        body("while True:\n    try:\n        while True: pass\n    except:\n        pass"),
        HANGS,
    ),
    "loop after an alarm": (body("signal.alarm(0)\nwhile True: pass", "import signal"), HANGS),
    "slow regular expression": (
        body("return float(bool(re.match('(a+)+$', 'a' * 60 + 'b')))", "import re"),
        HANGS,
    ),
    "child that sleeps": (body("subprocess.run(['sleep', '300'])", "import subprocess"), HANGS),
    "lock": (
        body("lock = threading.Lock()\nlock.acquire()\nlock.acquire()", "import threading"),
        HANGS,
    ),
}
CASES: dict[str, tuple[str, Any]] = {**SCORES, **REFUSALS}


def write_case(folder: Path, name: str) -> str:
    """Write the files of a case. Return its `reward.function`."""
    file = folder / "reward.py"
    file.write_text(CASES[name][0] + "\n", encoding="utf-8")
    (folder / "helper.py").write_text("VALUE = 0.25\n")
    (folder / "table.json").write_text('{"value": 0.75}')
    return f"{file}:score"


def limit_of(name: str) -> float:
    return TIMEOUT_S if CASES[name][1] == HANGS else PATIENT
