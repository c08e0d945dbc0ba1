"""What QaRL knows of a kind of layer in vLLM: how its tensors are written, and what it shows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from qarl.rollout.publish.tensor_parallel import Part

Writer = Callable[[nn.Module, list[Part]], None]
"""A function of a module and this worker's part of the tensors of its checkpoint modules, which it writes."""
Reader = Callable[[Any, list[int]], list[Part]]
"""A function of a module and the number of rows of each checkpoint module in it. It returns views of their tensors."""


@dataclass(frozen=True)
class StoredLayer:
    """A kind of layer that QaRL writes without vLLM's layerwise reload.

    write            writes published tensors
    engine_classes   names of vLLM's (or the plugin's) classes of kernels or methods, or of their base classes, whose
                     layers are stored so. Names, because releases of vLLM define these classes in different modules,
                     which are slow to import
    read             shows what the layer stores, or None if vLLM hides it
    takes_tiles      whether `write` takes codes that the trainer's kernel has put in tiles, in place of the published
    survives_reload  whether vLLM's own reload leaves the layer right, if `write` cannot be used
    """

    write: Writer
    engine_classes: tuple[str, ...] = ()
    read: Reader | None = None
    takes_tiles: bool = False
    survives_reload: bool = True


def kernel_of(module: nn.Module) -> Any:
    """Return vLLM's kernel of a dense quantized layer, or None for other modules."""
    scheme: Any = getattr(module, "scheme", None)
    return getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)


def find_layer(kinds: Iterable[type], known: Iterable[StoredLayer]) -> StoredLayer | None:
    """Return the layer of `known` that has the first of the classes `kinds` that any has, or None."""
    by_name = {name: layer for layer in known for name in layer.engine_classes}
    return next((by_name[kind.__name__] for kind in kinds if kind.__name__ in by_name), None)
