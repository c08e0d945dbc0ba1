"""A game of several turns: guess a number from 1 to 500. `qarl warm-start examples/guessing_game.py` makes a model.

The model guesses, the environment says higher or lower, and a game that ends sooner earns more. docs/do/turns.md
explains the functions.
"""

LAST = 500
MOST_GUESSES = 12


def draw(rng):
    """One game, from Python's random.Random: a name, which is all that the model sees, and the number to guess."""
    return f"{rng.randrange(10**6):06}", rng.randint(1, LAST)


def prompt(problem):
    return f"game {problem[0]}"


def answer(problem):
    """The model's turns that the warm start teaches: halve what is left."""
    low, high = 1, LAST
    guesses = []
    while not guesses or guesses[-1] != problem[1]:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if guesses[-1] < problem[1] else (low, guesses[-1] - 1)
    return [str(guess) for guess in guesses]


def truth(problem):
    return str(problem[1])


def environment(messages, data_source, ground_truth, extra_info=None):
    """Answer the last guess, and end the game at the right one."""
    guesses = sum(message["role"] == "assistant" for message in messages)
    text = messages[-1]["content"]
    if text == ground_truth:
        return {"reply": None, "reward": 1 - (guesses - 1) / MOST_GUESSES}
    if guesses == MOST_GUESSES:
        return None
    if not (text.isascii() and text.isdigit()):
        return "number?"
    return "higher" if int(text) < int(ground_truth) else "lower"
