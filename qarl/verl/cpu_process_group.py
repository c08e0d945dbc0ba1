"""Makes the process group of verl's trainers on a CPU. They import this module when they read a model's
config, because the key `actor_rollout_ref.model.external_lib` names it.

verl then uses this group. Otherwise it would ask torch for a group over "cpu:gloo" and the platform's device
(verl/utils/distributed.py). On CPU these are one device, and torch raises.
"""

import os

from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray

if get_device_name() == "cpu" and "RAY_LOCAL_WORLD_SIZE" in os.environ:
    initialize_global_process_group_ray(backend="cpu:gloo")
