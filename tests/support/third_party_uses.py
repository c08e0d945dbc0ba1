"""Every name of another package that qarl's sources use, and every call of one, read from the sources by `ast`.

A name is followed from its import (also one inside a function, or `module = importlib.import_module(CONSTANT)`) through
its attributes, as in `ops.machete_mm(...)`. Methods of objects are not followed, because sources do not say their type.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from checkout import ROOT

NEVER = object()


class Call(NamedTuple):
    """The arguments of one call: how many are given by position, the keywords, and whether it has `*` or `**`."""

    positional: int
    keywords: tuple[str, ...]
    starred: bool


class Use(NamedTuple):
    """`target`: a dotted name such as `vllm.platforms.current_platform`. `call`: None if it is not called there."""

    file: str
    line: int
    target: str
    call: Call | None = None

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]


def uses(path: Path) -> list[Use]:
    """The uses in one file, each (target, call) once, at its first line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    by_target: dict[tuple[str, Call | None], Use] = {}
    for line, target, call in _Reader(tree).uses:
        top = target.partition(".")[0]
        if top != "qarl" and top not in sys.stdlib_module_names:
            name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
            by_target.setdefault((target, call), Use(name, line, target, call))
    return list(by_target.values())


def package_uses(package: Path = ROOT / "qarl") -> list[Use]:
    return [use for path in sorted(package.rglob("*.py")) for use in uses(path)]


class _Reader(ast.NodeVisitor):
    """`scopes`: for each open function, the names that stand for something imported, or None for other variables."""

    def __init__(self, tree: ast.Module) -> None:
        self.uses: list[tuple[int, str, Call | None]] = []
        self.constants: dict[str, str] = {}
        self.scopes: list[dict[str, str | None]] = [{}]
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.uses.append((node.lineno, alias.name, None))
            top = alias.name.partition(".")[0]
            self.scopes[-1][alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            return
        for alias in node.names:
            target = f"{node.module}.{alias.name}"
            self.uses.append((node.lineno, target, None))
            self.scopes[-1][alias.asname or alias.name] = target

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        text = self._text(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.scopes[-1][target.id] = (
                    self._target(node.value) if isinstance(node.value, ast.Call) else None
                )
                if text is not None and len(self.scopes) == 1:
                    self.constants[target.id] = text
            else:
                self.visit(target)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for child in (
            *node.decorator_list,
            *node.args.defaults,
            *filter(None, node.args.kw_defaults),
        ):
            self.visit(child)
        arguments = (
            *node.args.posonlyargs,
            *node.args.args,
            *node.args.kwonlyargs,
            node.args.vararg,
            node.args.kwarg,
        )
        self.scopes.append({argument.arg: None for argument in arguments if argument})
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        module = self._imported_module(node)
        target = self._target(node.func)
        if module:
            self.uses.append((node.lineno, module, None))
        elif target:
            starred = any(isinstance(argument, ast.Starred) for argument in node.args) or any(
                keyword.arg is None for keyword in node.keywords
            )
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            positional = sum(not isinstance(argument, ast.Starred) for argument in node.args)
            self.uses.append((node.lineno, target, Call(positional, keywords, starred)))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if target := self._target(node):
            self.uses.append((node.lineno, target, None))
        self.generic_visit(node)

    def _target(self, node: ast.AST) -> str | None:
        """The dotted name that an expression stands for, or None."""
        if isinstance(node, ast.Name):
            return next(
                (scope[node.id] for scope in reversed(self.scopes) if node.id in scope), None
            )
        if isinstance(node, ast.Attribute):
            owner = self._target(node.value)
            return f"{owner}.{node.attr}" if owner else None
        return self._imported_module(node) if isinstance(node, ast.Call) else None

    def _imported_module(self, node: ast.Call) -> str | None:
        is_import = ast.unparse(node.func) in ("importlib.import_module", "import_module")
        return self._text(node.args[0]) if is_import and node.args else None

    def _text(self, node: ast.AST) -> str | None:
        """A constant text, or an f-string of the module's constants."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            return self.constants.get(node.id)
        if isinstance(node, ast.FormattedValue):
            return self._text(node.value)
        if isinstance(node, ast.JoinedStr):
            parts = [self._text(part) for part in node.values]
            return None if None in parts else "".join(part for part in parts if part)
        return None


def resolve(target: str) -> Any:
    """Return the object of a dotted name. Attributes are followed through modules and classes; those of other objects
    must only exist. Raises ImportError or AttributeError."""
    parts = target.split(".")
    for length in range(
        1, len(parts) + 1
    ):  # a class may have the name of the module that it is imported from
        try:
            return _follow(importlib.import_module(".".join(parts[:length])), parts[length:])
        except AttributeError:
            if length == len(parts):
                raise
        except ModuleNotFoundError:
            break
    return _follow(importlib.import_module(parts[0]), parts[1:])


def _follow(target: Any, names: list[str]) -> Any:
    for name in names:
        static = inspect.getattr_static(target, name) if inspect.isclass(target) else None
        target = (
            getattr(target, name)
            if static is None or isinstance(static, staticmethod | classmethod)
            else static
        )
    return target


def why_not_callable(function: Any, call: Call) -> str | None:
    """Return why `function` refuses the arguments, or None if it takes them or has no signature to read."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    if (
        inspect.isclass(function) and parameters and parameters[0].name == "self"
    ):  # a class of tokenizers, in Rust
        signature = signature.replace(parameters=parameters[1:])
    bind = signature.bind_partial if call.starred else signature.bind
    try:
        bind(*[NEVER] * call.positional, **dict.fromkeys(call.keywords, NEVER))
    except TypeError as error:
        return str(error)
    return None


def overrides(classes: list[type]) -> Iterator[tuple[type, str, Any, Any]]:
    """Yield (class, name, its function, the function of the first class of another package that it replaces)."""
    for kind in classes:
        for name, own in vars(kind).items():
            function = getattr(own, "__func__", own)
            if not inspect.isfunction(function) or name.startswith("__"):
                continue
            for base in kind.__mro__[1:]:
                if name in vars(base) and not base.__module__.startswith("qarl"):
                    yield (
                        kind,
                        name,
                        function,
                        getattr(vars(base)[name], "__func__", vars(base)[name]),
                    )
                    break
