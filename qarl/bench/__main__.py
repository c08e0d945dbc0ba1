"""`python -m qarl.bench PART key=value ...`: the keys of each part are described in its module.

Exit codes: 0 everything was measured; 1 a check failed, so that figures are missing (the rest was measured); 2 an
argument will not do.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from qarl.errors import UserError

PARTS = {
    "kernels": "qarl.bench.arguments:run_kernels",
    "steps": "qarl.bench.steps.arguments:run_part",
    "rollout": "qarl.bench.steps.arguments:run_part",
    "trainer": "qarl.bench.steps.arguments:run_part",
    "publish": "qarl.bench.steps.arguments:run_part",
    "ceilings": "qarl.bench.cost.arguments:run_ceilings",
    "plan": "qarl.bench.cost.arguments:run_plan",
    "agree": "qarl.bench.steps.agree:run_agree",
}
"""Name of a part -> `module:function`, which takes the name and the arguments and returns the exit code. The module
does not import torch: the threads are set before that."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the part that `argv` names; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        part = arguments[0] if arguments else ""
        if part not in PARTS:
            near = difflib.get_close_matches(part, PARTS, n=1)
            raise UserError(
                f"there is no benchmark {part!r}" if part else "no benchmark is named",
                where="qarl.bench",
                fix=f"one of {', '.join(PARTS)}" + (f" (nearest: {near[0]})" if near else ""),
            )
        module, _, function = PARTS[part].partition(":")
        return int(getattr(importlib.import_module(module), function)(part, arguments[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
