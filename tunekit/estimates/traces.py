"""Traces of training steps: what one is asked of, and what it found.

A trace takes the real modules of a model through a step, in a process of its own (`tunekit.models.step_trace`). The
formulas are told how far they are from it, per token and by what layers keep and need, so that they hold for models of
types that they do not know, in any layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tunekit.recipe.sections.adapters import Adapter

MIN_TRACED_TOKENS = 2048
"""Tokens of the smaller traced micro-batch, at least: enough for bytes that grow with them to be seen."""


class TraceRequest(BaseModel):
    """A step to trace, on one device, without padding."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    config: Mapping[str, Any]
    """The model's config.json."""
    adapter: Adapter
    dtype: Literal["float32", "bfloat16", "float16"]
    """Type of the products, and of frozen weights."""
    trained_dtype: Literal["float32", "bfloat16", "float16"]
    """Type of trained weights and of their gradients."""
    length: int
    """Tokens of a row."""
    attention: Literal["sdpa", "eager"]
    casts_weights: bool = True
    """True if autocast casts float32 weights, as on one device and under DDP; False if layers have them in the type of
    the products, as FSDP2 and DeepSpeed hand them over."""

    @property
    def weights_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Type in which layers have trained weights."""
        return self.trained_dtype if self.casts_weights else self.dtype

    @property
    def num_rows(self) -> tuple[int, int]:
        """Rows of the two micro-batches: what both have in common does not grow with tokens."""
        rows = max(1, MIN_TRACED_TOKENS // self.length)
        return rows, 2 * rows


class PhaseBytes(BaseModel):
    """Most bytes of tensors that were live in the phases of a step, weights and AdamW's states included."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    layers: int
    """In the forward pass of the layers."""
    forward: int
    """In the forward pass of the head."""
    head: int
    """In its backward pass."""
    last: int
    """In the backward pass of the last layer, or of a layer that needs more, in its place."""
    first: int
    """In the backward pass of the first layer."""


class StepTrace(BaseModel):
    """Traces of a step with two micro-batches."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kept: tuple[PhaseBytes, PhaseBytes]
    """Without gradient checkpointing."""
    recomputed: tuple[PhaseBytes, PhaseBytes] | None
    """With gradient checkpointing; None for a model that has none."""


@dataclass(frozen=True)
class Deviation:
    """Bytes by which a trace exceeds the formulas, for the layers of a micro-batch.

    Attributes:
        passing: In the layers' forward pass, beyond what is kept; all of it, not what formulas lack.
        kept: For the backward pass.
        forward: In the forward pass of the head, beyond what is kept.
        last: In the backward pass of one layer, beyond what is kept.
        first: In the backward pass of the first layer.
    """

    passing: int = 0
    kept: int = 0
    forward: int = 0
    last: int = 0
    first: int = 0


@dataclass(frozen=True)
class Line:
    """Deviations of two micro-batches, and of any other on the line through them."""

    num_tokens: tuple[int, int]
    deviations: tuple[Deviation, Deviation]

    def at(self, num_tokens: int) -> Deviation:
        """Return the deviation for a micro-batch of so many tokens."""
        (few, more), (less, most) = self.num_tokens, (vars(deviation) for deviation in self.deviations)
        share = (num_tokens - few) / (more - few)
        return Deviation(**{name: round(less[name] + share * (most[name] - less[name])) for name in less})


@dataclass(frozen=True)
class Lines:
    """Deviations without gradient checkpointing, and with it, where a model has that."""

    kept: Line
    recomputed: Line | None

    def at(self, num_tokens: int, *, recomputes: bool) -> Deviation:
        """Return the deviation for a micro-batch of so many tokens."""
        line = self.recomputed if recomputes else self.kept
        return Deviation() if line is None else line.at(num_tokens)


@dataclass(frozen=True)
class Deviations:
    """Deviations of the formulas for one model and adapter.

    Attributes:
        adapter: The adapter. With another one they are an estimate.
        casting: Where autocast casts float32 weights.
        handed: Where layers get weights in the type of the products; None where that was not traced.
    """

    adapter: Adapter
    casting: Lines
    handed: Lines | None = None

    def of(self, *, casts_weights: bool) -> Lines:
        """Return the deviations of a layout."""
        return self.casting if casts_weights or self.handed is None else self.handed
