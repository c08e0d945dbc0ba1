"""Own schemes, kernels, optimizers and objectives: files and modules that a run imports before it reads its config.

    plugins: [my_scheme.py, my_package.objective]

Such a module registers what it adds when it is imported (`qarl.schemes.register`, `qarl.kernels.registry.register`,
`qarl.config.optimizers.register`, `qarl.config.objectives.register`). Their names are then values of the config like
QaRL's own. CONTRIBUTING.md has an example of each.

Every process of a run imports the same modules: the config names them, and the environment variable `QARL_PLUGINS`
carries them, with absolute paths, to the processes that never read the config, such as verl's workers and vLLM's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from qarl.errors import UserError

VARIABLE = "QARL_PLUGINS"
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
"""Folders of installed packages."""


def load_plugins(names: Sequence[str]) -> None:
    """Import files (NAME.py) and modules (dotted names), and name them to the processes that this one starts.

    A plugin that is loaded already is left alone. Raise UserError if one cannot be imported."""
    plugins = [_absolute(name) for name in names]
    for plugin in plugins:
        _load(plugin)
    if plugins:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*_of_parent(), *plugins]))


def load_plugins_of_parent() -> None:
    """Import the plugins of the process that started this one."""
    for plugin in _of_parent():
        _load(plugin)


def _of_parent() -> list[str]:
    return [plugin for plugin in os.environ.get(VARIABLE, "").split(os.pathsep) if plugin]


def _absolute(name: str) -> str:
    return os.path.abspath(os.path.expanduser(name)) if name.endswith(".py") else name


def _load(plugin: str) -> None:
    try:
        if plugin.endswith(".py"):
            _load_file(Path(plugin))
        else:
            importlib.import_module(plugin)
    except UserError:
        raise
    except SystemExit as error:
        raise UserError(
            f"the plugin {plugin} ends the program when it is imported",
            where="plugins",
            why=f"it calls sys.exit({error.code!r}){_location(error)}",
            fix="let it only define and register what it adds; what a script does belongs under "
            "`if __name__ == '__main__':`",
        ) from error
    except Exception as error:
        location = _location(error)
        if plugin.endswith(".py") and not Path(plugin).is_file():
            raise UserError(
                f"there is no plugin {plugin}",
                where="plugins",
                why="a run needs its plugins also when it is resumed, scored or diagnosed",
                fix="put the file back, or name where it is: plugins=[FILE.py]",
            ) from error
        fix = "give files that end in .py, or modules that this Python environment can import"
        if location or isinstance(error, SyntaxError):
            fix = "correct the plugin, or install what it imports"
        raise UserError(
            f"the plugin {plugin} cannot be imported",
            where="plugins",
            why=f"{type(error).__name__}: {error}{location}",
            fix=fix,
        ) from error


def _location(error: BaseException) -> str:
    """Return the place in the plugin's code at which `error` was raised, or "" if none of it ran. Installed packages
    count only if nothing else ran: one that the plugin calls, or that has replaced `sys.exit`, is not its code."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = ("<frozen", os.path.dirname(importlib.__file__), __file__)
    own = [frame for frame in frames if not frame.filename.startswith(foreign)]
    if not own:
        return ""
    last = [frame for frame in own if not frame.filename.startswith(_INSTALLED)] or own
    return f" (at {last[-1].filename}, line {last[-1].lineno}, in {last[-1].name})"


def _load_file(path: Path) -> None:
    """Import a file as a module of its own name, once."""
    name = f"qarl_plugin_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return
    if known is not None:
        raise UserError(
            f"two plugins are files called {path.name}",
            where="plugins",
            why=f"{known.__file__} is loaded already",
            fix="rename one of them",
        )
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
