"""Checkpoints that compressed-tensors has quantized: their codes stay, against compressed-tensors' own unpacking."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import save_random_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.proofs.published_bases import CASES, make, settings
from qarl.checkpoint import export_adapter
from qarl.checkpoint.model_files import ModelFiles, weight_files
from qarl.checks.model_folder import load_hf_config
from qarl.checks.published_base import (
    base_of,
    check_quantized,
    quantization_of,
)
from qarl.config import Config, load_config
from qarl.errors import UserError
from qarl.quant.linear import QuantLinear
from qarl.quant.meta_model import meta_model, unquantized_config
from qarl.quant.published import PublishedBase
from qarl.rollout.publish.manifest import TensorSpec, expected_manifest
from qarl.schemes.published_config import published_scheme
from qarl.trainer.load_weights import load_weights
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("in_the_checkout")
LOADED = [name for name, case in CASES.items() if case.refused is None]
REFUSED = [name for name, case in CASES.items() if case.refused is not None]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], Path]:
    """Return the folder of a case, which is made once."""
    model = save_random_model(tmp_path_factory.mktemp("random") / "model", intermediate_size=384)
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            place = tmp_path_factory.mktemp("published") / "model"
            folders[name] = make(CASES[name], place, model)
        return folders[name]

    return folder


def run_of(folder: Path, name: str, *more: str) -> Config:
    return load_config([*settings(folder, CASES[name].keys, folder.parent / "runs"), *more])


def base(folder: Path, config: Config) -> PublishedBase:
    hf_config = load_hf_config(str(folder))
    return base_of(config, hf_config, meta_model(unquantized_config(hf_config)))


def unpacked(folder: Path) -> dict[str, torch.Tensor]:
    """The BF16 weights that compressed-tensors itself makes of the linears in `folder`."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    keys = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(keys)
    scheme = next(iter(config.config_groups.values()))
    compressor: Any = BaseCompressor.get_value_from_registry(config.format)
    states: dict[str, dict[str, torch.Tensor]] = {}
    for file in weight_files(folder):
        for name, tensor in load_file(file).items():
            owner, _, leaf = name.rpartition(".")
            states.setdefault(owner, {})[leaf] = tensor
    return {
        name: compressor.decompress(state, scheme)["weight"].bfloat16()
        for name, state in states.items()
        if "weight_scale" in state
    }


@pytest.mark.parametrize("name", LOADED)
def test_the_policy_multiplies_by_the_codes_of_the_file(made, name):
    folder = made(name)
    policy = Policy.load(run_of(folder, name))
    layers = {n: m for n, m in policy.model.named_modules() if isinstance(m, QuantLinear)}
    theirs = unpacked(folder)
    ours = {owner: layer.dequantized for owner, layer in layers.items()}
    for owner in list(theirs):
        parent, _, leaf = owner.rpartition(".")
        parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}.get(leaf, ())
        if parts:  # compared as the file stores them
            ours[owner] = torch.cat([ours.pop(f"{parent}.{part}_proj") for part in parts])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[owner], theirs[owner]) for owner in theirs)
    assert all(layer.frozen and layer.weight.is_meta for layer in layers.values())
    published = dict(policy.published_tensors())
    scheme = policy.scheme
    expected = expected_manifest(load_hf_config(str(folder)), scheme, policy.ignore)
    assert {n: TensorSpec.of(t) for n, t in published.items()} == expected
    stored = {n: t for file in weight_files(folder) for n, t in load_file(file).items()}
    for owner in stored.keys() & published.keys():
        if not owner.endswith(("weight_scale", "weight_shape")):
            assert torch.equal(published[owner].view(torch.uint8), stored[owner].view(torch.uint8))
    assert "model.embed_tokens.weight" in stored.keys() & published.keys()
    assert policy.adapters is not None and len(policy.adapters.layers) == 14


