"""What a run, the doctor and the pages say about `exact`: threads, lengths of prompts, and adapters."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from engine_helpers import config
from transformers import CONFIG_MAPPING

from qarl.align.applied_level import AppliedLevel
from qarl.align.levels import AlignReport
from qarl.checks import model as checks_of_model
from qarl.checks.exact_threads import run_threads
from qarl.checks.exactness import ONE_BY_ONE, caches_prefixes, exceptions
from qarl.checks.model import level_notes
from qarl.config.level import Level
from qarl.doctor.model import alignment
from qarl.kernels.cpu.attention_tiles import TILINGS, longest_exact_prompt, longest_uncut
from qarl.process import limit_threads, thread_count


def tiny() -> Any:
    """A model whose k_proj and v_proj have 64 outputs, and whose other linears have at least 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
    return CONFIG_MAPPING["qwen3"](**sizes, **heads)


EXACT_PROMPT = longest_exact_prompt(64)
"""Of the head size of `tiny`."""


@pytest.mark.parametrize("prompt", [EXACT_PROMPT, EXACT_PROMPT + 1, 3000])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_threads_and_long_prompts(threads: int, prompt: int, tmp_path: Path) -> None:
    keys = [f"trainer.num_threads={threads}", f"data.max_prompt_length={prompt}"]
    said = exceptions(config(tmp_path, *keys), tiny())
    assert bool(said) == (threads > 1 and prompt > EXACT_PROMPT)
    if said:
        (text,) = said
        assert f"is not exact for prompts of more than {EXACT_PROMPT} tokens" in text
        assert f"data.max_prompt_length={prompt}" in text
        assert f"{threads} threads" in text and "set trainer.num_threads=1" in text


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("keys", [["backend=local"], ["backend=verl"]])
def test_long_conversations_have_sessions_only_in_the_local_backend(
    keys: list[str], beyond: int, tmp_path: Path
) -> None:
    """All but the last token of a row may be a prompt."""
    lengths = [
        "data.max_prompt_length=32",
        f"data.max_response_length={EXACT_PROMPT - 31 + beyond}",
    ]
    asked = ["rollout.environment=tools.py:answer", "trainer.num_threads=1"]
    said = exceptions(config(tmp_path, *keys, *lengths, *asked), tiny())
    assert len(said) == (keys == ["backend=verl"] and beyond)
    assert all(f"later turns of conversations of more than {EXACT_PROMPT}" in text for text in said)


