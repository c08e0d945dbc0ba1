"""Publish adapters (LoRA) to an engine, through vLLM's public `add_lora` and `remove_lora`.

A publish of an adapter is a transaction, too. Names, dtypes, shapes and NaN are checked before vLLM is touched. vLLM
takes adapters only as folders in peft's format, so the adapter is written to a folder in shared memory. Each publish
has a new id and name: vLLM reads the folder of an id once, and tells apart the cached prefixes of adapters by their
names. Then the engine is asked which adapters it has, and A and B are compared bit for bit with those that its layers
will multiply by. That finds an adapter that was not loaded, that misses a layer, or that was scaled twice. Until all
of this has succeeded, the engine refuses to generate. An adapter of zeros after another one is refused.

`EngineAdapter` does this in the engine's process. An adapter from another process arrives as a stream, like weights
(`qarl.rollout.remote.adapters`).

vLLM wraps each linear with an adapter. The base is published under the names without these wrappers
(`qarl.rollout.publish.manifest.without_wrappers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qarl.errors import UserError
from qarl.lora.adapter import PREFIX, A, Adapter, B
from qarl.rollout.adapter_spec import AdapterSpec
from qarl.rollout.publish.adapter_folder import adapter_folder
from qarl.rollout.publish.manifest import Manifest, NamedTensor, TensorSpec, check_complete
from qarl.rollout.publish.version import checked_version, note_older

PROBE = [0, 1]
"""The prompt of `EngineAdapter.prove`. If its tokens were equal, attention would return the same whatever q and k
are."""


def adapter_request(name: str, number: int, folder: str = "loaded") -> Any:
    """Return vLLM's name for an adapter. It reads `folder` only if it has no adapter `number`."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, folder)


