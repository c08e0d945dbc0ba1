"""The objectives of `actor.loss` and the corrections of the section `rollout_correction`. Both backends use this code.

Read `settings.py` first (the settings of an objective), then `loss.py` (objectives, weights and rejections).
`verl_functions.py` calls verl's functions.
"""