@pytest.mark.parametrize(
    ("name", "share"),
    [("W4A16, groups of 32", 0.05), ("W8A8, int8 channels", 0.05), ("FP8, channels", 0.1)],
)
def test_the_forward_is_near_that_of_transformers_on_the_unpacked_weights(made, name, share):
    """transformers unpacks the codes with compressed-tensors, and rounds no activations. Half a step of e4m3 is up to
    1/16 of a number."""
    folder = made(name)
    policy = Policy.load(run_of(folder, name))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        theirs = reference(tokens).logits.float()
    ours = policy.model(tokens, use_cache=False).logits.float()
    assert (ours - theirs).norm() < share * theirs.norm()
    ours.sum().backward()
    assert all(layer.lora_B.grad is not None for layer in policy.adapters.layers.values())


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_do_not_compute_is_refused_by_name(made, name):
    folder = made(name)
    with pytest.raises(UserError) as error:
        check_quantized(run_of(folder, name), load_hf_config(str(folder)))
    assert str(CASES[name].refused) in error.value.what
    assert error.value.why and error.value.fix


def test_awq_converted_by_compressed_tensors_has_the_codes_that_it_began_with(made):
    """The proof writes AutoAWQ's order of codes itself, so it is compared with the codes before."""
    before, after = (
        load_file(made(name) / "model.safetensors")
        for name in ("W4A16, groups of 32", "W4A16, from AWQ by its converter")
    )
    assert before.keys() == after.keys()
    codes = [name for name in before if name.endswith("weight_packed")]
    assert codes and all(torch.equal(before[name], after[name]) for name in codes)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["quant.group_size=64"], "quant.group_size=32"),
        (["quant.scheme=w8a8"], "quant.scheme=w4a16"),
        (["quant.ignore=[lm_head]"], "quant.ignore="),
        (['quant.ignore=[lm_head,"re:.*layers[.]1[.].*"]'], "quant.ignore="),
    ],
    ids=str,
)
def test_a_config_that_says_something_else_is_told_the_right_keys(made, more, key):
    name = "W4A16, a layer and all down_proj ignored"
    folder = made(name)
    keys = dict(CASES[name].keys)
    keys.pop(more[0].partition("=")[0])
    arguments = list(settings(folder, keys, folder.parent / "runs"))
    with pytest.raises(UserError) as error:
        base(folder, load_config([*arguments, *more]))
    fix = str(error.value.fix)
    assert key in fix
    if "ignore" in key:
        assert base(folder, load_config([*arguments, fix.removeprefix("set ")])).linears


def test_training_all_weights_of_codes_is_refused(made):
    folder = made("W8A8, int8 channels")
    config = load_config(["config=quickstart.yaml", f"model.path={folder}", "quant.scheme=w8a8"])
    with pytest.raises(UserError, match="already quantized") as error:
        check_quantized(config, load_hf_config(str(folder)))
    assert "lora.r=8" in str(error.value.fix) and "BF16 checkpoint" in str(error.value.fix)


@pytest.mark.parametrize(
    ("method", "more"), [("gptq", []), ("compressed-tensors", ["backend=verl"])], ids=str
)
def test_adapters_are_no_advice_for_codes_that_they_cannot_have(made, method, more):
    folder = made("W8A8, int8 channels")
    hf_config = load_hf_config(str(folder))
    hf_config.quantization_config = {**quantization_of(hf_config), "quant_method": method}
    keys = ["config=quickstart.yaml", f"model.path={folder}", "quant.scheme=w8a8", *more]
    with pytest.raises(UserError, match="already quantized") as error:
        check_quantized(load_config(keys), hf_config)
    assert "lora" not in str(error.value.fix) and "BF16 checkpoint" in str(error.value.fix)


def test_verl_refuses_the_base_before_ray_starts(made):
    folder = made("W8A8, int8 channels")
    config = run_of(folder, "W8A8, int8 channels", "backend=verl")
    with pytest.raises(UserError, match="already quantized") as error:
        check_quantized(config, load_hf_config(str(folder)))
    assert "backend=local" in str(error.value.fix)


