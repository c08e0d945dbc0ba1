"""The cost model: every formula against numbers worked by hand, and what a prediction must and must not do."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qarl.bench.cost.ceilings import (
    Block,
    Ceilings,
    EngineCost,
    OptimizerCost,
    Product,
    PublishCost,
    interpolate,
)
from qarl.bench.cost.fit import nonnegative_fit
from qarl.bench.cost.gpus import SHEETS, assumed_ceilings
from qarl.bench.cost.parts import Part, binding, distinct_experts, merged, mlp_shapes, product_part, total
from qarl.bench.cost.rollout import Engine
from qarl.bench.cost.step import Layout, predict
from qarl.bench.cost.trainer import Trainer
from qarl.bench.cost.workload import Workload, deal, response_lengths
from qarl.bench.steps.models import find_model
from qarl.checks.memory import ModelSize
from qarl.errors import UserError

SMALL = ModelSize(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=100)
"""A block: q [64, 64], k and v [32, 64], o [64, 64], gate and up [128, 64], down [64, 128]: 36864 weights."""
WORK = Workload(prompts=2, n=2, prompt_length=8, response_length=24, response_max=24, micro_batch_size=2,
                log_prob_micro_batch_size=4)  # fmt: skip
"""Four rows of 32 tokens."""


def flat(call: float = 0.0, feature: float = 0.0, weight: float = 0.0) -> Product:
    """A product whose costs are the same at every M up to 10^9."""
    return Product.of([(1, call, feature, weight), (1e9, call, feature, weight)])


def no_ceilings(**changes: Any) -> Ceilings:
    """A machine on which nothing takes time, but for `changes`."""
    zero = assumed_ceilings("h100")
    nothing = Block(0.0, 0.0, 0.0, 0.0, 0.0, ((1.0, 0.0),))

    def zeroed(entry: Any) -> Any:
        return type(entry)(*[0.0] * len(dataclasses.fields(entry)))

    made = replace(
        zero,
        copy_bytes_per_s=1e12,
        products={name: Product.of([(1, 0, 0, 0), (2, 0, 0, 1e-300)]) for name in zero.products},
        blocks={level: dict.fromkeys(("forward", "forward_grad", "backward"), nothing) for level in ("off", "model")},
        engine=zeroed(zero.engine),
        head=zeroed(zero.head),
        optimizer=tuple((size, zeroed(entry)) for size, entry in zero.optimizer),
        quantize={name: zeroed(entry) for name, entry in zero.quantize.items()},
        publish=PublishCost(0.0, 0.0, 0.0, dict.fromkeys(zero.publish.apply, 0.0), ((1.0, 0.0),), ((1.0, 0.0),)),
        memory_bytes=0,
        facts={"threads": 1},
    )
    return replace(made, **changes)


def with_product(name: str, product: Product) -> Ceilings:
    empty = no_ceilings()
    return replace(empty, products={**empty.products, name: product})


def seconds(parts: list[Part], name: str) -> float:
    return total(part for part in parts if part.name == name)


class TestInterpolation:
    def test_a_power_law_between_points(self) -> None:
        # y = x^2 / 100 through (10, 1) and (1000, 10000): at 100 it is 100.
        assert interpolate([(10, 1.0), (1000, 10000.0)], 100) == pytest.approx(100.0)

    def test_below_it_is_constant_and_above_in_proportion(self) -> None:
        points = [(10.0, 1.0), (20.0, 3.0)]
        assert interpolate(points, 1) == 1.0
        assert interpolate(points, 60) == pytest.approx(9.0)

    def test_linear_where_a_cost_is_zero(self) -> None:
        assert interpolate([(0.0, 0.0), (10.0, 5.0)], 4) == pytest.approx(2.0)


class TestFit:
    def test_finds_the_costs_that_made_the_numbers(self) -> None:
        rows = [[1.0, 10.0, 300.0], [1.0, 40.0, 100.0], [1.0, 5.0, 700.0], [1.0, 90.0, 20.0]]
        found = nonnegative_fit(rows, [2 + 0.5 * b + 0.01 * c for _, b, c in rows])
        assert found == pytest.approx([2, 0.5, 0.01])

    def test_no_cost_is_negative(self) -> None:
        # The best line through (1, 1), (2, 4) is 3 x - 2; with no negative part it is c x alone, whose relative errors
        # (c - 1)^2 + (c/2 - 1)^2 are least at c = 1.5 / 1.25.
        assert nonnegative_fit([[1.0, 1.0], [1.0, 2.0]], [1.0, 4.0]) == pytest.approx([0.0, 1.2])

    @pytest.mark.parametrize("seconds", [0.0, -1e-9, float("nan")])
    def test_times_that_are_none_are_refused(self, seconds: float) -> None:
        with pytest.raises(UserError, match="cannot be fitted"):
            nonnegative_fit([[1.0, 1.0], [1.0, 2.0]], [1.0, seconds])


class TestProducts:
    def test_a_call_its_features_and_its_weights(self) -> None:
        product = flat(call=1.0, feature=0.1, weight=0.01)
        # [20, 10] and [5, 10]: two calls, 30 + 15 features, 200 + 50 weights
        assert product.seconds(7, [(20, 10), (5, 10)]) == pytest.approx(2 + 4.5 + 2.5)
        assert product.seconds(7, [(20, 10), (5, 10)], calls=0) == pytest.approx(7.0)

    def test_compute_bound_where_arithmetic_takes_longer_than_bytes(self) -> None:
        # 10^9 FLOP/s, 10^9 bytes/s. 1000 x 1000 weights of 2 bytes: 2 ms of memory. One row: 2e6 FLOP = 2 ms, and the
        # activations' 4 kB tip it to memory; 100 rows: 200 ms of arithmetic.
        product = Product.of([(1, 0, 0, 2e-9), (1000, 0, 0, 2e-6)])
        ceilings = no_ceilings(copy_bytes_per_s=1e9)
        assert product.flop_per_s == pytest.approx(1e9)
        assert product_part(ceilings, product, "x", 1, [(1000, 1000)]).bound == "memory"
        assert product_part(ceilings, product, "x", 100, [(1000, 1000)]).bound == "compute"

    def test_a_roofline_of_a_data_sheet(self) -> None:
        h100 = assumed_ceilings("h100").product("engine", "forward", "bf16")
        memory, compute = 2 / (0.8 * 3.35e12), 2 / (0.65 * 989.4e12)
        activation = memory  # two bytes too
        assert h100.seconds(1, [(1e4, 1e4)]) == pytest.approx(1e8 * memory + 2e4 * activation)
        assert h100.seconds(2**14, [(1e4, 1e4)]) == pytest.approx(2**14 * (1e8 * compute + 2e4 * activation))

    def test_a_call_costs_the_same_beyond_the_measured_rows(self) -> None:
        product = Product.of([(1, 5.0, 0.1, 0.01), (10, 5.0, 1.0, 0.1)])
        assert product.seconds(100, [(2, 3)]) == pytest.approx(5.0 + 10.0 * 5 + 1.0 * 6)

    def test_low_bit_weights_decode_faster_and_int4_does_not_train_faster(self) -> None:
        for gpu in ("h100", "h200", "a100"):
            ceilings = assumed_ceilings(gpu)
            shape = [(4096.0, 4096.0)]

            def time(scheme: str, rows: int, ceilings: Ceilings = ceilings, shape: Any = shape) -> float:
                return ceilings.product("engine", "forward", scheme).seconds(rows, shape)

            assert time("w4a16", 1) < time("w8a8", 1) < time("bf16", 1)
            assert time("w8a8", 2**14) < time("bf16", 2**14) < time("w4a16", 2**14)
        a100 = assumed_ceilings("a100")
        assert a100.product("engine", "forward", "fp8").seconds(2**14, [(4096, 4096)]) == pytest.approx(
            a100.product("engine", "forward", "w4a16").seconds(2**14, [(4096, 4096)]), rel=0.05
        )


class TestParts:
    def test_what_binds_is_what_takes_longest(self) -> None:
        parts = [Part("a", 1.0, "memory"), Part("b", 1.5, "compute"), Part("c", 1.0, "memory")]
        assert binding(parts) == "memory"
        assert binding([]) == "-"
        assert merged([*parts, Part("a", 2.0, "memory")])[0] == Part("a", 3.0, "memory")

    def test_distinct_experts(self) -> None:
        assert distinct_experts(128, 8, 1) == pytest.approx(8)
        # each of 4 experts is missed by both tokens with probability 1/4
        assert distinct_experts(4, 2, 2) == pytest.approx(3)
        assert distinct_experts(128, 8, 10000) == pytest.approx(128)

    def test_shapes_on_several_gpus(self) -> None:
        assert mlp_shapes(SMALL, 128, fused=True, parallel=2) == [(128, 64), (64, 64)]


class TestLengths:
    def test_the_mean_is_kept_and_nothing_is_longer_than_allowed(self) -> None:
        lengths = response_lengths(1000, 2000, 8192, seed=3)
        assert sum(lengths) / 1000 == pytest.approx(2000, rel=1e-3)
        assert max(lengths) <= 8192 and min(lengths) >= 1 and len(set(lengths)) > 500
        assert lengths == response_lengths(1000, 2000, 8192, seed=3) != response_lengths(1000, 2000, 8192, seed=4)

    def test_equal_lengths(self) -> None:
        assert response_lengths(3, 32, 32, seed=0) == [32, 32, 32]
        with pytest.raises(UserError, match="40 tokens in the mean and at most 32"):
            response_lengths(3, 40, 32, seed=0)

    def test_hands(self) -> None:
        assert deal([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]

    def test_rows_are_padded_or_packed(self) -> None:
        assert WORK.row_lengths() == [32] * 4
        assert replace(WORK, prompt_length=9).row_lengths() == [40] * 4
        assert replace(WORK, prompt_length=9, padded=False).row_lengths() == [33] * 4


class TestEngine:
    def engine(self, ceilings: Ceilings, size: ModelSize = SMALL, work: Workload = WORK) -> Engine:
        return Engine(size, ceilings, "w8a8", work)

    def test_a_step_multiplies_by_every_weight_once(self) -> None:
        step = self.engine(with_product("engine forward w8a8", flat(call=1.0, weight=1.0))).decode_step(3, 0)
        assert seconds(step, "linears") == pytest.approx(2 * (4 + 36864))

    def test_lm_head_stays_bf16(self) -> None:
        step = self.engine(with_product("engine forward bf16", flat(weight=1.0))).decode_step(3, 0)
        assert seconds(step, "lm_head") == pytest.approx(100 * 64)
        assert seconds(step, "linears") == pytest.approx(0, abs=1e-200)

    def test_overhead_sampling_and_attention(self) -> None:
        engine = EngineCost(1.0, 0.1, 0.01, 0.001, 1e-3, 0, 0, 0, 0, 0, decode_key=1e-4, decode_kv=1e-5, prefill_pair=0)
        step = self.engine(no_ceilings(engine=engine)).decode_step(4, 50)
        assert seconds(step, "overhead") == pytest.approx(1 + 0.4 + 2 * (0.01 + 0.004))
        assert seconds(step, "sampling") == pytest.approx(4 * 100 * 1e-3)
        # query width 64, keys and values 2 x 32
        assert seconds(step, "attention") == pytest.approx(2 * 50 * 64 * (1e-4 + 1e-5))

    def test_a_prefill_in_pieces(self) -> None:
        engine = EngineCost(1.0, 0, 0, 0, 0, request=5.0, request_sequence=0.5, token_hidden=0, token_intermediate=0,
                            token_width=0, decode_key=0, decode_kv=0, prefill_pair=1.0)  # fmt: skip
        work = replace(WORK, max_num_batched_tokens=24)  # three prompts of 8 tokens, then the fourth
        parts = self.engine(no_ceilings(engine=engine), work=work).prefill([0, 0, 1, 1])
        assert seconds(parts, "overhead") == pytest.approx(2)
        assert seconds(parts, "requests") == pytest.approx(5 + 4 * 0.5)
        assert seconds(parts, "attention") == pytest.approx(2 * 4 * 36 * 64)  # 8 * 9 / 2 pairs a prompt
        shared = self.engine(no_ceilings(engine=engine), work=replace(work, prefix_caching=True)).prefill([0, 0, 1, 1])
        assert seconds(shared, "attention") == pytest.approx(2 * 2 * 36 * 64)

    def test_what_a_preempted_response_computes_again(self) -> None:
        # A token of a step takes 1 s in each layer and element of the hidden width, a (query, key) pair 10 s.
        engine = replace(no_ceilings().engine, token_hidden=1.0, prefill_pair=10.0)
        made = Engine(SMALL, no_ceilings(engine=engine), "w8a8", replace(WORK, prefix_caching=True),
                      kv_bytes=3.5 * 16 * SMALL.kv_bytes_per_token())  # fmt: skip
        # Three blocks of 16. Two responses of 24 to prompts of 8 have a block each for 8 steps, and then want four.
        parts, run = made.decode([24, 24], [0, 1])
        assert made.kv_blocks == 3 and run.recomputed == ((17, 17),)
        assert seconds(parts, "recomputation") == pytest.approx(2 * 64 * (17 + 10 * 17 * 18 / 2))

    def test_experts_that_are_needed_are_read(self) -> None:
        sparse = replace(SMALL, experts=4, experts_per_token=2, moe_intermediate=32, sparse_layers=(0, 1))
        engine = self.engine(with_product("engine forward w8a8", flat(weight=1.0)), sparse)
        expert, attention = 3 * 32 * 64, 64 * 64 * 2 + 2 * 32 * 64
        assert seconds(engine.decode_step(1, 0), "experts") == pytest.approx(2 * 2 * expert)
        assert seconds(engine.decode_step(2, 0), "experts") == pytest.approx(2 * 3 * expert)
        assert seconds(engine.decode_step(2, 0), "linears") == pytest.approx(2 * attention)


class TestTrainer:
    def trainer(self, ceilings: Ceilings, scheme: str = "w8a8", level: str = "linears", **changes: Any) -> Trainer:
        return Trainer(SMALL, ceilings, scheme, level, replace(WORK, **changes))

    def test_products_by_direction_and_level(self) -> None:
        forward = with_product("trainer forward w8a8", flat(call=1.0, weight=1e-3))
        # two micro-batches of two rows; 7 products in each of 2 layers
        once = 2 * (7 + 36.864)
        assert seconds(self.trainer(forward).forward([32] * 4, 96), "linears") == pytest.approx(2 * once)
        assert seconds(self.trainer(forward).old_log_prob([32] * 4, 96), "linears") == pytest.approx(once)
        assert seconds(self.trainer(forward, level="off").forward([32] * 4, 96), "linears") < 1e-100
        backward = with_product("trainer backward w8a8", flat(weight=1e-3))
        assert seconds(self.trainer(backward).backward([32] * 4, 96), "linears") == pytest.approx(2 * 2 * 36.864)

    def test_checkpointing_computes_blocks_again_but_not_the_head(self) -> None:
        empty = no_ceilings()
        both = {"trainer forward head": flat(weight=1.0), "trainer forward w8a8": flat(weight=1.0)}
        ceilings = replace(empty, products={**empty.products, **both})
        again = self.trainer(ceilings, checkpointing=True).backward([32] * 4, 96)
        assert seconds(again, "linears") == pytest.approx(2 * 2 * 36864)
        assert seconds(again, "lm_head") < 1e-100

    def test_widths_and_attention_of_a_block(self) -> None:
        block = Block(call=1.0, hidden=1e-3, intermediate=1e-4, attention_width=1e-5, qk_norm_width=1.0,
                      attention=((16.0, 1e-6), (64.0, 4e-6)))  # fmt: skip
        passes = dict.fromkeys(("forward", "forward_grad", "backward"), block)
        parts = self.trainer(no_ceilings(blocks={"off": passes, "model": passes})).old_log_prob([32] * 4, 96)
        assert seconds(parts, "overhead") == pytest.approx(2)
        each = 64 * 1e-3 + 128 * 1e-4 + (64 + 64) * 1e-5  # no qk_norm in this model
        assert seconds(parts, "norms, rotary, activation") == pytest.approx(2 * 128 * each)
        assert seconds(parts, "attention") == pytest.approx(2 * 128 * 64 * 2e-6)  # at T = 32 half way in the logarithm

    def test_logits_of_the_places_that_predict_a_response(self) -> None:
        # Of a row's 32 places the last 25 predict something: 7 are inside the prompt.
        head = replace(no_ceilings().head, forward=1.0)
        counted = Product.of([(1, 0, 0, 1e-6), (1e6, 0, 0, 1.0)])  # a second for each 10^6 rows and weight
        ceilings = replace(with_product("trainer forward head", counted), head=head)
        parts = self.trainer(ceilings).old_log_prob([32] * 4, 96)
        assert seconds(parts, "lm_head") == pytest.approx(4 * 25 * 6400 * 1e-6)
        assert seconds(parts, "log-softmax") == pytest.approx(96 * 100)

    def test_gradients_optimizer_and_quantizer(self) -> None:
        empty = no_ceilings()
        small = OptimizerCost(first=1.0, add=10.0, clip=100.0, step_fp32=1000.0, step_bf16=0.0, embedding=0.0)
        large = dataclasses.replace(small, clip=0.0, step_fp32=1e4)
        optimizer = ((2.0**20, small), (2.0**22, large))
        quantize = dict.fromkeys(empty.quantize, type(empty.quantize["w8a8"])(1.0, 10.0, 100.0))
        trainer = self.trainer(no_ceilings(optimizer=optimizer, quantize=quantize), mini_batches=2, micro_batch_size=1)
        parameters, weights = SMALL.parameters, 2 * 36864
        assert parameters == 2 * 6400 + weights + 5 * 64
        backward = trainer.backward([32] * 4, 96)
        # four micro-batches in two mini-batches: two start a sum, two are added
        assert seconds(backward, "gradient sums") == pytest.approx(22 * parameters)
        assert seconds(backward, "dequantize") == pytest.approx(2 * 100 * weights)
        assert total(trainer.optimizer()) == pytest.approx(2 * 1100 * parameters)
        assert total(trainer.quantize()) == pytest.approx(2 * 11 * weights)
        wide = replace(SMALL, vocab=2**20)  # embedding and lm_head have 2^26 parameters each, past the second point
        many = Trainer(wide, trainer.ceilings, "bf16", "off", WORK)
        assert total(many.optimizer()) == pytest.approx(1100 * (wide.parameters - 2 * 2**26) + 1e4 * 2 * 2**26)
        # half way between the points, in the logarithm
        between = trainer.ceilings.optimizer_at(2.0**21)
        assert between.step_fp32 == pytest.approx(1e4 / 10**0.5)
        sharded = Trainer(wide, trainer.ceilings, "bf16", "off", WORK, ranks=64)  # 2^20 parameters of each table
        assert total(sharded.optimizer()) == pytest.approx(1100 * wide.parameters / 64)
        off = self.trainer(no_ceilings(quantize=quantize), level="off", mini_batches=2)
        assert total(off.quantize()) == pytest.approx(weights)
        assert off.backward([32] * 4, 96) != [] and seconds(off.backward([32] * 4, 96), "dequantize") == 0
        assert self.trainer(no_ceilings(quantize=quantize), scheme="bf16", level="off").quantize() == []

    def test_publish_counts_bytes_and_weights(self) -> None:
        publish = replace(no_ceilings().publish, validate=1.0, transfer=10.0)
        trainer = self.trainer(no_ceilings(publish=publish))
        # int8 weights with FP32 scales of 512 output channels a block; embedding, lm_head and norms in BF16
        wire = 2 * (36864 + 4 * 512) + 2 * (2 * 6400 + 5 * 64)
        assert sum(n for n, _ in SMALL.block_linears(0).values()) == 512
        assert total(trainer.publish()) == pytest.approx(11 * wire)
        apply = dict.fromkeys(publish.apply, 0.0) | {"w8a8": 1.0}
        tables = {"tied": ((1.0, 5.0),), "untied": ((1.0, 110.0),)}
        ceilings = no_ceilings(publish=replace(no_ceilings().publish, apply=apply, **tables))
        assert total(self.trainer(ceilings).publish()) == pytest.approx(2 * 36864 + 110 * 6400)


class TestSteps:
    def test_phases_add_up(self) -> None:
        step = predict(SMALL, assumed_ceilings("h100"), WORK, "w8a8", "linears")
        assert step.step == pytest.approx(step.rollout + step.update + sum(
            step.seconds(p) for p in ("old_log_prob", "quantize", "publish")))  # fmt: skip
        assert step.seconds("communication") == 0 and step.decode_steps == 23 and step.mean_batch == 4

    def test_more_gpus_take_less_time_and_talk_more(self) -> None:
        size = ModelSize.from_config(find_model("Qwen3-8B").config)
        work = replace(WORK, prompts=64, n=8, prompt_length=512, response_length=1024, response_max=4096, padded=False)
        h100 = assumed_ceilings("h100")
        assert h100.links  # nodes with one adapter, so that the links show beside the computation
        h100 = replace(h100, links=replace(h100.links, network=h100.links.network / h100.links.gpus_per_node))
        one, two = (predict(size, h100, work, "bf16", "off", Layout(gpus)) for gpus in (8, 16))
        assert two.seconds("backward") < 0.7 * one.seconds("backward") and two.rollout < one.rollout
        assert two.seconds("communication") > one.seconds("communication")
        low_bit = [predict(size, h100, work, "w4a16", "linears", Layout(16, low_bit_gather=g)) for g in (False, True)]
        assert low_bit[1].seconds("communication") < low_bit[0].seconds("communication")
        publish = [predict(size, h100, work, "w4a16", "linears", Layout(16, low_bit_publish=p)) for p in (False, True)]
        assert publish[1].seconds("publish") < publish[0].seconds("publish")

    def test_a_rollout_is_taken_from_a_step_that_has_the_same(self) -> None:
        work = replace(WORK, response_length=16, prefix_caching=True)
        h100 = assumed_ceilings("h100")
        off, alone = (predict(SMALL, h100, work, "w8a8", level, Layout(2)) for level in ("off", "linears"))
        assert predict(SMALL, h100, work, "w8a8", "linears", Layout(2), like=off) == alone != off

    def test_an_engine_without_room_is_refused(self) -> None:
        size = ModelSize.from_config(find_model("Qwen3-30B-A3B").config)
        with pytest.raises(UserError, match=r"room for \d+ tokens"):
            predict(size, assumed_ceilings("h100"), WORK, "bf16", "off", Layout(8))

    def test_ceilings_survive_their_file(self, tmp_path: Path) -> None:
        ceilings = replace(assumed_ceilings("h200"), facts={"threads": 2})
        path = tmp_path / "ceilings.json"
        path.write_text(json.dumps(ceilings.to_json()))
        assert Ceilings.load(path) == ceilings

    def test_responses_of_a_prompt_are_spread_over_engines(self) -> None:
        """Four responses of 24 to each of two prompts of 8: two engines prefill both prompts, as does one."""
        engine = replace(no_ceilings().engine, prefill_pair=1.0, decode_key=1.0)
        work = replace(WORK, n=4, prefix_caching=True)
        one, two = (predict(SMALL, no_ceilings(engine=engine), work, "bf16", "off", Layout(gpus)) for gpus in (1, 2))
        assert one.seconds("prefill") == pytest.approx(2 * 2 * 36 * 64) == two.seconds("prefill")
        many = predict(SMALL, no_ceilings(engine=engine), work, "bf16", "off", Layout(8))
        assert many.seconds("prefill") == pytest.approx(2 * 36 * 64)

    @pytest.mark.parametrize("gpu", SHEETS)
    def test_data_sheets_say_that_they_are_assumed(self, gpu: str) -> None:
        assert assumed_ceilings(gpu).assumed
