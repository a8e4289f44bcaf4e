"""The phases of a training step, and what each needs for a time."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "load",
    "generation",
    "forward",
    "reference",
    "head",
    "last layer",
    "middle layers",
    "first layer",
    "embedding",
    "optimizer",
]
"""Phase of a run in which memory peaks: while the model is loaded; and of a step while answers are generated, at the
end of the forward pass, in that of a reference model after it, in the backward pass of the head, of the last layer, of
those between, of the first and of the embedding, or in the optimizer's step. On one device memory falls or rises evenly
from layer to layer, so the layers between are never the peak there."""

PHASE_WORDS: dict[Phase, str] = {
    "load": "while the model is loaded",
    "generation": "while answers are generated",
    "forward": "at the end of the forward pass",
    "reference": "in the forward pass of the reference",
    "head": "in the backward of the head",
    "last layer": "in the backward of the last layer",
    "middle layers": "in the backward of the layers",
    "first layer": "in the backward of the first layer",
    "embedding": "in the backward of the embedding",
    "optimizer": "in the optimizer's step",
}


@dataclass(frozen=True)
class Need:
    """Bytes that a phase needs besides what a run keeps from step to step."""

    gradients: int = 0
    activations: int = 0
    logits: int = 0
    gathered: int = 0
    kv_cache: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.gradients + self.activations + self.logits + self.gathered + self.kv_cache


@dataclass(frozen=True)
class Kept:
    """Bytes that a run keeps from step to step: on each device, and on each node for its devices together."""

    weights: int
    adapters: int = 0
    masters: int = 0
    reference: int = 0
    vllm: int = 0
    optimizer: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0

    @property
    def total(self) -> int:
        """On a device."""
        return self.loaded + self.optimizer

    @property
    def loaded(self) -> int:
        """On a device before the first step: an optimizer makes its states then."""
        return self.weights + self.adapters + self.masters + self.reference + self.vllm
