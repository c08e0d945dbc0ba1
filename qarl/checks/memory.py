"""Estimates the memory of a run, in bytes per GPU for each part. It needs the configs of model and run, but no weights.

This is pure arithmetic without torch. The result lists the parts, each with the phases in which it takes memory. The
doctor and dry runs print it. The estimate adds up tensor sizes and ignores the allocator, so real use is a few percent
higher.

    local    One process holds everything. vLLM stays loaded beside the trainer.
    verl     FSDP2 shards masters, gradients and optimizer state over nnodes * n_gpus_per_node ranks. At any time two
             decoder blocks and the embeddings are gathered in BF16. Every rank keeps the low-bit tensors of all
             layers, and the kernels' copies of them, from one optimizer step to the next. On GPUs vLLM sleeps during
             the update (verl's free_cache_engine).

The activations that autograd saves per token and layer are counted operator by operator, for transformers' blocks and
those of `qarl.align`. A test compares the count with autograd. All sequences are assumed to have full length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qarl.config.ignore import is_ignored

if TYPE_CHECKING:
    from qarl.config import Config

GIB = 2**30
RUNTIME_BYTES = 3 * GIB // 2
"""A rough allowance for a process's libraries, CUDA context and communication buffers."""
ENGINE_WORKSPACE_BYTES = GIB
"""A rough allowance for vLLM's forward, in addition to weights and KV cache."""
LOGITS_AT_A_TIME = 2**27
"""The largest number of logits that `qarl.kernels.logprob` holds at once. The local backend never holds more."""
PHASES = ("rollout", "old_log_prob", "update", "step")
"""`update` is the forward and backward of a micro-batch. `step` is the optimizer's step."""
MATRIX_OPTIMIZER_BYTES = {"adamw": 8, "muon": 4}
"""Bytes of FP32 moments per weight of a matrix in the decoder blocks. All other weights use AdamW."""

OWN_INPUT_GRADIENT = frozenset(
    {"triton", "triton_batch_invariant", "vllm_machete", "vllm_marlin", "vllm_cutlass_int8", "vllm_cutlass_fp8"}
)
"""Kernels that compute dX themselves. They hold only one layer's dequantized weight at a time."""

Shape = tuple[int, int]


