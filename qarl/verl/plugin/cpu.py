"""The value of `actor_rollout_ref.model.external_lib` on CPU: verl imports this module when it reads a model's config.

A trainer imports this module before it makes its process group. verl would ask torch for one group over two devices,
"cpu:gloo" and the platform's device (verl/utils/distributed.py). On CPU both are the same device, and torch refuses
that. If a group already exists, verl uses it, so this module makes one. A worker of agent loops imports this module
before it looks up a loop, so this module also registers QaRL's loop.
"""

import importlib
import os
import sys

from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray

if get_device_name() == "cpu" and "RAY_LOCAL_WORLD_SIZE" in os.environ:
    initialize_global_process_group_ray(backend="cpu:gloo")
if "verl.experimental.agent_loop.agent_loop" in sys.modules:
    importlib.import_module("qarl.verl.plugin.agent_loop")