def changed(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{Q}.weight_packed"), f"{Q}.weight_packed is missing"),
        (lambda t: t.pop(f"{Q}.weight_shape"), f"{Q}.weight_shape is missing"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (
            lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :2].clone()}),
            "and should be",
        ),
        (lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(128)}), "an order of columns"),
        (lambda t: t.update({f"{Q}.weight_zero_point": torch.zeros(16, 4)}), "zero points"),
        (lambda t: t.update({f"{Q}.weight": torch.zeros(128, 128)}), "no tensor of w4a16"),
        (lambda t: t.update({"model.x.weight": torch.zeros(2)}), "no tensor of the model"),
        (lambda t: t.update({"model.x.weight_scale": torch.zeros(2)}), "no linear of the model"),
    ],
    ids=[
        "codes",
        "shape",
        "norm",
        "groups",
        "g_idx",
        "zero points",
        "both",
        "unknown",
        "unknown linear",
    ],
)
def test_files_that_do_not_fit_are_told_by_their_tensors(made, tmp_path, change, words):
    name = "W4A16, groups of 32"
    folder = changed(made(name), tmp_path / "changed", change)
    with pytest.raises(UserError) as error:
        base(folder, run_of(folder, name))
    assert words in str(error.value)


def test_codes_of_another_dtype_are_refused_as_they_are_read(made, tmp_path):
    name = "W8A8, int8 channels"
    folder = changed(
        made(name),
        tmp_path / "changed",
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}),
    )
    with pytest.raises(UserError, match=r"should be torch\.int8"):
        list(base(folder, run_of(folder, name)).tensors())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
            "kv_cache_scheme",
        ),
        ({"transform_config": {"config_groups": {}, "x": 1}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"quant_method": "bitsandbytes"}, "quant_method=bitsandbytes"),
        ({"quant_method": "fp8"}, "quant_method=fp8"),
        ({"format": "marlin-24"}, "activations none, format marlin-24"),
    ],
    ids=str,
)
def test_settings_that_no_scheme_has_are_refused_by_name(made, change, words):
    folder = made("W4A16, groups of 32")
    keys = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = {name: group | {"format": None} for name, group in keys["config_groups"].items()}
    with pytest.raises(UserError, match=words) as error:
        published_scheme(keys | {"config_groups": groups} | change)
    assert error.value.fix


def test_a_sparsity_config_that_says_dense_loads(made):
    """As llm-compressor wrote it into checkpoints of which nothing is sparse."""
    folder = made("W4A16, groups of 32")
    keys = json.loads((folder / "config.json").read_text())["quantization_config"]
    dense = {"format": "dense", "sparsity_structure": "unstructured", "global_sparsity": 0.1}
    assert published_scheme(keys | {"sparsity_config": dense}) == published_scheme(keys)


def test_a_name_on_the_hub_has_the_generation_config_of_its_snapshot(made, tmp_path, monkeypatch):
    name = "W8A8, int8 channels"
    snapshot = changed(made(name), tmp_path / "snapshot", lambda t: None)
    GenerationConfig(max_new_tokens=17).save_pretrained(snapshot)
    hf_config = load_hf_config(str(snapshot))
    config = run_of(snapshot, name)
    of_hub = config.model.model_copy(update={"path": "somebody/of-the-hub"})
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    model, _ = load_weights(config.model_copy(update={"model": of_hub}), hf_config)
    assert model.generation_config.max_new_tokens == 17


def test_an_export_builds_the_model_of_the_base_as_the_run_does(made, monkeypatch):
    """A model with code of its own needs the permission, and its class must not see the quantization."""
    name = "W8A8, int8 channels"
    folder = made(name)
    built = list[tuple[Any, bool]]()

    def recorded(hf_config: Any, *, trust_remote_code: bool = False) -> Any:
        built.append((hf_config, trust_remote_code))
        return meta_model(hf_config, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(export_adapter, "meta_model", recorded)
    files = ModelFiles.from_folder(folder)
    scheme = published_scheme(quantization_of(files.config))
    tensors = export_adapter._base_tensors(folder, scheme, (), files, True)
    theirs = base(folder, run_of(folder, name)).tensors()
    assert {name for name, _ in tensors} == {name for name, _ in theirs}
    ((hf_config, trusted),) = built
    assert trusted and not hasattr(hf_config, "quantization_config")