@dataclass(frozen=True)
class ModelSize:
    """The numbers in a Llama-like or Qwen3-MoE config that determine sizes. `sparse_layers`: layers with experts."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    sparse_layers: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Any) -> ModelSize:
        """Read a transformers config or the content of a config.json. Raise KeyError if it lacks a required number."""
        given: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        heads, kind = given["num_attention_heads"], given.get("model_type", "")
        layers = given["num_hidden_layers"]
        experts = given.get("num_experts") or given.get("num_local_experts") or 0
        every, dense = given.get("decoder_sparse_step") or 1, given.get("mlp_only_layers") or ()
        sparse = tuple(i for i in range(layers) if experts and i not in dense and (i + 1) % every == 0)
        attention_bias = bool(given.get("attention_bias"))
        return cls(
            layers=layers,
            hidden=given["hidden_size"],
            intermediate=given["intermediate_size"],
            heads=heads,
            kv_heads=given.get("num_key_value_heads") or heads,
            head_dim=given.get("head_dim") or given["hidden_size"] // heads,
            vocab=given["vocab_size"],
            tied=bool(given.get("tie_word_embeddings")),
            qkv_bias=kind in ("qwen2", "qwen2_moe") or attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(given.get("mlp_bias")),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            experts=experts,
            experts_per_token=given.get("num_experts_per_tok") or 0,
            moe_intermediate=given.get("moe_intermediate_size") or 0,
            sparse_layers=sparse,
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def block_linears(self, layer: int) -> dict[str, Shape]:
        """Return name -> [N, K] for all linears of a decoder block, including those of experts, except the router."""
        prefix = f"model.layers.{layer}."
        attention = {"q_proj": self.query_width, "k_proj": self.kv_width, "v_proj": self.kv_width}
        linears = {f"{prefix}self_attn.{name}": (n, self.hidden) for name, n in attention.items()}
        linears[f"{prefix}self_attn.o_proj"] = (self.hidden, self.query_width)
        if layer not in self.sparse_layers:
            return linears | _mlp(f"{prefix}mlp.", self.hidden, self.intermediate)
        for expert in range(self.experts):
            linears |= _mlp(f"{prefix}mlp.experts.{expert}.", self.hidden, self.moe_intermediate)
        return linears

    def linears(self) -> dict[str, Shape]:
        """[N, K] of every linear in all blocks. lm_head is not included."""
        return {name: shape for layer in range(self.layers) for name, shape in self.block_linears(layer).items()}

    @property
    def embedding_parameters(self) -> int:
        """Number of weights in the input and output embeddings, which are counted once if they are tied."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def matrix_parameters(self) -> int:
        """Number of weights in the linears of all blocks, including experts and routers. Muon updates these weights."""
        routers = len(self.sparse_layers) * self.experts * self.hidden
        return sum(n * k for n, k in self.linears().values()) + routers

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.hidden + (2 * self.head_dim * self.layers if self.qk_norm else 0)
        biases = self.layers * (
            (self.query_width + 2 * self.kv_width if self.qkv_bias else 0) + (self.hidden if self.o_bias else 0)
        )
        if self.mlp_bias:
            biases += (self.layers - len(self.sparse_layers)) * (2 * self.intermediate + self.hidden)
        return self.embedding_parameters + self.matrix_parameters + norms + biases

    @property
    def largest_block(self) -> int:
        """Number of weights in the linears of the largest block."""
        return max(sum(n * k for n, k in self.block_linears(i).values()) for i in range(self.layers))

    def kv_bytes_per_token(self, tensor_parallel: int = 1) -> int:
        """Return the bytes of a token's BF16 keys and values on one GPU, which has at least one KV head per layer."""
        return 2 * 2 * self.layers * max(self.kv_heads // tensor_parallel, 1) * self.head_dim

    def activation_bytes_per_token(self, align: str, layer: int = 0) -> int:
        """Return the bytes that one block saves per token for the backward. At level `model` some tensors are FP32."""
        fp32_attention = align == "model"
        norms = 2 * (4 + 2 + 2) * self.hidden + 8
        qkv = (4 if fp32_attention else 2) * (self.query_width + 2 * self.kv_width)
        output = (6 if fp32_attention else 2) * self.query_width + 4 * self.heads
        rotary = 8 * self.head_dim if align in ("model", "exact") else 0
        qk_norm = 6 * (self.query_width + self.kv_width) + 4 * (self.heads + self.kv_heads) if self.qk_norm else 0
        if layer in self.sparse_layers:
            mlp = self.experts_per_token * (8 * self.moe_intermediate + 4 * self.hidden)
        else:
            mlp = 8 * self.intermediate
        return norms + qkv + output + rotary + qk_norm + mlp


def _mlp(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj": (intermediate, hidden),
        f"{prefix}up_proj": (intermediate, hidden),
        f"{prefix}down_proj": (hidden, intermediate),
    }


def wire_bytes(scheme: str, group_size: int, shape: Shape) -> int:
    """Return the bytes of one published [N, K] weight, which is sent as `Scheme.wire_tensors`."""
    n, k = shape
    if scheme == "bf16":
        return 2 * n * k
    if scheme in ("w4a16", "w4a8"):
        return n * k // 2 + 2 * n * (k // group_size) + 16
    return n * k + 4 * n


def prepared_bytes(scheme: str, kernel: str | None, group_size: int, shape: Shape) -> int:
    """Return the bytes of a weight's copy in the layout of `kernel`, or 0 if the kernel reads the published tensors."""
    n, k = shape
    if kernel == "reference":
        return 2 * n * k if scheme == "w4a16" else 0
    if kernel in ("vllm_cpu_wna16", "vllm_machete", "vllm_marlin"):
        return n * k // 2 + 2 * n * (k // group_size)
    return {"vllm_cpu_int8": n * k + 4 * n, "torch_int8": n * k + 4 * n, "vllm_cpu_fp8": 4 * n * k + 4 * n}.get(
        kernel or "", 0
    )


@dataclass(frozen=True)
class Part:
    """A part of the memory: `name` takes `bytes` on one GPU during `phases`."""

    name: str
    bytes: int
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per GPU (on CPU per rank) of each part, the engine's weights, the KV cache, and one token in that cache."""

    parts: tuple[Part, ...]
    engine_weights: int
    kv_cache: int
    kv_bytes_per_token: int

    def total(self, phase: str) -> int:
        return sum(part.bytes for part in self.parts if phase in part.phases)

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs the most memory, and its bytes."""
        return max(((phase, self.total(phase)) for phase in PHASES), key=lambda item: item[1])

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit into the KV cache, or 0 if the weights leave no room for a KV cache."""
        return max(self.kv_cache, 0) // self.kv_bytes_per_token

    def table(self) -> list[str]:
        """Return lines of text: a header with the unit, one line per part with its bytes by phase, and the sums."""
        unit, scale = ("GiB", GIB) if self.peak[1] >= 10 * GIB else ("MiB", GIB // 1024)
        width = max(len(part.name) for part in self.parts)

        def line(name: str, cells: Iterable[str]) -> str:
            return f"{name:{width}}" + "".join(f"{cell:>13}" for cell in cells).rstrip()

        def cell(size: int) -> str:
            return f"{size / scale:.1f}"

        rows = [line(p.name, (cell(p.bytes) if phase in p.phases else "" for phase in PHASES)) for p in self.parts]
        return [line(unit, PHASES), *rows, line("together", (cell(self.total(phase)) for phase in PHASES))]


def estimate(
    size: ModelSize,
    config: Config,
    *,
    device: str,
    gpu_memory_bytes: int = 0,
    align: str | None = None,
    kernels: Mapping[Shape, str] | None = None,
    offload: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of the run on one GPU, or of one rank on CPU.

    Args:
        device: "cuda" or "cpu".
        gpu_memory_bytes: memory of the GPU. vLLM takes the share `rollout.gpu_memory_utilization`.
        align: the level that is applied, if it differs from `quant.align`.
        kernels: maps [N, K] to the name of the trainer's kernel. For a shape without an entry, the kernel is assumed
            to read the published tensors.
        offload: whether masters and optimizer state are in host memory while they are unused (verl's param_offload
            and optimizer_offload).
    """
    align = align or config.quant.align
    engine, kv_cache, engine_weights = _engine(size, config, device, gpu_memory_bytes)
    parts = [
        *_weights_and_optimizer(size, config, offload),
        *_quantized(size, config, align, kernels or {}),
        *_activations(size, config, align),
        *engine,
        Part("libraries and runtime (allowance)", RUNTIME_BYTES),
    ]
    parallel = config.rollout.tensor_model_parallel_size
    found = tuple(part for part in parts if part.bytes)
    return MemoryEstimate(found, engine_weights, kv_cache, size.kv_bytes_per_token(parallel))


def checkpoint_bytes(size: ModelSize, config: Config) -> dict[str, int]:
    """Return two sizes on disk: the export for vLLM, and a checkpoint (BF16 model, FP32 masters if any, moments)."""
    export = sum(_published(size, config).values())
    weights = (6 if config.optim.master_dtype == "fp32" else 2) * size.parameters
    return {"export": export, "resumable": weights + _optimizer_state(size, config)}


def ranks(config: Config) -> int:
    """Return the number of trainer processes. FSDP2 shards over them."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def _optimizer_state(size: ModelSize, config: Config) -> int:
    matrices = size.matrix_parameters
    return MATRIX_OPTIMIZER_BYTES[config.optim.name] * matrices + 8 * (size.parameters - matrices)


def _weights_and_optimizer(size: ModelSize, config: Config, offload: bool) -> list[Part]:
    shards, parameters = ranks(config), size.parameters
    fp32 = config.optim.master_dtype == "fp32"
    # verl loads the optimizer state for the whole update (EngineTrainModeCtx), not only for the optimizer's step.
    used = ("update", "step") if offload else PHASES
    state = Part(f"{config.optim.name} state, FP32", _optimizer_state(size, config) // shards, used)
    working = Part("FP32 working copy", 0 if fp32 else 4 * parameters // shards, ("step",))
    if config.backend == "verl":
        gathered = 2 * (2 * size.largest_block + size.embedding_parameters)
        masters = (4 if fp32 else 2) * parameters // shards
        return [
            Part(f"{'FP32' if fp32 else 'BF16'} masters, sharded", masters, PHASES[1:] if offload else PHASES),
            state,
            Part("FP32 gradients, sharded", 4 * parameters // shards, ("update", "step")),
            working,
            Part("gathered weights, BF16", gathered, ("old_log_prob", "update")),
            Part("gradients before they are scattered", gathered, ("update",)),
        ]
    row = config.data.max_prompt_length + config.data.max_response_length
    several = config.actor.ppo_mini_batch_size * config.rollout.n * row > micro_batch_tokens(config)
    return [
        Part("weights, BF16", 2 * parameters),
        Part("FP32 masters", 4 * parameters if fp32 else 0),
        state,
        Part("FP32 gradient sums", 4 * parameters, ("update", "step") if several else ("step",)),
        Part("BF16 gradients of a micro-batch", 2 * parameters, ("update",)),
        working,
    ]


def _quantized_linears(size: ModelSize, config: Config) -> dict[str, Shape]:
    if config.quant.scheme == "bf16":
        return {}
    return {name: shape for name, shape in size.linears().items() if not is_ignored(name, config.quant.ignore)}


def _published(size: ModelSize, config: Config) -> dict[str, int]:
    """Return the number of published bytes. Quantized layers are low-bit tensors, and everything else is BF16."""
    quantized = _quantized_linears(size, config)
    scheme, group = config.quant.scheme, config.quant.group_size
    low_bit = sum(wire_bytes(scheme, group, shape) for shape in quantized.values())
    rest = size.parameters - size.embedding_parameters - sum(n * k for n, k in quantized.values())
    return {"low-bit": low_bit, "other": 2 * rest, "embeddings": 2 * size.embedding_parameters}


def _quantized(size: ModelSize, config: Config, align: str, kernels: Mapping[Shape, str]) -> list[Part]:
    if align == "off":
        return []
    scheme, group = config.quant.scheme, config.quant.group_size
    quantized = _quantized_linears(size, config)
    shapes = list(quantized.values())
    prepared = sum(prepared_bytes(scheme, kernels.get(shape), group, shape) for shape in shapes)
    # Experts are dequantized for each backward, one layer's stack at a time, and not kept.
    linears = [shape for name, shape in quantized.items() if ".experts." not in name]
    experts = 2 * size.experts * size.moe_intermediate * size.hidden if len(linears) < len(shapes) else 0
    own = [2 * n * k for n, k in linears if kernels.get((n, k)) in OWN_INPUT_GRADIENT] + [2 * experts] * bool(experts)
    held = sum(2 * n * k for n, k in linears if kernels.get((n, k)) not in OWN_INPUT_GRADIENT)
    # verl's sharded layers keep none: they dequantize for each backward.
    dequantized = 0 if config.backend == "verl" else held + max(own, default=0)
    return [
        Part("low-bit tensors", sum(wire_bytes(scheme, group, shape) for shape in shapes)),
        Part("low-bit tensors in the kernels' layout", prepared),
        Part("dequantized weights for the backward, BF16", dequantized, ("update",)),
    ]


def micro_batch_tokens(config: Config, *, log_probs: bool = False) -> int:
    """Return the largest number of tokens in a micro-batch of the update, or of the pass for old log-probs."""
    actor, data = config.actor, config.data
    if actor.use_dynamic_bsz:
        limit = actor.ppo_max_token_len_per_gpu or 0
        return (actor.log_prob_max_token_len_per_gpu or limit) if log_probs else limit
    size = actor.log_prob_micro_batch_size_per_gpu if log_probs else actor.ppo_micro_batch_size_per_gpu
    return (size or 0) * (data.max_prompt_length + data.max_response_length)


def _activations(size: ModelSize, config: Config, align: str) -> list[Part]:
    """Return the activations and logits of one micro-batch at full length.

    BF16 logits are copied to FP32, and the log-softmax of the copy is kept for the backward. Together this takes at
    most 10 bytes per logit without an autograd graph, and 12 bytes with a graph. If the logits are computed in blocks,
    it takes 18 bytes per logit of one block and 4 bytes per weight of lm_head.
    """
    forward, backward = micro_batch_tokens(config, log_probs=True), micro_batch_tokens(config)
    layer_bytes = [size.activation_bytes_per_token(align, layer) for layer in range(size.layers)]
    if config.model.gradient_checkpointing:
        kept = size.layers * size.hidden * (4 if align in ("model", "exact") else 2) + max(layer_bytes)
    else:
        kept = sum(layer_bytes)
    head = [forward, backward]
    if config.backend == "local" and not config.actor.use_dynamic_bsz:
        # verl computes logits for prompt and response, and selects the response's log-probs afterwards. Here, too, a
        # limit on tokens may be filled by responses to short prompts.
        length = config.data.max_prompt_length + config.data.max_response_length
        head = [tokens // length * config.data.max_response_length for tokens in head]
    forward_logits, backward_logits = (tokens * size.vocab for tokens in head)
    most = LOGITS_AT_A_TIME if config.backend == "local" else forward_logits + backward_logits
    update = 12 * backward_logits
    if backward_logits > most:
        update = 18 * most + 4 * size.vocab * size.hidden
    return [
        Part("activations, log-probs", forward * max(layer_bytes), ("old_log_prob",)),
        Part("logits, log-probs", 10 * min(forward_logits, most), ("old_log_prob",)),
        Part("activations, update", backward * kept, ("update",)),
        Part("logits, update", update, ("update",)),
    ]


def _engine(size: ModelSize, config: Config, device: str, gpu_memory_bytes: int) -> tuple[list[Part], int, int]:
    """Return, for one GPU, the engine's parts, the bytes of its KV cache and the bytes of its weights."""
    parallel = config.rollout.tensor_model_parallel_size
    weights = sum(_published(size, config).values()) // parallel
    phases = ("rollout",) if config.backend == "verl" and device == "cuda" else PHASES
    if device == "cuda":
        budget = int(config.rollout.gpu_memory_utilization * gpu_memory_bytes)
        kv_cache = budget - weights - ENGINE_WORKSPACE_BYTES
    else:
        kv_cache = int(config.rollout.cpu_kvcache_space_gib * GIB)
    parts = [
        Part("vLLM: weights", weights, phases),
        Part("vLLM: KV cache", max(kv_cache, 0), phases),
        Part("vLLM: workspace (allowance)", ENGINE_WORKSPACE_BYTES, phases),
    ]
    return parts, kv_cache, weights


def readable(size: int) -> str:
    """Return a size in GiB, or in MiB if it is below 1 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / GIB * 1024:.1f} MiB"