def test_verls_own_loops_may_have_turns(tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    lengths = ["backend=verl", "trainer.num_threads=1", "data.max_response_length=3000"]
    for loop, number in (("tool_agent", 1), ("qarl_single_turn", 0)):
        said = exceptions(config(tmp_path, *lengths, f"verl={{{key}: {loop}}}"), tiny())
        assert len(said) == number


@pytest.mark.parametrize(
    ("rank", "targets", "responses"),
    [
        (0, None, None),
        (8, None, 8),  # 8 responses of 8 times 64 outputs are 4096
        (32, None, 2),
        (64, None, 1),
        (128, None, None),  # 128 times 64 is more
        (8, "[q_proj]", 2),
        (32, "[q_proj]", None),
    ],
)
def test_adapters_of_small_linears(
    rank: int, targets: str | None, responses: int | None, tmp_path: Path
) -> None:
    keys = [f"lora.r={rank}", *([f"lora.target_modules={targets}"] if targets else [])]
    said = exceptions(config(tmp_path, "trainer.num_threads=1", *keys), tiny())
    assert len(said) == (responses is not None)
    if said:
        assert f"may not be exact for the last {responses} responses of a batch" in said[0]
        assert ("q_proj" if targets else "k_proj") in said[0]


@pytest.mark.parametrize("prompt", [EXACT_PROMPT, EXACT_PROMPT + 1])
@pytest.mark.parametrize("level", Level)
def test_the_defaults_are_exact(
    level: Level, prompt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cores and a prefix cache, unless the level follows the engine and a prompt can be cut."""
    (tmp_path / "config.json").write_text('{"head_dim": 64}')
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    keys = [f"model.path={tmp_path}", f"quant.align={level}", f"data.max_prompt_length={prompt}"]
    settings = config(tmp_path, *keys, "trainer.num_threads=null")
    free = prompt <= EXACT_PROMPT or level < Level.MODEL
    assert run_threads(settings) == (6 if free else 1)
    assert caches_prefixes(settings, tiny(), routing=False) is free
    assert caches_prefixes(settings, tiny(), routing=True) is False
    asked = config(tmp_path, *keys, "trainer.num_threads=3", "rollout.enable_prefix_caching=true")
    assert run_threads(asked) == 3
    assert caches_prefixes(asked, tiny(), routing=True) is True
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert run_threads(settings) == 2


def test_a_model_without_a_config_has_large_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    border = longest_exact_prompt(256)
    for prompt, threads in ((border, 6), (border + 1, 1)):
        keys = ["model.path=org/name", "trainer.num_threads=null", "quant.align=model"]
        settings = config(tmp_path, *keys, f"data.max_prompt_length={prompt}")
        assert run_threads(settings) == threads


def test_a_prefix_cache_of_long_prompts_is_an_exception(tmp_path: Path) -> None:
    keys = ["trainer.num_threads=1", "rollout.enable_prefix_caching=true"]
    long = config(tmp_path, *keys, f"data.max_prompt_length={EXACT_PROMPT + 1}")
    (text,) = exceptions(long, tiny())
    assert "behind a cached prefix" in text and "leave out rollout.enable_prefix_caching" in text
    assert not exceptions(config(tmp_path, *keys, f"data.max_prompt_length={EXACT_PROMPT}"), tiny())


@pytest.mark.parametrize("level", Level)
def test_only_the_level_exact_has_exceptions(
    level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the notes of a run, and in the doctor."""
    applied = AppliedLevel(level, level)
    monkeypatch.setattr(checks_of_model, "applied_level", lambda *_: applied)
    settings = config(
        tmp_path, f"quant.align={level}", "trainer.num_threads=2", "data.max_prompt_length=3000"
    )
    found = exceptions(settings, tiny())
    assert len(found) == 1
    assert (found[0] in level_notes(settings, tiny())) == (level == "exact")
    whats = [finding.what for finding in alignment(settings, applied, None, tiny())]
    assert (found[0] in whats) == (level == "exact")


@pytest.mark.parametrize("asked", [Level.MODEL, Level.EXACT])
def test_the_log_says_for_which_prompts(asked: Level) -> None:
    many = str(AlignReport(asked, Level.EXACT, threads=2, exact_prompt=320))
    assert "for prompts of up to 320 tokens, with 2 threads" in many
    assert "prompts" not in str(AlignReport(asked, Level.EXACT, threads=1))
    assert "prompts" not in str(AlignReport(asked, Level.LINEARS, threads=2))


def test_the_pages_name_the_same_limits() -> None:
    alignment_page, lora_page = (
        (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        for name in ("understand/alignment", "understand/adapters")
    )
    for size in (64, 128):  # the page's figures are those of 1 MiB of L2 cache
        longest = longest_uncut(size, l2_bytes=2**20, tiling=TILINGS["vec"])
        assert re.search(rf"\| {size} \| {longest} \|", alignment_page)
    assert f"linear is at most {ONE_BY_ONE}" in lora_page


@pytest.mark.parametrize(
    ("asked", "environment", "processes", "expected"),
    [
        (3, "2", 1, 3),
        (None, "2", 1, 2),
        (None, "4,2", 1, 4),
        (None, "", 1, 6),
        (None, "", 4, 1),
        (None, "", 8, 1),
    ],
)
def test_the_number_of_threads(
    asked: int | None,
    environment: str,
    processes: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    assert thread_count(asked, processes=processes) == expected


@pytest.mark.parametrize(
    ("threads", "set_by_user", "policy"),
    [
        (2, None, "passive"),
        (1, None, None),
        (2, "OMP_WAIT_POLICY", "active"),
        (2, "GOMP_SPINCOUNT", None),
    ],
)
def test_several_threads_wait_asleep(
    threads: int, set_by_user: str | None, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has set how they wait."""
    environment = {"OMP_NUM_THREADS": "3"} | ({set_by_user: "active"} if set_by_user else {})
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.delitem(sys.modules, "torch")
    limit_threads(threads)
    assert environment["OMP_NUM_THREADS"] == str(threads)
    assert environment.get("OMP_WAIT_POLICY") == policy
