"""Refuses models that vLLM could not split over the workers of an engine, and quantization groups that it would cut.

vLLM splits a model as follows:

- q, k, v, gate and up are split along N. If there are fewer key-value heads than workers, these heads are repeated
  (vllm: QKVParallelLinear).
- o and down are split along K. Weights along K that share a scale must be on one worker.
- The vocabulary is padded to a multiple of 64 and then split.

vLLM refuses the same sizes, but only after the trainer has loaded its weights, and without naming our config keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qarl.checks import layers
from qarl.checks.layers import Shapes
from qarl.config import Config
from qarl.errors import UserError
from qarl.quant.scheme import Scheme, get_scheme

KEY = "rollout.tensor_model_parallel_size"
ROW_PARALLEL = ("o_proj", "down_proj", "dense", "dense_4h_to_h")
"""Linears that are split along K; all other linears of a block are split along N. The last two are Falcon's."""
REPLICATED = (".gate", ".shared_expert_gate")
"""Routers. They are not split, so every worker has a full copy."""
VOCABULARY_PADDING = 64
SIZES = (1, 2, 3, 4, 6, 8, 16)
"""Numbers of workers that an error may suggest."""


class SplitModel(NamedTuple):
    """The sizes of a model that matter for splitting it. `linears`: [N, K] of all linears of the decoder layers.
    `quantized`: the linears that are quantized with `scheme`. `on_cpu`: whether the engine runs on CPUs."""

    heads: int
    kv_heads: int
    vocabulary: int
    linears: Shapes
    quantized: Shapes
    scheme: Scheme
    on_cpu: bool

    def problems(self, workers: int) -> list[UserError]:
        """Return one error for each reason why vLLM cannot split the model over `workers` workers."""
        if workers == 1:
            return []
        found = [*self._heads(workers), *self._vocabulary(workers), *self._widths(workers), *self._groups(workers)]
        found = found or self._kernels(workers)
        fix = self._fix() if found else None
        return [UserError(f"{KEY}={workers}: {what}", where=where, why=why, fix=fix) for what, where, why in found]

    def parts(self, workers: int) -> Shapes:
        """Return [N, K] of each quantized linear on one worker. Call this only if the model can be split."""
        found: Shapes = {}
        for name, (n, k) in self.quantized.items():
            if name.endswith(ROW_PARALLEL):
                found[name] = (n, k // workers)
            else:
                repeated = workers > self.kv_heads and name.endswith(("k_proj", "v_proj"))
                found[name] = (n // (self.kv_heads if repeated else workers), k)
        return found

    def _heads(self, workers: int) -> list[Problem]:
        found = []
        if self.heads % workers:
            where, why = "num_attention_heads", "each worker of the engine needs the same number of whole heads"
            found.append((f"{self.heads} attention heads do not split evenly", where, why))
        if self.kv_heads % workers and workers % self.kv_heads:
            why = "vLLM gives each worker the same number of whole heads, or repeats each head on equally many workers"
            found.append((f"{self.kv_heads} key-value heads do not split evenly", "num_key_value_heads", why))
        return found

    def _vocabulary(self, workers: int) -> list[Problem]:
        padded = -(-self.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
        if padded % workers == 0:
            return []
        why = f"vLLM pads the vocabulary to a multiple of {VOCABULARY_PADDING}, then splits it into equal parts"
        return [(f"a vocabulary of {self.vocabulary} (padded: {padded}) does not split evenly", "vocab_size", why)]

    def _widths(self, workers: int) -> list[Problem]:
        """Return a problem for each width that cannot be split. `_heads` checks those of attention."""
        split = {name: k if name.endswith(ROW_PARALLEL) else n for name, (n, k) in self.linears.items()}
        bad = [name for name, size in split.items() if ".self_attn." not in name and size % workers]
        if not bad:
            return []
        what = f"{len(bad)} layers do not split evenly; the first has a width of {split[bad[0]]}"
        return [(what, layers.name_layers(bad), "every worker needs an equal part")]

    def _groups(self, workers: int) -> list[Problem]:
        """Return a problem if splitting layers along K would cut quantization groups."""
        group = self.scheme.group_size
        if not group:
            return []
        rows = {name: k for name, (_, k) in self.quantized.items() if name.endswith(ROW_PARALLEL) and k % workers == 0}
        bad = [name for name, k in rows.items() if k // workers % group]
        if not bad:
            return []
        inputs = ", ".join(map(str, sorted({rows[name] // workers for name in bad})))
        why = f"{inputs} inputs per worker are not a multiple of group_size={group}, so two workers would share a group"
        return [(f"{len(bad)} layers cannot be split along their inputs", layers.name_layers(bad), why)]

    def _kernels(self, workers: int) -> list[Problem]:
        if not self.on_cpu or self.scheme.name != "w4a16":
            return []
        try:
            layers.check_engine_shapes(self.parts(workers))
        except UserError as error:
            return [(error.what, error.where or "", f"{error.why}, which are the parts of one worker")]
        return []

    def _fix(self) -> str:
        good = [str(workers) for workers in SIZES if not self._any_problem(workers)]
        group = self.scheme.group_size
        smaller = f"; or choose quant.group_size below {group}" if group and group > 32 else ""
        return f"sizes that work here: {', '.join(good)}{smaller}"

    def _any_problem(self, workers: int) -> bool:
        checks = (self._heads, self._vocabulary, self._widths, self._groups, self._kernels)
        return workers > 1 and any(check(workers) for check in checks)


Problem = tuple[str, str, str]
"""What does not split, where, and why."""


def split_problems(
    config: Config, hf_config: Any, shapes: Shapes, quantized: Shapes, *, on_cpu: bool
) -> list[UserError]:
    """Return one error for each reason why vLLM cannot split the model over `rollout.tensor_model_parallel_size`
    workers. `shapes`: all linears of the model. `quantized`: those that are quantized."""
    workers, ranks = config.rollout.tensor_model_parallel_size, config.trainer.nnodes * config.trainer.n_gpus_per_node
    problems = []
    if ranks % workers:
        uneven = UserError(
            f"{KEY}={workers}: {ranks} ranks cannot be divided into engines of {workers} workers",
            where="trainer.nnodes * trainer.n_gpus_per_node",
            why="in verl, each worker of an engine needs one rank",
            fix=f"choose a divisor of {ranks}",
        )
        problems.append(uneven)
    heads = hf_config.num_attention_heads
    model = SplitModel(
        heads=heads,
        kv_heads=getattr(hf_config, "num_key_value_heads", None) or heads,
        vocabulary=hf_config.vocab_size,
        linears={name: shape for name, shape in shapes.items() if not name.endswith((*REPLICATED, "lm_head"))},
        quantized=quantized,
        scheme=get_scheme(config.quant.scheme, group_size=config.quant.group_size),
        on_cpu=on_cpu,
    )
    return problems + model.problems(workers)
