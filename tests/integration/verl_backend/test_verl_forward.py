"""The forward of verl's engine: rows, replayed experts, and lm_head that returns log-probs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from random_models import save_random_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from verl_runs import quickstart

from qarl.align.packed_attention import use_rows_attention
from qarl.kernels import log_probs
from qarl.kernels.cpu import bf16_linear
from qarl.process import answer_for_vllm
from qarl.verl.config import fsdp_engine_settings, routing_keys

pytest.importorskip("verl")

from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

from qarl.verl.forward import (
    LogProbHead,
    RowLengths,
    as_forward,
    replace_head,
    request_log_probs,
    take_log_probs,
)

pytestmark = pytest.mark.verl

LENGTHS, RESPONSES, VOCABULARY = (80, 45), (69, 26), 60
PLACES = [*range(10, 79), *range(98, 124)]
"""Where the jagged rows predict a token of a response: each token but a row's last predicts the next."""


def load(folder: Path, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        save_random_model(folder, **changes), dtype=torch.bfloat16
    )


class Case(NamedTuple):
    """A micro-batch of two rows as verl has it, and what its engine makes of it."""

    batch: Any
    inputs: dict[str, Any]
    arguments: dict[str, Any]

    @property
    def labels(self) -> torch.Tensor:
        return self.arguments["input_ids_rmpad_rolled"]


def case(*, packed: bool = True, responses: bool = True, **flags: Any) -> Case:
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY, (length,), generator=random) for length in LENGTHS]
    columns = {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
    if responses:
        ends = [row[-count:] for row, count in zip(rows, RESPONSES, strict=True)]
        columns["responses"] = torch.nested.as_nested_tensor(ends, layout=torch.jagged)
    batch = tu.get_tensordict(columns, {})
    tu.assign_non_tensor(batch, **{"temperature": 0.7, "calculate_entropy": False} | flags)
    ids = torch.cat(rows)
    arguments = {"input_ids_rmpad_rolled": ids.roll(-1)}
    if not packed:
        inputs = {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}
        return Case(batch, inputs, arguments | {"temperature": torch.full((2,), 0.7)})
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    inputs = {"input_ids": ids[None], "position_ids": positions[None]}
    packing = {"temperature_rmpad": torch.full(ids.shape, 0.7), "pad_size": 0}
    return Case(batch, inputs, arguments | packing)


def outputs(head: LogProbHead | None, model: Any, asked: Case) -> Any:
    lengths = RowLengths.of(asked.batch)
    request_log_probs(head, asked.batch, lengths, asked.inputs, asked.arguments)
    output = model(use_cache=False, row_lengths=LENGTHS, **asked.inputs)
    return take_log_probs(head, output, asked.batch), output.logits


def by_token(logits: torch.Tensor) -> torch.Tensor:
    """Packed or padded logits, without padding, of the tokens alone: FP32 [tokens, VOCABULARY]."""
    rows = logits[0] if len(logits) == 1 else torch.cat([*map(_cut, logits, LENGTHS)])
    return rows[:, :VOCABULARY].float() / 0.7


def _cut(row: torch.Tensor, length: int) -> torch.Tensor:
    return row[:length]


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("at_a_time", [2**27, 64 * VOCABULARY])
def test_log_probs_and_gradients_are_those_of_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_a_time: int, packed: bool, tie: bool
) -> None:
    """Bit for bit where one block holds all; the weight's gradient is summed over blocks in FP32 else."""
    monkeypatch.setattr(log_probs, "LOGITS_AT_A_TIME", at_a_time)
    model = load(tmp_path, tie=tie)
    use_rows_attention(model)
    asked = case(packed=packed)
    logits = by_token(model(use_cache=False, row_lengths=LENGTHS, **asked.inputs).logits)
    every = logits.log_softmax(-1).gather(1, asked.labels[:, None])[:, 0]
    expected = torch.zeros_like(every)
    expected[PLACES] = every[PLACES]
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weight).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    names = [name for name, _ in model.named_parameters()]
    head = replace_head(model, VOCABULARY)
    assert head is model.lm_head and [name for name, _ in model.named_parameters()] == names
    output, returned = outputs(head, model, asked)
    assert returned.shape == (1, 128, 1)  # 95 places, filled up
    assert output.keys() == {"log_probs"} and output["log_probs"].offsets().tolist() == [0, 80, 125]
    assert torch.equal(output["log_probs"].values(), expected)
    (output["log_probs"].values() * weight).sum().backward()
    for name, parameter in model.named_parameters():
        error = (parameter.grad.float() - gradients[name].float()).abs().max()
        assert float(error) <= 2**-7 * float(gradients[name].abs().max()), name
    if not tie:
        assert torch.equal(head.weight.grad[VOCABULARY:], torch.zeros(4, 128).bfloat16())
    assert outputs(None, model, asked)[1].shape[-1] == 64  # nothing is asked of the next forward


