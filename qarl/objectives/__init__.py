"""The objectives of `actor.loss` and the corrections of the section `rollout_correction`, the same in both backends.

Read `settings.py` first (the keys that take part), then `loss.py` (an objective, and what makes its parts add up).
`corrections.py` has weights and rejections. Where verl has a function, `library.py` calls it.
"""
