"""A judge behind an OpenAI-compatible address, such as another vLLM: it says how good each answer is, from 0 to 10.

    vllm serve MODEL --port 8000
    QARL_JUDGE_URL=http://localhost:8000/v1 QARL_JUDGE_MODEL=MODEL \\
        qarl train config=quickstart.yaml reward.function=examples/judge.py:judged

`judged` gets all answers of a batch at once and asks about `AT_ONCE` of them at a time. verl scores each answer by
itself: name `judged_alone` there, also in the list below. Beside other functions it has a weight
(docs/do/reward.md#several-functions):

    reward.functions='[{function: math_verify}, {function: examples/judge.py:judged, weight: 0.5}]'

A judge that does not answer, or not with a number, is an error, and the run stops: a score of 0 would teach the model
to write what the judge cannot read. Each question is asked `TRIES` times before.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

URL = os.environ.get("QARL_JUDGE_URL", "http://localhost:8000/v1")
MODEL = os.environ.get("QARL_JUDGE_MODEL", "judge")
KEY = os.environ.get("QARL_JUDGE_KEY", "none")
AT_ONCE = 32
TRIES = 3
SECONDS = 15
"""Time limit of a request. All tries must fit into reward.timeout_s."""
QUESTION = """\
Reference answer: {truth}
Answer of a student: {answer}

How good is the student's answer, from 0 to 10? Write the number alone."""
POOL = ThreadPoolExecutor(AT_ONCE)


async def judged(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[Any],
    extra_infos: list[dict[str, Any]],
) -> list[float]:
    """Return a score from 0 to 1 for each answer."""
    loop = asyncio.get_running_loop()
    asked = [
        loop.run_in_executor(POOL, score, answer, truth)
        for answer, truth in zip(solution_strs, ground_truths, strict=True)
    ]
    return await asyncio.gather(*asked)


async def judged_alone(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return the score of one answer."""
    return await asyncio.to_thread(score, solution_str, ground_truth)


def score(answer: str, truth: Any) -> float:
    """Ask the judge. Raise OSError if it cannot be reached, and ValueError if it says no number from 0 to 10."""
    question = QUESTION.format(truth=truth, answer=answer)
    problem: Exception | None = None
    for _ in range(TRIES):
        try:
            text = reply(question)
            number = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\D*", text)
            if number is None or float(number[1]) > 10:
                raise ValueError(f"the judge said {text[:80]!r} instead of a number from 0 to 10")
            return float(number[1]) / 10
        except (OSError, ValueError) as error:
            problem = error
    assert problem is not None
    raise problem


def reply(question: str) -> str:
    """Return what the model behind `URL` says, greedily."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 8,
    }
    request = urllib.request.Request(
        f"{URL}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])
