from __future__ import annotations

import re


def extract_answer(completion: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    return found[-1].strip() if found else None
