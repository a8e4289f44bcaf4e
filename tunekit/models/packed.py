"""Weights of linear layers as quantized checkpoints hold them: GPTQ, AWQ and LLM.int8(), and FBGEMM's float8.

Each is integers, or float8, with a scale for a group of values, some with a zero point. They stay as they are
published; the values of one weight are made for the product that needs them, some rows at a time, so that what is
written beside them stays small. They are computed in float32 and rounded once.

Sources: GPTQ, arXiv 2210.17323 (layout of AutoGPTQ, of which version 1 stores zero points less one); AWQ, arXiv
2306.00978 (layout `gemm` of AutoAWQ); LLM.int8(), arXiv 2208.07339.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from tunekit.estimates.memory.states import CHUNK_VALUES

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions within a word of eight outputs in their order, as AutoAWQ packs them."""


@dataclass(frozen=True)
class Packed:
    """Matrix of a linear layer, (outputs, inputs), stored in few bits.

    Attributes:
        dtype: Type of its values.
    """

    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored."""
        values = (vars(self)[field.name] for field in fields(self))
        return tuple(value for value in values if isinstance(value, Tensor))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        raise NotImplementedError

    @property
    def like(self) -> Tensor:
        """A tensor without storage of the values' shape and type."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def to(self, device: torch.device) -> Self:
        """Return a copy on a device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in tensors.items()}
        return replace(self, **moved)

    def dense(self) -> Tensor:
        """Return the values."""
        raise NotImplementedError

    def with_bytes(self, packed: Tensor) -> Self:
        """Refuse other bytes.

        Raises:
            TypeError: Always: such weights are not sharded.
        """
        raise TypeError(f"weights in {type(self).__name__} are not sharded")

    def requantized(self, values: Tensor) -> Self:
        """Refuse other values.

        Raises:
            TypeError: Always: nothing is written in these types.
        """
        raise TypeError(f"weights in {type(self).__name__} cannot be changed")


@dataclass(frozen=True)
class Grouped(Packed):
    """Unsigned integers with a scale and a zero point for each group of inputs of an output.

    Attributes:
        qweight: Words of integers.
        qzeros: Words of zero points, (groups, outputs / values in a word).
        scales: (groups, outputs).
        bits: Bits of an integer.
        group_size: Inputs of a group.
    """

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    bits: int
    group_size: int

    def _values(self, groups: Tensor, zeros: Tensor, rows: Callable[[slice], Tensor], step: int) -> Tensor:
        """Return the values.

        Args:
            groups: Group of each input.
            zeros: Zero points, (groups, outputs).
            rows: Function that returns the integers of a slice of the rows of `qweight`, (inputs, outputs).
            step: Inputs in a row of `qweight`.
        """
        outputs, inputs = self.shape
        values = torch.empty(outputs, inputs, dtype=self.dtype, device=self.qweight.device)
        scales, zeros = self.scales.float(), zeros.float()
        for part in parts_of(len(self.qweight), step * outputs):
            span = slice(part.start * step, part.stop * step)
            group = groups[span]
            values[:, span] = ((rows(part).float() - zeros[group]) * scales[group]).T
        return values


@dataclass(frozen=True)
class Gptq(Grouped):
    """Matrix as GPTQ stores it: the words of `qweight`, (inputs / values in a word, outputs), go down the inputs.

    Attributes:
        g_idx: Group of each input, where inputs were quantized in another order than their own; else None.
        offset: What is added to the stored zero points, modulo the range of an integer.
    """

    g_idx: Tensor | None
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.qweight.shape[1], self.qweight.shape[0] * (32 // self.bits)

    def dense(self) -> Tensor:
        """Return the values."""
        inputs, per_word = self.shape[1], 32 // self.bits
        groups = self.g_idx
        if groups is None:
            groups = torch.arange(inputs, device=self.qweight.device) // self.group_size
        zeros = (unpacked(self.qzeros, self.bits).int() + self.offset) % 2**self.bits

        def rows(part: slice) -> Tensor:
            words = self.qweight[part]
            integers = unpacked(words, self.bits).view(*words.shape, per_word)
            return integers.transpose(1, 2).reshape(-1, words.shape[1])

        return self._values(groups, zeros, rows, per_word)


@dataclass(frozen=True)
class Awq(Grouped):
    """Matrix as AWQ stores it: the words of `qweight`, (inputs, outputs / 8), go along the outputs."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.qweight.shape[1] * (32 // self.bits), self.qweight.shape[0]

    def dense(self) -> Tensor:
        """Return the values."""
        groups = torch.arange(self.shape[1], device=self.qweight.device) // self.group_size
        return self._values(groups, self._ordered(self.qzeros), lambda part: self._ordered(self.qweight[part]), 1)

    def _ordered(self, words: Tensor) -> Tensor:
        """Return integers, (rows, outputs), in the order of the outputs."""
        integers = unpacked(words, self.bits).view(len(words), -1, 32 // self.bits)
        return integers[..., list(AWQ_ORDER)].flatten(-2)


@dataclass(frozen=True)
class Rows(Packed):
    """Signed integers of 8 bits as LLM.int8() stores them, or float8 as FBGEMM does, with a scale for each output.

    Attributes:
        weight: (outputs, inputs).
        scales: (outputs,) in float32.
    """

    weight: Tensor
    scales: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "Rows":
        """Quantize values, (outputs, inputs), to 8 bits, the largest of each output to 127, as bitsandbytes does."""
        weight = values.new_empty(values.shape, dtype=torch.int8)
        scales = values.new_empty(len(values), dtype=torch.float32)
        for part in parts_of(*values.shape):
            rows = values[part].float()
            largest = rows.abs().amax(1)
            scales[part] = largest / 127
            weight[part] = (rows * (127 / largest).nan_to_num(posinf=0.0).unsqueeze(-1)).round()
        return cls(values.dtype, weight, scales)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.weight.shape[0], self.weight.shape[1]

    def dense(self) -> Tensor:
        """Return the values."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.weight.device)
        for part in parts_of(*self.shape):
            values[part] = self.weight[part].float() * self.scales[part].unsqueeze(-1)
        return values


def parts_of(num_rows: int, width: int) -> Iterator[slice]:
    """Yield slices of rows of `width` values, some million values in each."""
    step = max(1, CHUNK_VALUES // width)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the integers of words of 32 bits, those of a word side by side, the lowest bits first.

    Args:
        words: (rows, columns).
        bits: Bits of an integer, 4 or 8.

    Returns:
        (rows, columns * 32 / bits), of 8 bits each.
    """
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
