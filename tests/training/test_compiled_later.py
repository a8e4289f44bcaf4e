"""Functions that a library gives to torch.compile while it is imported are compiled when they are called."""

import subprocess
import sys

import pytest
import torch

from tunekit.training.compiled_later import compiled_later


def test_a_function_is_compiled_by_torch_when_it_is_first_called(monkeypatch):
    compiled = []
    usual = torch.compile

    def watched(model=None, **options):
        compiled.append(options)
        return usual(model, **options)

    monkeypatch.setattr(torch, "compile", watched)
    with compiled_later():

        @torch.compile(backend="eager", dynamic=False)
        def twice(x):
            """Double."""
            return 2 * x

        layer = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert torch.compile is watched
    # A module is compiled at once: it is more than a function.
    assert compiled == [{"backend": "eager"}]
    assert twice.__doc__ == "Double."
    for _ in range(2):
        assert twice(torch.ones(2)).tolist() == [2.0, 2.0]
    assert compiled[1:] == [{"backend": "eager", "dynamic": False}]
    assert layer(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.slow
def test_bitsandbytes_needs_no_compiler_until_it_computes():
    code = """
import sys
from tunekit.training.compiled_later import compiled_later
with compiled_later():
    import bitsandbytes
    import peft
assert "torch._inductor.compile_fx" not in sys.modules
import torch
weight = torch.randn(64, 64)
packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4")
back = bitsandbytes.functional.dequantize_4bit(packed, state)
assert (back - weight).abs().mean() < 0.15
"""
    subprocess.run([sys.executable, "-c", code], check=True)
