#!/bin/sh
# Everything that needs a GPU, in one command of under nine minutes; see scripts/gpu_check.py, which takes the arguments.
#     scripts/gpu_check.sh            on a machine with a GPU
#     scripts/gpu_check.sh --cpu      the same parts with small shapes on a CPU: tries the script, measures nothing
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" scripts/gpu_check.py "$@"
