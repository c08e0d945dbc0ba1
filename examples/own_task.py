"""A task of your own: sort ten digits. `qarl warm-start examples/own_task.py` makes a model and data for it.

docs/learn/own_task.md explains the four functions.
"""


def draw(rng):
    """One problem, from Python's random.Random. It must be hashable."""
    return "".join(rng.choices("0123456789", k=10))


def prompt(problem):
    return f"sort {problem}"


def answer(problem):
    """What the warm start teaches: a worked answer, if the task takes several steps."""
    return "".join(sorted(problem))


def reward(data_source, solution_str, ground_truth, extra_info=None):
    """From 0 to 1: the share of places that are right. Without a function `truth`, the ground truth is the answer."""
    right = sum(a == b for a, b in zip(solution_str, ground_truth, strict=False))
    return right / max(len(solution_str), len(ground_truth))
