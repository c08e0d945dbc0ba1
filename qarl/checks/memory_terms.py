"""The terms of the memory estimate (`qarl.checks.memory`): one function for each, with its arithmetic.

P is the number of weights, R the number of trainer processes over which FSDP2 shards, T the tokens of a micro-batch at
full length, V the vocabulary and H the hidden size.

    states        Masters take P * 4 bytes (FP32) or P * 2 (BF16). Moments take P * 8 (AdamW) or P * 4 (Muon's
                  matrices). FP32 gradients take P * 4. With verl these are divided by R. A step also needs 16 bytes per
                  weight of the largest parameter.
    gathered      Only with verl: two decoder blocks in the format that is sent. int4 in groups of g weights takes
                  (4 + 16 / g) / 16 of BF16's bytes, 8 bits take half. Embeddings and lm_head are in BF16. A block's
                  gradient is in BF16 until it is scattered, lm_head's until the backward ends. While the backward of a
                  block runs, FSDP2 keeps the FP32 input of the former block's reduce-scatter, and frees it before it
                  makes the next one. The scattered part takes 4 bytes divided by R.
    low_bit       The quantized weights that stay between steps (all locally, P / R with verl), their copies in a
                  kernel's layout, and the dequantized weights of the backward. With verl, W4A16 experts are gathered in
                  their kernel's layout, and the backward has one layer's in the published layout too. With adapters
                  the weights are there once, and one layer's at a time in a second layout.
    activations   Everything that autograd saves for each token in all blocks. With recomputation: H numbers of each
                  block, and everything of one block.
    expert_rows   The rows of the T k pairs of token and expert (H, and I or 2I numbers each) that the backward of one
                  layer's experts holds at its peak. QaRL's own backward saves no row and computes them again.
    logits        T * V logits. The pass for old log-probs needs 10 bytes per logit (8 with verl, which also computes
                  entropies), for at most `LOGITS_AT_A_TIME` logits. The update needs 14 bytes per logit. If there are
                  more than `LOGITS_AT_A_TIME`, the update needs 18 bytes for each of `LOGITS_AT_A_TIME` logits, and 4
                  bytes for each weight of lm_head, unless adapters leave it frozen.
    engine        Awake: vLLM's share of the GPU. Asleep (on GPUs): an allowance. With adapters on a CPU, what the local
                  trainer cannot share, and A for each token (6 bytes a number), or at the start a second base.
    offloaded     If verl offloads, in host memory: masters and moments, divided by R.
    reference     With a KL term. Locally a second copy of the weights in the model's dtype and of what `low_bit` keeps
                  between steps. With verl P * 4 bytes, or P * 2 if its model_dtype is bf16, divided by R. On GPUs verl
                  keeps them in host memory, whatever its param_offload says (CPUOffloadPolicy, for every engine that
                  is `forward_only`), and gathers less than the update does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qarl.checks.model_size import ModelSize, Shape, prepared_bytes, wire_bytes
from qarl.config.ignored_layers import is_ignored
from qarl.config.lora import ALL_LINEAR
from qarl.config.schema import BATCHED_TOKENS

if TYPE_CHECKING:
    from qarl.config import Config

GIB = 2**30
ENGINE_WORKSPACE_BYTES = GIB
"""A rough allowance for vLLM's forward, in addition to weights and KV cache."""
ENGINE_ASLEEP_BYTES = 2 * GIB
"""A rough allowance for what a sleeping engine keeps on its GPU: CUDA context, graphs, workspaces of libraries."""
ENGINE_GROUP_BYTES = GIB
"""A rough allowance for what it keeps in addition if its model is split over GPUs: buffers of NCCL and of vLLM's own
all-reduce, and the graphs' copies of them."""
LOGITS_AT_A_TIME = 2**27
"""The largest number of logits that `qarl.kernels.log_probs` holds at once."""
PHASES = ("rollout", "old_log_prob", "update", "step")
"""`update` is the forward and backward of a micro-batch. `step` is the optimizer's step."""
MATRIX_OPTIMIZER_BYTES = {"adamw": 8, "muon": 4}
"""Bytes of FP32 moments per weight of a matrix in the decoder blocks. All other weights use AdamW."""
STEP_BYTES = 16
"""Temporary bytes per weight of the parameter that a step is updating: direction or bias-corrected moments, and the
results of Newton-Schulz or of the division. The fused `torch.optim.AdamW` needs no temporary memory."""