def test_without_responses_every_token_has_a_log_prob(tmp_path: Path) -> None:
    """As in verl's other trainers, such as that of supervised fine-tuning."""
    model = load(tmp_path)
    asked = case(responses=False)
    with torch.no_grad():
        logits = by_token(outputs(None, model, asked)[1])
        output, _ = outputs(replace_head(model, VOCABULARY), model, asked)
    expected = logits.log_softmax(-1).gather(1, asked.labels[:, None])[:, 0]
    assert torch.equal(output["log_probs"].values(), expected)


@pytest.mark.parametrize("packed", [True, False])
def test_entropies_come_with_the_old_log_probs(tmp_path: Path, packed: bool) -> None:
    model = load(tmp_path)
    use_rows_attention(model)
    asked = case(packed=packed, calculate_entropy=True)
    with torch.no_grad():
        logits = by_token(outputs(None, model, asked)[1])
        output, _ = outputs(replace_head(model, VOCABULARY), model, asked)
    exact = torch.distributions.Categorical(logits=logits).entropy()
    entropies = output["entropy"].values()
    assert torch.allclose(entropies[PLACES], exact[PLACES], atol=1e-5)
    assert output["log_probs"].shape == output["entropy"].shape
    assert entropies.count_nonzero() == len(PLACES)


def test_verl_finds_the_log_probs_of_responses(tmp_path: Path) -> None:
    """By both of its ways."""
    model = load(tmp_path)
    head = replace_head(model, VOCABULARY)
    asked = case()
    with torch.no_grad():
        every = outputs(head, model, case(responses=False))[0]["log_probs"].values()
        found = outputs(head, model, asked)[0]["log_probs"]
    asked.batch["prompts"] = torch.nested.as_nested_tensor(
        [torch.zeros(11), torch.zeros(19)], layout=torch.jagged
    )
    rows = [every[PLACES[:69]], every[PLACES[69:]]]
    assert torch.equal(no_padding_2_padding(found, asked.batch)[1, :26], rows[1])
    nested = response_from_nested(found, asked.batch["responses"])
    assert all(map(torch.equal, nested.unbind(), rows))


def test_places_of_responses() -> None:
    """A row of 3 prompt and 2 response tokens, one without a response, one of 1 and 3."""
    lengths = RowLengths((5, 2, 4), (2, 0, 3))
    places, slots = lengths.predictors(None)
    assert places.tolist() == slots.tolist() == [2, 3, 7, 8, 9]
    assert lengths.predictors(5)[1].tolist() == [2, 3, 10, 11, 12]
    assert RowLengths((2, 1), None).predictors(4)[1].tolist() == [0, 1, 4]
    assert RowLengths((2, 1), (0, 0)).predictors(4)[0].tolist() == []


def test_everything_else_gets_logits(tmp_path: Path) -> None:
    head = replace_head(load(tmp_path), VOCABULARY)
    several = case()
    several.batch["temperature"] = torch.full((2,), 0.7)  # one for each row
    # With gradients, for the entropies.
    flags = ("calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk")

    def request(asked: Case) -> Any:
        lengths = RowLengths.of(asked.batch)
        request_log_probs(head, asked.batch, lengths, asked.inputs, asked.arguments)
        return head.request

    for other in (several, *(case(**{flag: True}) for flag in flags)):
        assert request(other) is None
    assert request(case()).temperature == 0.7


