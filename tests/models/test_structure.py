"""What a forward is read as: the same for what computes the same, another for what does not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tunekit.models.fusion.structure import Unreadable, read_structure, structure_of


class Scaled(nn.Module):
    def __init__(self, *, twice: bool = False):
        super().__init__()
        self.twice = twice
        self.factor = 2.0

    def _scale(self, values):
        return values * self.factor

    def forward(self, x):
        if self.twice:
            x = self._scale(x)
        return self._scale(x)


def turned(values):
    return torch.cat((values[1:], values[:1]))


class Plain(nn.Module):
    def forward(self, hidden_states, mask=None, **kwargs):
        """Its docstring."""
        residual = hidden_states
        hidden_states, _ = self.attention(hidden_states=hidden_states, mask=mask, **kwargs)  # and a comment
        return residual + hidden_states


class Renamed(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, cache: bool = False, **others: int) -> torch.Tensor:
        attended, _weights = self.attn(hidden_states=x, cache=cache, mask=mask, **others)
        del_me = x
        result: torch.Tensor = del_me + attended
        return result


def test_names_numbers_of_parameters_temporaries_and_annotations_make_no_difference():
    plain, renamed = read_structure(Plain.forward), read_structure(Renamed.forward)
    assert renamed.bind(plain) == {"attention": "attn"}
    assert plain.passes == (("**", "mask"),)
    assert renamed.passes == (("**", "cache", "mask"),)


def test_methods_are_read_through_and_settings_decide_branches():
    def once(self, x):
        return x * self.by

    def again(self, x):
        return x * self.by * self.by

    assert structure_of(Scaled()).bind(read_structure(once)) == {"by": "factor"}
    assert structure_of(Scaled(twice=True)).bind(read_structure(again)) == {"by": "factor"}
    assert structure_of(Scaled(twice=True)).bind(read_structure(once)) is None


def test_functions_of_the_file_are_read_through_and_torchs_have_one_name():
    def calls(self, x):
        return turned(F.silu(x))

    def writes(self, x):
        y = torch.nn.functional.silu(x)
        return torch.cat((y[1:], y[:1]))

    assert read_structure(calls) == read_structure(writes)


def added(self, x, y):
    return self.f(x) + y


def subtracted(self, x, y):
    return self.f(x) - y


def swapped(self, x, y):
    return y + self.f(x)


def other_constant(self, x, y):
    return self.f(x) + y + 1.0


def keyword(self, x, y):
    return self.f(input=x) + y


def in_place(self, x, y):
    x = self.f(x)
    x += y
    return x


def behind_a_branch(self, x, y):
    if y is None:
        return x
    return self.f(x) + y


@pytest.mark.parametrize("other", [subtracted, swapped, other_constant, keyword, in_place, behind_a_branch])
def test_what_computes_something_else_is_read_as_something_else(other: Callable):
    assert read_structure(other).bind(read_structure(added)) is None


def test_a_branch_is_read_with_what_its_sides_assign():
    def one_side(self, x, y):
        if y is not None:
            x = x + y
        return self.f(x)

    def both_sides(self, x, y):
        if y is not None:
            x = x + y
        else:
            x = x - 1
        return self.f(x)

    def the_other_side(self, x, y):
        if y is not None:
            pass
        else:
            x = x + y
        return self.f(x)

    assert read_structure(one_side).operations == (
        "v0 = compare(p0 isnot None)",
        "if v0",
        "v2 = add(p1, p0)",
        "else",
        "end",
        "v5 = either(v2, p1)",
        "v6 = self.0(v5)",
        "return v6",
    )
    assert len({read_structure(form).operations for form in (one_side, both_sides, the_other_side)}) == 3


def test_training_decides_no_branch_since_it_changes():
    class Changing(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x

    assert any("choose" in line for line in structure_of(Changing()).operations)


def test_loops_are_not_read():
    def loops(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    with pytest.raises(Unreadable, match="for"):
        read_structure(loops)


def test_a_forward_without_source_is_not_read():
    made: dict = {}
    exec("def forward(self, x):\n    return x", made)  # noqa: S102
    with pytest.raises(Unreadable, match="source"):
        read_structure(made["forward"])