OWN_INPUT_GRADIENT = frozenset(
    {
        "triton",
        "triton_batch_invariant",
        "vllm_machete",
        "vllm_marlin",
        "vllm_cutlass_int8",
        "vllm_cutlass_fp8",
    }
)
"""Kernels that compute the input gradient themselves. They hold only one layer's dequantized weight at a time."""
ENGINE_KERNELS = {("qarl", "w4a8"): "qarl_cpu_w4a8", ("dequantized", "w4a16"): "dequantized"}
"""(`quant.kernels`, scheme) -> the kernel whose layout replaces the published tensors in the engine."""


@dataclass(frozen=True)
class Part:
    """A part of the memory: `name` takes `bytes` on one GPU during `phases`."""

    name: str
    bytes: int
    phases: tuple[str, ...] = PHASES


def ranks(config: Config) -> int:
    """Return the number of trainer processes. FSDP2 shards over them."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def adapted_linears(size: ModelSize, config: Config) -> list[Shape]:
    """Return [N, K] of the linears with an adapter."""
    if not config.lora.r:
        return []
    linears = size.linears()
    targets = config.lora.target_modules
    of_experts = {name.rpartition(".")[2] for name in linears if ".experts." in name}
    leaves = {name.rpartition(".")[2] for name in linears} - of_experts
    chosen = leaves if ALL_LINEAR in targets else leaves & set(targets)
    return [shape for name, shape in linears.items() if name.rpartition(".")[2] in chosen]


def adapter_parameters(size: ModelSize, config: Config) -> int:
    """Return the number of weights in the adapters, or 0 if all weights of the model are trained."""
    return (config.lora.r or 0) * sum(n + k for n, k in adapted_linears(size, config))


def bf16_weights(size: ModelSize, config: Config) -> int:
    """Return the number of BF16 weights of the local trainer, or with adapters of either trainer, which has freed the
    quantized weights."""
    trained = adapter_parameters(size, config)
    quantized = quantized_linears(size, config).values() if trained else ()
    return size.parameters + trained - sum(n * k for n, k in quantized)


def optimizer_state(size: ModelSize, config: Config) -> int:
    """Return the bytes of the moments of everything that is trained."""
    each = MATRIX_OPTIMIZER_BYTES[config.optim.name]
    if trained := adapter_parameters(size, config):
        return each * trained
    matrices = size.matrix_parameters
    return each * matrices + 8 * (size.parameters - matrices)


def states(size: ModelSize, config: Config, offload: bool) -> list[Part]:
    """Return the parts for masters, moments and gradients, and for the update of one parameter."""
    verl = config.backend == "verl"
    fp32 = config.optim.master_dtype == "fp32"
    shards = ranks(config) if verl else 1
    parameters = size.parameters
    # verl loads the optimizer state for the whole update (EngineTrainModeCtx), not only for the optimizer's step.
    used = ("update", "step") if offload else PHASES
    state = Part(f"{config.optim.name} state, FP32", optimizer_state(size, config) // shards, used)
    fused = not verl and fp32 and config.optim.name == "adamw"
    trained = adapter_parameters(size, config)
    matrices = [(config.lora.r or 0) * max(shape) for shape in adapted_linears(size, config)]
    largest = max(matrices, default=size.largest_parameter)
    single = Part(
        "update of one parameter", 0 if fused else STEP_BYTES * largest // shards, ("step",)
    )
    if verl and trained:
        return [
            Part(
                "frozen BF16 weights, sharded", 2 * (bf16_weights(size, config) - trained) // shards
            ),
            Part("FP32 masters, sharded", 4 * trained // shards),
            state,
            Part("FP32 gradients, sharded", 4 * trained // shards, ("update", "step")),
            single,
        ]
    if verl:
        masters = (4 if fp32 else 2) * parameters // shards
        return [
            Part(
                f"{'FP32' if fp32 else 'BF16'} masters, sharded",
                masters,
                PHASES[1:] if offload else PHASES,
            ),
            state,
            Part("FP32 gradients, sharded", 4 * parameters // shards, ("update", "step")),
            single,
        ]
    row = config.data.max_prompt_length + config.data.max_response_length
    several = config.actor.ppo_mini_batch_size * config.rollout.n * row > micro_batch_tokens(config)
    parameters = trained or parameters
    return [
        Part("weights, BF16", 2 * bf16_weights(size, config)),
        Part("FP32 masters", 4 * parameters if fp32 else 0),
        state,
        Part("FP32 gradient sums", 4 * parameters, ("update", "step") if several else ("step",)),
        Part("BF16 gradients of a micro-batch", 2 * parameters, ("update",)),
        single,
    ]


def gathered(size: ModelSize, config: Config, align: str) -> list[Part]:
    """Return the parts for gathered weights and for gradients before FSDP2 scatters them. For `local`, return []."""
    if config.backend != "verl":
        return []
    scheme = config.quant.scheme
    group = config.quant.group_size
    low_bit = quantized_linears(size, config) if align != "off" else {}
    if trained := adapter_parameters(size, config):  # low-bit weights are whole on every rank
        kinds = [size.block_linears(i).items() for i in range(size.layers)]
        rest = max(
            sum(n * k for name, (n, k) in linears if name not in low_bit) for linears in kinds
        )
        each = trained // size.layers
        return [
            Part("gathered blocks (two)", 4 * (rest + each), ("old_log_prob", "update")),
            Part(
                "embeddings and lm_head, gathered in BF16",
                2 * size.embedding_parameters,
                ("old_log_prob", "update"),
            ),
            Part(
                "gradients of a block, BF16 and FP32",
                6 * each + 4 * each // ranks(config),
                ("update",),
            ),
        ]
    blocks = [
        sum(
            wire_bytes(scheme if name in low_bit else "bf16", group, shape)
            for name, shape in linears.items()
        )
        for linears in map(size.block_linears, range(size.layers))
    ]
    head = size.vocab * size.hidden
    block = size.largest_block
    return [
        Part("gathered blocks (two)", 2 * max(blocks), ("old_log_prob", "update")),
        Part(
            "embeddings and lm_head, gathered in BF16",
            2 * size.embedding_parameters,
            ("old_log_prob", "update"),
        ),
        Part("gradients of a block and of lm_head, BF16", 2 * block + 2 * head, ("update",)),
        Part("a block's reduce-scatter, FP32", 4 * block + 4 * block // ranks(config), ("update",)),
    ]


def quantized_linears(size: ModelSize, config: Config) -> Mapping[str, Shape]:
    if config.quant.scheme == "bf16":
        return {}
    return {
        name: shape
        for name, shape in size.linears().items()
        if not is_ignored(name, config.quant.ignore)
    }


def published(size: ModelSize, config: Config) -> int:
    """Return the number of published bytes. Quantized layers are low-bit tensors, and everything else is BF16."""
    quant = config.quant
    quantized = quantized_linears(size, config).values()
    low_bit = sum(wire_bytes(quant.scheme, quant.group_size, shape) for shape in quantized)
    return low_bit + 2 * (size.parameters - sum(n * k for n, k in quantized))


def low_bit(
    size: ModelSize, config: Config, align: str, kernels: Mapping[Shape, str]
) -> list[Part]:
    """Return the parts for quantized weights, for their copies in the kernels' layout, and for dequantized weights."""
    quantized = quantized_linears(size, config) if align != "off" else {}
    if not quantized:
        return []
    scheme = config.quant.scheme
    group = config.quant.group_size
    wire = {name: wire_bytes(scheme, group, shape) for name, shape in quantized.items()}
    prepared = {
        name: prepared_bytes(scheme, kernels.get(shape), group, shape)
        for name, shape in quantized.items()
    }
    # Experts are dequantized for each backward, one layer's stack at a time, and not kept.
    linears = [shape for name, shape in quantized.items() if ".experts." not in name]
    experts = (
        2 * size.experts * size.moe_intermediate * size.hidden
        if len(linears) < len(quantized)
        else 0
    )
    own = [2 * n * k for n, k in linears if kernels.get((n, k)) in OWN_INPUT_GRADIENT] + [
        2 * experts
    ]
    # The kernel "dequantized" already holds this weight.
    other = [
        2 * n * k
        for n, k in linears
        if kernels.get((n, k)) not in (*OWN_INPUT_GRADIENT, "dequantized")
    ]
    blocks = [quantized.keys() & size.block_linears(i).keys() for i in range(size.layers)]
    if config.backend == "verl" and not config.lora.r:
        restored = max(sum(wire[name] for name in block if ".experts." in name) for block in blocks)
        gathered = max(
            sum(prepared[name] for name in block if ".experts." not in name) for block in blocks
        )
        return [
            Part("low-bit tensors, sharded", sum(wire.values()) // ranks(config)),
            Part("a gathered block in the kernels' layout", gathered, ("old_log_prob", "update")),
            Part(
                "experts of one layer, restored", restored if scheme == "w4a16" else 0, ("update",)
            ),
            Part("dequantized weight of one layer, BF16", max([*own, *other]), ("update",)),
        ]
    if (
        config.lora.r
    ):  # a frozen layer is stored once; a forward or a backward converts it and drops the result
        stacks = [
            sum(wire[name] for name in block if ".experts." in name) * (scheme == "w4a16")
            for block in blocks
        ]
        return [
            Part("low-bit tensors", sum(wire.values())),
            Part(
                "a layer in another layout",
                max([*prepared.values(), *stacks]),
                ("old_log_prob", "update"),
            ),
            Part("dequantized weight of one layer, BF16", max([*own, *other]), ("update",)),
        ]
    return [
        Part("low-bit tensors", sum(wire.values())),
        Part("low-bit tensors in the kernels' layout", sum(prepared.values())),
        Part("dequantized weights for the backward, BF16", sum(other) + max(own), ("update",)),
    ]


def activations(size: ModelSize, config: Config, align: str) -> list[Part]:
    """Return the parts for the tensors that autograd saves in the forward of one micro-batch, without lm_head."""
    passed = [size.activation_bytes_per_token(align, layer) for layer in range(size.layers)]
    rows = size.expert_row_bytes if has_own_experts(size, config, align) else 0
    layer_bytes = [each - rows * (layer in size.sparse_layers) for layer, each in enumerate(passed)]
    saved = sum(layer_bytes)
    if config.model.gradient_checkpointing:
        saved = size.layers * size.hidden * (4 if align in ("model", "exact") else 2) + max(
            layer_bytes
        )
    forward = micro_batch_tokens(config, log_probs=True)
    backward = micro_batch_tokens(config)
    return [
        Part("activations, log-probs", forward * max(passed), ("old_log_prob",)),
        Part("activations, update", backward * saved, ("update",)),
    ]


def has_own_experts(size: ModelSize, config: Config, align: str) -> bool:
    """Return whether QaRL computes the experts (`qarl.kernels.experts`), and not transformers."""
    if align == "off":
        return False
    return align in ("model", "exact") or any(
        ".experts." in name for name in quantized_linears(size, config)
    )


def expert_rows(size: ModelSize, config: Config, align: str) -> list[Part]:
    """Return the part for the rows that the backward of one layer's experts holds, beside what autograd saved.

    QaRL's backward holds, in BF16: x and dy by expert (H each), gate and up and their gradients (2I each), the gradient
    of down_proj's input and that input times its weight (I each), and the rows of dx (H). With an 8-bit scheme x is
    also there in 8 bits. Transformers' backward holds three rows of H: those of the weighted sum's gradient. Each
    returns the gradient of its input, H numbers for each of T tokens. The FP32 temporaries that QaRL's backward has on
    CPUs are not counted.
    """
    if not size.sparse_layers:
        return []
    hidden = size.hidden
    inner = size.moe_intermediate
    tokens = micro_batch_tokens(config)
    each = 6 * hidden
    if has_own_experts(size, config, align):
        each += 12 * inner + hidden * (config.quant.scheme in ("w8a8", "fp8"))
    return [
        Part(
            "rows of a layer's experts",
            tokens * (size.experts_per_token * each + 2 * hidden),
            ("update",),
        )
    ]


def micro_batch_tokens(config: Config, *, log_probs: bool = False) -> int:
    """Return the largest number of tokens in a micro-batch of the update, or of the pass for old log-probs."""
    actor = config.actor
    data = config.data
    if actor.use_dynamic_bsz:
        limit = actor.ppo_max_token_len_per_gpu or 0
        return (actor.log_prob_max_token_len_per_gpu or limit) if log_probs else limit
    size = (
        actor.log_prob_micro_batch_size_per_gpu if log_probs else actor.ppo_micro_batch_size_per_gpu
    )
    return (size or 0) * (data.max_prompt_length + data.max_response_length)


def logits(size: ModelSize, config: Config) -> list[Part]:
    """Return the parts for the logits of one micro-batch and their softmax. verl also computes logits of prompts.

    If micro-batches are limited by tokens, all their tokens are assumed to be of responses."""
    data = config.data
    tokens = [micro_batch_tokens(config, log_probs=True), micro_batch_tokens(config)]
    if config.backend == "local" and not config.actor.use_dynamic_bsz:
        length = data.max_prompt_length + data.max_response_length
        tokens = [count // length * data.max_response_length for count in tokens]
    forward, backward = (count * size.vocab for count in tokens)
    update = 14 * backward
    if backward > LOGITS_AT_A_TIME:
        update = 18 * LOGITS_AT_A_TIME + (0 if config.lora.r else 4 * size.vocab * size.hidden)
    each = 8 if config.backend == "verl" else 10
    return [
        Part("logits, log-probs", each * min(forward, LOGITS_AT_A_TIME), ("old_log_prob",)),
        Part("logits, update", update, ("update",)),
    ]


def on_host(size: ModelSize, config: Config, offload: bool) -> list[Part]:
    """Return the parts in host memory beside GPUs: what the engine moves there while it sleeps, and what verl offloads
    while it is not used. verl's engines drop weights that it publishes whole."""
    sleeps = (config.backend == "local" or config.lora.r) and config.rollout.free_cache_engine
    masters = (4 if config.optim.master_dtype == "fp32" else 2) * (
        adapter_parameters(size, config) or size.parameters
    )
    offloaded = (masters + optimizer_state(size, config)) // ranks(config) if offload else 0
    return [
        Part("vLLM's weights while it sleeps", published(size, config) if sleeps else 0),
        Part("masters and optimizer state, offloaded", offloaded),
    ]


def has_reference(config: Config) -> bool:
    """Return whether the run has a reference policy, whose weights are those of `model.path`."""
    keys = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    in_verl = any(config.verl.get(plus + key) for key in keys for plus in ("", "+"))
    return in_verl if config.backend == "verl" else config.actor.use_kl_loss


def reference(
    size: ModelSize, config: Config, align: str, kernels: Mapping[Shape, str]
) -> list[Part]:
    """Return the part for the reference policy of a KL term, which with verl is in host memory on GPUs."""
    if not has_reference(config):
        return []
    if config.backend == "verl":
        dtype = str(config.verl.get("actor_rollout_ref.ref.fsdp_config.model_dtype", "fp32"))
        each, name = (2, "16 bits") if "16" in dtype else (4, "FP32")
        return [Part(f"reference policy, {name}, sharded", each * size.parameters // ranks(config))]
    packed = sum(
        part.bytes for part in low_bit(size, config, align, kernels) if part.phases == PHASES
    )
    return [
        Part(
            "reference policy: weights and low-bit tensors", 2 * bf16_weights(size, config) + packed
        )
    ]


def not_shared(size: ModelSize, config: Config) -> int:
    """Return the bytes of the base that an engine on a CPU has in addition to those of the trainer of adapters: layers
    that vLLM packs (`qarl.rollout.publish.cpu_layers`)."""
    scheme = config.quant.scheme
    quantized = quantized_linears(size, config)
    packed = 2 * sum(n * k for name, (n, k) in size.linears().items() if name not in quantized)
    for name, shape in quantized.items():
        of_expert = ".experts." in name
        group = config.quant.group_size
        if scheme == "fp8" and of_expert:
            packed += prepared_bytes(scheme, "vllm_cpu", group, shape)
        elif scheme == "w8a8" or config.quant.kernels != "engine":
            packed += wire_bytes(scheme, group, shape)
    return packed


def own_layout(size: ModelSize, config: Config) -> int:
    """Return how many more bytes than the published tensors the engine holds because of `quant.kernels`."""
    scheme = config.quant.scheme
    group = config.quant.group_size
    kernel = ENGINE_KERNELS.get((config.quant.kernels, scheme))
    shapes = quantized_linears(size, config).values()
    each = (
        prepared_bytes(scheme, kernel, group, shape) - wire_bytes(scheme, group, shape)
        for shape in shapes
    )
    return sum(each) if kernel else 0


def gathered_adapters(size: ModelSize, config: Config) -> int:
    """Return the bytes that vLLM takes on a CPU to multiply a batch of prompts by one adapter.

    It gathers A for each token in BF16 and casts it to FP32, then it gathers B (`bgmv_shrink` and `bgmv_expand_slice`
    in vllm/lora/ops/torch_ops/lora_ops.py, 0.29)."""
    data = config.data
    rollout = config.rollout
    longest = data.max_prompt_length + data.max_response_length
    tokens = max(rollout.max_num_batched_tokens or BATCHED_TOKENS[config.backend], longest)
    each = max((max(6 * k, 2 * n) for n, k in adapted_linears(size, config)), default=0)
    return tokens * (config.lora.r or 0) * each


def engine(
    size: ModelSize, config: Config, device: str, gpu_memory_bytes: int
) -> tuple[list[Part], int]:
    """Return, for one GPU, the engine's parts of the memory and the bytes of its KV cache."""
    parallel = config.rollout.tensor_model_parallel_size
    shares = config.lora.r and config.backend == "local" and device == "cpu"
    gathered = gathered_adapters(size, config) if device == "cpu" else 0
    every = published(size, config) // parallel
    weights = not_shared(size, config) if shares else every
    twice = (
        every - weights
    )  # nothing is gathered before the first publish, after which the trainer shares these
    weights += own_layout(size, config) + 2 * adapter_parameters(size, config)
    if device == "cpu":  # vLLM packs embed_tokens and lm_head, and keeps the originals
        weights += 2 * size.embedding_parameters
    sleeps = config.rollout.free_cache_engine and device == "cuda"
    phases = ("rollout",) if sleeps else PHASES
    if device == "cuda":
        budget = int(config.rollout.gpu_memory_utilization * gpu_memory_bytes)
        kv_cache = budget - weights - ENGINE_WORKSPACE_BYTES
    else:
        kv_cache = int(config.rollout.cpu_kvcache_space_gib * GIB)
    asleep = ENGINE_ASLEEP_BYTES + ENGINE_GROUP_BYTES * (parallel > 1)
    parts = [
        Part("vLLM: weights", weights, phases),
        Part("vLLM: KV cache", max(kv_cache, 0), phases),
        Part("vLLM: workspace (allowance)", ENGINE_WORKSPACE_BYTES, phases),
        Part("vLLM: A and B, gathered", gathered, ("rollout",)),
        Part("vLLM: second copy of the base, at the start", max(twice - gathered, 0), ("rollout",)),
        Part("vLLM asleep (allowance)", asleep if sleeps else 0, PHASES[1:]),
    ]
    return parts, kv_cache
