"""Ceilings that cannot be are refused, and what makes a prediction doubtful is said."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from qarl.bench.cost.ceilings import Ceilings, Product
from qarl.bench.cost.doubts import doubts
from qarl.bench.cost.gpus import assumed_ceilings
from qarl.bench.cost.workload import Workload
from qarl.errors import UserError

WORK = Workload(prompts=2, n=2, prompt_length=8, response_length=24, response_max=24, micro_batch_size=2,
                log_prob_micro_batch_size=4)  # fmt: skip


class TestDoubts:
    @pytest.mark.parametrize(
        "place, value, message",
        [
            (("engine", "logit"), -1e-9, "engine.logit is -1e-09"),
            (("head", "forward"), float("nan"), "head.forward is nan"),
            (("quantize", "w8a8", "prepare"), float("inf"), "quantize.w8a8.prepare is inf"),
            (("blocks", "off", "backward", "attention"), [[64, 1e-9], [64, 2e-9]], "not in order of size"),
            (("publish", "tied"), [], "publish.tied are none"),
            (("products", "trainer forward bf16", "points"), [[32, 0.0, -1e-9, 0.0]], r"points\[0\]\[2\] is -1e-09"),
            (("optimizer",), [[2.0, {}], [1.0, {}]], "not in order of size"),
        ],
    )
    def test_costs_that_cannot_be_are_refused(self, place: tuple[str, ...], value: Any, message: str) -> None:
        content = json.loads(json.dumps(assumed_ceilings("h100").to_json()))
        inside = content
        for key in place[:-1]:
            inside = inside[key]
        assert place[-1] in inside
        inside[place[-1]] = value
        with pytest.raises(UserError, match=message):
            Ceilings.from_json(content)

    def test_what_is_doubtful_is_said(self) -> None:
        measured = replace(assumed_ceilings("h100"), assumed=False)
        assert doubts(assumed_ceilings("h100"), WORK) == []
        far = replace(WORK, prompt_length=8000)
        lines = doubts(measured, far)  # attention is known at one length alone on a data sheet
        assert len([line for line in lines if "rows of 8024 tokens" in line]) == 1
        assert not [line for line in lines if "products of" in line]
        lines = doubts(measured, replace(far, micro_batch_size=64))
        assert any(line.startswith("products of 513536 rows; they were measured up to 65536") for line in lines)
        free = {"trainer forward w8a8": Product.of([(1, 0, 1e-9, 1e-9), (64, 0, 1e-9, 0)])}
        engine = replace(measured.engine, logit=0.0)
        blocks = {"off": {"forward": replace(measured.block("off", "forward"), intermediate=0.0)}}
        lines = doubts(replace(measured, products=free, engine=engine, blocks=blocks))
        assert len(lines) == 3
        assert any(line.startswith("a weight of trainer forward w8a8 products of 64 rows and more") for line in lines)
        assert any(line.startswith("the engine's logit costs nothing") for line in lines)
        assert any(line.startswith("intermediate of a block's forward at level off") for line in lines)
