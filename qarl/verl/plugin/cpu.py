"""The value of `actor_rollout_ref.model.external_lib` on CPU: verl imports this module when it reads a model's config.

A trainer imports this before it makes its process group. verl would ask torch for a group over "cpu:gloo" and over the
platform's device (verl/utils/distributed.py). On CPU both are the same device, which torch refuses. verl uses an
existing group instead, so this module makes one. A worker of agent loops imports this before it looks up a loop.
"""

import importlib
import sys

from qarl.verl.plugin.platform import join_process_group

join_process_group()
if "verl.experimental.agent_loop.agent_loop" in sys.modules:
    importlib.import_module("qarl.verl.plugin.agent_loop")
