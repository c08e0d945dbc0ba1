"""verl after loading the plugin by its entry point, in a separate process, on CPU and as on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from checkout import ROOT

pytest.importorskip("verl")

PROBE = """
import json, logging, os, sys
import verl
found = {"loaded": "qarl.verl.plugin.plugin" in sys.modules}
found["early"] = sorted(m for m in sys.modules if m.startswith("verl.workers") or m.startswith("qarl.verl.plugin.e"))
from verl.plugin.platform import PlatformRegistry, get_platform
found["platforms"] = sorted(PlatformRegistry.registered_names())
from verl.trainer.ppo.core_algos import get_policy_loss_fn
found["loss"] = get_policy_loss_fn("tbpo").__module__
from verl.workers.engine import EngineRegistry
found["engine"] = {}
for strategy in ("fsdp", "fsdp2"):
    try:
        found["engine"][strategy] = EngineRegistry.get_engine_cls("language_model", strategy).__name__
    except Exception as error:
        found["engine"][strategy] = repr(error)
import verl.workers.engine
found["file"] = verl.workers.engine.__file__.endswith("__init__.py")
from verl.plugin.platform import platform_manager
del os.environ["VERL_PLATFORM"]
found["detected"] = platform_manager._detect_platform_name()
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder that declares the entry points of pyproject.toml, as an installation would."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "qarl_under_test-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qarl-under-test\nVersion: 0.0\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def probe(site: Path, **variables: str) -> dict:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "OMP_NUM_THREADS": "1", **variables}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE], env=environment, capture_output=True, text=True, timeout=200
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
from qarl.verl.keys import set_environment
set_environment(load_config(["config=quickstart.yaml", "backend=verl"]), on_cpu=True)
assert type(get_platform()).__name__ == "CPUPlatform", get_platform()
"""


def test_on_cpu_if_verl_has_been_imported_before():
    """As in a notebook, and in the doctor of a run that has another platform."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED_BEFORE]
    subprocess.run(command, env=environment | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True, timeout=200)


def test_on_cpu(site):
    found = probe(site, VERL_PLATFORM="cpu")
    assert found["loaded"] and found["early"] == [] and found["file"]
    assert "cpu" in found["platforms"]
    assert found["detected"] != "cpu"  # a process without a visible GPU must not train on the CPU unasked
    assert found["loss"] == "qarl.verl.plugin.loss"
    assert found["engine"] == {"fsdp": "QaRLFSDPEngine", "fsdp2": "QaRLFSDPEngine"}


def test_as_on_a_machine_with_gpus(site):
    """verl's CUDA platform: engines for `cuda` are taken there, and registering them again would raise."""
    found = probe(site, VERL_PLATFORM="nvidia")
    assert found["loaded"] and "cpu" not in found["platforms"]
    assert found["loss"] == "qarl.verl.plugin.loss"
    assert found["engine"] == {"fsdp": "QaRLFSDPEngine", "fsdp2": "QaRLFSDPEngine"}


def test_verl_can_be_told_to_load_no_plugin(site):
    environment = {"VERL_PLATFORM": "nvidia", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    with pytest.raises(AssertionError):  # the loss is not there
        probe(site, **environment)


@pytest.fixture
def leader_and_follower(tmp_path, monkeypatch):
    """A package whose module `leader` fails while the environment says so, and the finder that leads to `follower`."""
    from qarl.verl.plugin.plugin import AfterImport

    package = tmp_path / "followed_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "leader.py").write_text("import os\nif os.environ.get('LEADER_FAILS'): raise RuntimeError('not now')\n")
    (package / "follower.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    finder = AfterImport({"followed_package.leader": "followed_package.follower"})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield "followed_package.leader", "followed_package.follower"
    for name in [name for name in sys.modules if name.startswith("followed_package")]:
        del sys.modules[name]


def test_a_search_or_a_failed_import_does_not_use_up_the_follower(leader_and_follower, monkeypatch):
    leader, follower = leader_and_follower
    assert importlib.util.find_spec(leader) is not None
    monkeypatch.setenv("LEADER_FAILS", "1")
    with pytest.raises(RuntimeError, match="not now"):
        importlib.import_module(leader)
    assert follower not in sys.modules
    monkeypatch.delenv("LEADER_FAILS")
    importlib.import_module(leader)
    assert follower in sys.modules
    first = sys.modules.pop(follower)
    importlib.reload(sys.modules[leader])
    assert follower not in sys.modules and first is not None
