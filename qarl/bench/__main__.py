"""`python -m qarl.bench kernels key=value ...`: what is measured, and the keys, are in `qarl.bench.kernels`.

Exit codes: 0 everything was measured; 1 a kernel failed, or its numbers are wrong (the rest was measured); 2 an
argument will not do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qarl.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that `argv` names; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        if not arguments or arguments[0] != "kernels":
            raise UserError(
                f"there is no benchmark {arguments[0]!r}" if arguments else "no benchmark is named",
                where="qarl.bench",
                fix="python -m qarl.bench kernels",
            )
        from qarl.bench.arguments import Arguments

        parsed = Arguments.parse(arguments[1:])
        parsed.limit_threads()
        from qarl.bench.kernels import run

        return run(parsed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