class EngineAdapter:
    """The adapter of an engine in this process.

    version         the version of the adapter that the engine generates with, or None
    stale_because   why there is none
    request         vLLM's name for it, which every request must carry
    acts            whether a publish since the base's has had a B that is not 0
    proved          whether the engine has shown that it multiplies by an adapter (`prove`)
    """

    def __init__(self, engine: Any, model: nn.Module, spec: AdapterSpec) -> None:
        """`engine`: vLLM's engine, or one of its workers.

        Raise UserError if it has no place for an adapter of one of the targets."""
        self.engine = engine
        self.version: int | None = None
        self.stale_because = "no adapter has been published to it yet"
        self.request: Any = None
        self.acts = self.proved = False
        self._published = 0
        stacks = _stacks(model)
        leaves = {name.rpartition(".")[2] for name in stacks}
        self._stacks = {name: pair for name, pair in stacks.items() if spec.has(name)}
        if missing := sorted(set(spec.targets) - leaves):
            raise UserError(
                f"the rollout engine has no place for an adapter of {', '.join(missing)}",
                where="lora.target_modules",
                why=f"vLLM's {type(model).__name__} serves adapters of {', '.join(sorted(leaves)) or 'no linear'}",
                fix="remove these targets",
            )
        self.expected: Manifest = {}
        for name, (a, b) in self._stacks.items():
            self.expected[f"{PREFIX}{name}{A}"] = TensorSpec(
                torch.bfloat16, (spec.rank, a.shape[-1])
            )
            self.expected[f"{PREFIX}{name}{B}"] = TensorSpec(
                torch.bfloat16, (b.shape[-2], spec.rank)
            )

    def mark_stale(self, reason: str) -> None:
        """Make the engine refuse to generate, with `reason`, until the next publish of an adapter."""
        self.version = None
        self.stale_because = reason

    def base_changes(self) -> None:
        """Note that the base is published again: an adapter of zeros may then follow another one."""
        self.acts = False

    def publish(self, adapter: Adapter, *, version: int) -> dict[str, float]:
        """Replace the engine's adapter. Return the seconds of each phase. After an exception there is no adapter.

        `adapter`: with the engine's rank (`Adapter.padded`).

        Raise UserError if the adapter does not fit, or if the engine does not multiply by it afterwards."""
        start = time.perf_counter()
        version = checked_version(version)
        note_older(version, self.version)
        self.mark_stale(f"the publish of the adapter of version {version} did not complete")
        tensors: list[NamedTensor] = list(adapter.tensors.items())
        check_complete(tensors, self.expected)
        acts = any(bool(tensor.any()) for name, tensor in tensors if name.endswith(B))
        if self.acts and not acts:
            raise UserError(
                f"every B of the adapter of version {version} is 0",
                why="those of a version before were not, and no update makes all of them 0",
                fix="see what has changed the trainer's adapter since",
            )
        checked = time.perf_counter()
        previous = self.request and self.request.lora_int_id
        self._remove(self.present() - {previous})  # what a publish that failed has left
        request = self._load(adapter, version)
        self._remove({previous} & self.present())
        self._check_arrived(adapter, request, version)
        self.request = request
        self.version = version
        self.acts = acts
        return {"validate": checked - start, "apply": time.perf_counter() - checked}

    def prove(self, adapter: Adapter, version: int, log_prob: Callable[[Any], float]) -> None:
        """Publish an adapter like `adapter` with a large random B. Then the engine has no current one.

        `version`: what errors name. `log_prob`: that of the likeliest token after `PROBE`, with vLLM's request for an
        adapter or with None. Raise UserError if the two are equal. They are asked for one by one: in a batch vLLM
        on a CPU gives the adapter to all."""
        generator = torch.Generator().manual_seed(0)

        def loud(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return (
                torch.randn(tensor.shape, generator=generator).to(tensor)
                if name.endswith(B)
                else tensor
            )

        tensors = {name: loud(name, tensor) for name, tensor in adapter.tensors.items()}
        self.publish(replace(adapter, tensors=tensors), version=version)
        self.acts = False
        self.mark_stale("a probe has replaced its adapter")
        if log_prob(None) == log_prob(self.request):
            raise UserError(
                "the rollout engine computes as if it had no adapter",
                why="vLLM has loaded one with a large B, and the log-prob of a token is that of the base",
                fix="report it, with the log of the engine's start; lora.r=0 trains all weights",
            )
        self.proved = True

    def _load(self, adapter: Adapter, version: int) -> Any:
        """Load `adapter` under a new id and name. Return vLLM's request for it."""
        self._published += 1
        with adapter_folder(adapter) as folder:
            name = f"version-{version}-publish-{self._published}"
            request = adapter_request(name, self._published, str(folder))
            self.engine.add_lora(request)
        return request

    def _remove(self, ids: set[int]) -> None:
        for number in ids:
            self.engine.remove_lora(number)

    def _check_arrived(self, adapter: Adapter, request: Any, version: int) -> None:
        """Raise UserError unless the engine has this adapter and no other, in every layer, with B scaled once."""
        present = self.present()
        if present != {request.lora_int_id}:
            raise _lost(
                version, f"it has the adapters {sorted(present)}, not only {request.lora_int_id}"
            )
        for name, (a, b) in adapter.pairs().items():
            has_a, has_b = self._stacks[name]
            a = a.to(has_a.device)
            scaled = (b * adapter.factor).to(has_b.device)
            if not torch.equal(has_a[0, 0], a) or not torch.equal(has_b[0, 0], scaled):
                raise _lost(version, f"{name} multiplies by another A or B than was published")

    def present(self) -> set[int]:
        """Return the ids of the adapters that vLLM says it has."""
        return set(self.engine.list_loras())

    def check_present(self) -> None:
        """Raise UserError if the engine has lost the adapter of the current version."""
        if self.version is not None and self.present() != {self.request.lora_int_id}:
            version = self.version
            self.mark_stale(f"vLLM has lost the adapter of version {version}")
            raise _lost(version, f"vLLM has the adapters {sorted(self.present())} now")


def takes_no_adapter(why: str, fix: str) -> UserError:
    """Return the error of an engine that takes no adapter."""
    return UserError("the rollout engine takes no adapter", why=why, fix=fix)


def _stacks(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return vLLM's stacks of A [1, 1, r, K] and of B [1, 1, N, r] by the checkpoint name of their linear."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    stacks: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(a := getattr(module, "lora_a_stacked", None), tuple):
            parent, _, leaf = name.rpartition(".")
            pairs = zip(a, module.lora_b_stacked, strict=True)
            parts = [f"{parent}.{part}" for part in fused.get(leaf, [leaf])]
            stacks |= dict(zip(parts, pairs, strict=True))
    return stacks


def _lost(version: int, why: str) -> UserError:
    return UserError(
        f"the adapter of version {version} is not the one that the rollout engine multiplies by",
        where="lora",
        why=why,
        fix="publish again; if the error comes back, report it: the engine would sample from another policy",
    )
