"""Python code that a model's folder brings along runs only if the config says so, whoever says yes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT
from engine_helpers import config as run_config
from transformers import Qwen3Config

from qarl.checkpoint.model_files import ModelFiles, model_of
from qarl.checks import model_folder
from qarl.checks.model import refuse_hidden_code
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.quant import get_scheme
from qarl.rollout.engine_config import EngineConfig, llm_arguments
from qarl.trainer import prepare
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("in_the_checkout")

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({marker!r}).touch()
from transformers import {config} as C, {model} as M, PreTrainedTokenizerFast as T
class OtherConfig(C):
    model_type = {model_type!r}
class OtherModel(M):
    config_class = OtherConfig
class OtherTokenizer(T):
    pass
"""
AUTO_MAP = {"AutoConfig": "other.OtherConfig", "AutoModelForCausalLM": "other.OtherModel"}


@pytest.fixture
def folder(pristine_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of a family that transformers does not know, with its code; `tmp_path/ran` appears when that runs."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    return hostile(pristine_model, tmp_path)


def hostile(pristine_model: Path, tmp_path: Path, model_type: str = "other") -> Path:
    copy = Path(shutil.copytree(pristine_model, tmp_path / "model"))
    code = CODE.format(
        marker=str(tmp_path / "ran"),
        config="Qwen3Config",
        model="Qwen3ForCausalLM",
        model_type=model_type,
    )
    (copy / "other.py").write_text(code)
    for name, keys in (
        ("config.json", {"model_type": model_type, "auto_map": AUTO_MAP}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "other.OtherTokenizer"]}}),
    ):
        content = json.loads((copy / name).read_text()) | keys
        (copy / name).write_text(json.dumps(content))
    return copy


LOADERS: dict[str, Callable[[Path, bool], Any]] = {
    "the tokenizer": lambda folder, trust: model_folder.load_tokenizer(str(folder), trust),
    "the config": lambda folder, trust: model_folder.load_hf_config(str(folder), trust),
    "the policy": lambda folder, trust: Policy.load(
        run_config(
            folder,
            f"model.path={folder}",
            f"model.trust_remote_code={str(trust).lower()}",
            "quant.align=off",
        )
    ),
    "a checkpoint's files": lambda folder, trust: ModelFiles.from_folder(
        folder, trust_remote_code=trust
    ),
    "a checkpoint's layers": lambda folder, trust: model_of(folder, trust_remote_code=trust),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_folders_code_runs_only_where_the_config_says_so(
    folder: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises((UserError, ValueError), match="code"):
        LOADERS[name](folder, False)
    assert not (tmp_path / "ran").exists()
    LOADERS[name](folder, True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("trust", [False, True])
def test_the_engine_is_told(trust: bool) -> None:
    settings = run_config(ROOT, f"model.trust_remote_code={str(trust).lower()}")
    model = SimpleNamespace(config=Qwen3Config(head_dim=32))
    policy = SimpleNamespace(align=Level.MODEL, adapters=None, model=model)
    engine = prepare.engine_config(settings, policy)
    assert engine.trust_remote_code is trust
    assert llm_arguments(engine)["trust_remote_code"] is trust
    assert llm_arguments(EngineConfig("x", get_scheme("bf16"), (), 8))["trust_remote_code"] is False


@pytest.mark.verl
def test_verl_would_run_what_nobody_needs(
    pristine_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known family whose files name code: transformers leaves it alone, verl's reward workers would run it."""
    pytest.importorskip("verl")
    from verl.utils.tokenizer import hf_tokenizer

    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    model = hostile(pristine_model, tmp_path, "qwen3")
    loaded = model_folder.load_tokenizer(str(model))
    assert not (tmp_path / "ran").exists()
    refused, allowed = (
        run_config(tmp_path, f"model.trust_remote_code={trust}") for trust in ("false", "true")
    )
    with pytest.raises(UserError, match=r"which verl would run[\s\S]*auto_map"):
        refuse_hidden_code(refused, *loaded)
    refuse_hidden_code(allowed, *loaded)
    refuse_hidden_code(refused, *model_folder.load_tokenizer(str(pristine_model)))
    hf_tokenizer(str(model), trust_remote_code=True)  # as verl's reward workers do
    assert (tmp_path / "ran").exists()