class OneProduct:
    """A model of vLLM's whose hidden states go through lm_head alone."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return bf16_linear.linear(hidden, self.weight)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", [1999, 1985, 1904, 2000])
def test_log_probs_have_the_bits_of_verls_engine(vocabulary: int, temperature: float) -> None:
    """verl masks the columns of vLLM's logits, and vLLM's sampler returns the log-probs."""
    answer_for_vllm()
    from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits
    from vllm.v1.sample.sampler import Sampler

    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(96, 128, generator=random).bfloat16()
    weight = torch.randn(2000, 128, generator=random).div(4).bfloat16()
    tokens = torch.randint(vocabulary, (96,), generator=random)
    model = OneProduct(weight)
    monkey_patch_compute_logits(model, vocabulary)
    scaled = model.compute_logits(hidden).to(torch.float32).div_(temperature)
    engine = Sampler.compute_logprobs(scaled).gather(1, tokens[:, None])[:, 0]
    for compute in (log_probs.chosen_log_probs, log_probs.log_probs_and_entropies):
        actor, _ = compute(hidden, weight, tokens, temperature=temperature, vocabulary=vocabulary)
        assert torch.equal(actor, engine)


class HeadRows(TorchDispatchMode):
    """Counts the rows of every product with a vocabulary of `columns`."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "mm" in func.__name__ or "linear" in func.__name__:
            for tensor in tree_leaves((result, args[:1])):
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1] == self.columns:
                    self.rows += tensor.numel() // self.columns
                    break
        return result


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(),
    reason="with AMX the product is an operator that the dispatch mode does not see",
)
@pytest.mark.parametrize("packed", [True, False])
def test_lm_head_multiplies_the_rows_of_responses(tmp_path: Path, packed: bool) -> None:
    """95 places here, filled up to 128. The model's own forward multiplies every position."""
    model = load(tmp_path, vocab_size=1000)
    use_rows_attention(model)
    head = replace_head(model, 1000)
    with torch.no_grad(), HeadRows(1000) as responses:
        outputs(head, model, case(packed=packed))
    with torch.no_grad(), HeadRows(1000) as logits:
        outputs(None, model, case(packed=packed))
    assert (responses.rows, logits.rows) == (128, 125 if packed else 160)


def test_other_heads_stay_and_a_tied_one_keeps_its_weight(tmp_path: Path) -> None:
    model = load(tmp_path, tie=True)
    for family, head in (("gemma2", model.lm_head), ("qwen3", torch.nn.Linear(128, 64))):
        config: Any = SimpleNamespace(model_type=family)
        plain = SimpleNamespace(config=config, get_output_embeddings=lambda head=head: head)
        assert replace_head(plain, VOCABULARY) is None
    replaced = replace_head(model, VOCABULARY)
    assert replaced is not None and replaced.weight is model.model.embed_tokens.weight


REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def routed(*lengths: int) -> torch.Tensor:
    """[rows, tokens, 2 layers, 3 experts]: each number says its row and token."""
    rows = [
        (100 * row + torch.arange(length)).view(-1, 1, 1).expand(-1, 2, 3).to(torch.int16)
        for row, length in enumerate(lengths)
    ]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize(
    ("lengths", "shape", "places"),
    [
        ((2, 3), (2, 4), [0, 1, -1, -1, 100, 101, 102, -1]),  # padded
        ((2, 3), (1, 7), [0, 1, 100, 101, 102, -1, -1]),  # packed, with padding behind
        ((3,), (1, 5), [0, 1, 2, -1, -1]),
    ],
)
def test_the_routing_of_each_position(lengths, shape, places):
    routing = as_forward(routed(*lengths), torch.zeros(*shape, dtype=torch.int64))
    assert routing.shape == (len(places), 2, 3) and routing[:, 1, 2].tolist() == places


@pytest.mark.parametrize(
    ("family", "align", "asked", "on_cpu", "expected"),
    [
        ("qwen3_moe", "linears", "auto", True, True),
        ("qwen3_moe", "model", "auto", True, False),
        ("qwen3_moe", "model", "auto", False, True),  # `model` falls back to linears on a GPU
        ("qwen3_moe", "model", "on", True, True),
        ("qwen3_moe", "off", "off", True, False),
        ("qwen3", "off", "on", True, False),
    ],
)
def test_servers_return_the_routing_that_is_replayed(
    tmp_path, family, align, asked, on_cpu, expected
):
    path = str(save_random_model(tmp_path, family))
    config = quickstart(
        **{"model.path": path, "quant.align": align, "rollout.router_replay": asked}
    )
    keys = routing_keys(config, on_cpu)
    assert keys[REPLAY] is expected
    assert fsdp_engine_settings(config)["router_replay"] == asked
