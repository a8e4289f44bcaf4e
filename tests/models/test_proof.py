"""When a fused forward counts as the same: each row is held against its own size."""

import torch
from torch import nn

from tunekit.models.fusion.proof import Trial, differ


class Shifted(nn.Module):
    """Gives its input back with something added, as rounding or a wrong epsilon would."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.by


def difference(by, *sizes):
    rows = [torch.outer(torch.tensor(sizes), torch.ones(8)).requires_grad_() for _ in range(2)]
    old, new = (Trial(Shifted(added), (given,), {}) for added, given in zip((0.0, by), rows, strict=True))
    return differ(old, new, "float32 on cpu", torch.float32)


def test_what_is_rounding_in_large_rows_is_none_in_small_ones():
    assert difference(1e-6, 1.0, 30.0).is_rounding
    found = difference(1e-6, 1.0, 1e-3, 30.0)
    assert not found.is_rounding
    assert found.where == "the output" and 0.9e-3 < found.share < 1.1e-3


def test_what_is_no_number_is_no_rounding():
    assert not difference(float("nan"), 1.0).is_rounding
