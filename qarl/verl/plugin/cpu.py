"""For `actor_rollout_ref.model.external_lib` on CPU: verl imports it wherever it reads the model's config.

In a trainer that is before it makes its process group: verl asks torch for one over "cpu:gloo" and the platform's
device (verl/utils/distributed.py), on CPU the same device twice, which torch refuses. A group that is there already it
takes. In a worker of agent loops it is before the loops are looked up by name.
"""

import importlib
import sys

from qarl.verl.plugin.platform import join_process_group

join_process_group()
if "verl.experimental.agent_loop.agent_loop" in sys.modules:
    importlib.import_module("qarl.verl.plugin.agent_loop")
