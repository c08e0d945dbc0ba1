#!/bin/sh
# The first session on a GPU, in one command; see scripts/gpu_check.py, which takes the arguments.
#     scripts/gpu_check.sh                   what decides most comes first; nine minutes a call, and the next goes on
#     scripts/gpu_check.sh --parts second    the other schemes, levels and figures; skips what has passed today
#     scripts/gpu_check.sh --parts several   what needs 2 to 8 GPUs
#     scripts/gpu_check.sh --cpu             a rehearsal on a CPU: tries the script, measures nothing
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" scripts/gpu_check.py "$@"
