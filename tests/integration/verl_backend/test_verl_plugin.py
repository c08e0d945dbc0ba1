"""verl after loading the plugin by its entry point, in a separate process, on CPU and as on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from checkout import ROOT

pytest.importorskip("verl")

PROBE = """
import json, logging, os, sys
import verl
report = {"loaded": "qarl.verl.entry_point" in sys.modules}
report["early"] = sorted(m for m in sys.modules if m.startswith("verl.workers") or m.startswith("qarl.verl.fsdp"))
from verl.plugin.platform import PlatformRegistry, get_platform
report["platforms"] = sorted(PlatformRegistry.registered_names())
from verl.trainer.ppo.core_algos import get_policy_loss_fn
report["loss"] = get_policy_loss_fn("tbpo").__module__
from verl.workers.engine import EngineRegistry
report["engine"] = {}
for strategy in ("fsdp", "fsdp2"):
    try:
        report["engine"][strategy] = EngineRegistry.get_engine_cls("language_model", strategy).__name__
    except Exception as error:
        report["engine"][strategy] = repr(error)
import verl.workers.engine
report["file"] = verl.workers.engine.__file__.endswith("__init__.py")
from verl.plugin.platform import platform_manager
del os.environ["VERL_PLATFORM"]
report["detected"] = platform_manager._detect_platform_name()
print("RESULT" + json.dumps(report))
"""


def probe(**variables: str) -> dict:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT")), None)
    assert line is not None, run.stderr[-3000:]
    assert "QaRL could not register" not in run.stderr, run.stderr[-3000:]
    return json.loads(line.removeprefix("RESULT"))


IMPORTED_BEFORE = """
import verl
from verl.plugin.platform import PlatformRegistry, get_platform
assert "cpu" not in PlatformRegistry.registered_names()
from qarl.config import load_config
from qarl.verl.environment import set_environment
set_environment(load_config(["config=quickstart.yaml", "backend=verl"]), on_cpu=True)
assert type(get_platform()).__name__ == "CPUPlatform", get_platform()
"""


def test_on_cpu_if_verl_has_been_imported_before():
    """As in a notebook, and in the doctor of a run that has another platform."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED_BEFORE]
    subprocess.run(
        command, env=environment | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True, timeout=200
    )


@pytest.mark.parametrize("platform", [pytest.param("cpu", marks=pytest.mark.slow), "nvidia"])
def test_what_is_registered(platform):
    """verl's CUDA platform has engines for `cuda` itself, and registering them again would raise. All other tests of
    verl register the CPU's."""
    report = probe(VERL_PLATFORM=platform)
    assert report["loaded"] and report["early"] == [] and report["file"]
    assert ("cpu" in report["platforms"]) == (platform == "cpu")
    assert (
        report["detected"] != "cpu"
    )  # a process without a visible GPU must not train on the CPU unasked
    assert report["loss"] == "qarl.verl.loss"
    assert report["engine"] == {"fsdp": "QaRLFSDPEngine", "fsdp2": "QaRLFSDPEngine"}
