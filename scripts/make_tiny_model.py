"""Makes the tiny models and their data, as `qarl demo` does, with settings of one's own (`qarl.demo.tiny_model`).

python scripts/make_tiny_model.py               # about a minute on one CPU core; a second call returns at once
python scripts/make_tiny_model.py --experts 8   # a Qwen3-MoE, two of eight experts a token, models/tiny-qwen3-moe
python scripts/make_tiny_model.py --task letter_sorting    # another task (qarl/demo/tasks.py): a few minutes
"""

from __future__ import annotations

from qarl.demo.tiny_model import main

if __name__ == "__main__":
    raise SystemExit(main())
