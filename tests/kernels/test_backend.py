"""Machines without Triton have the kernels' torch forms."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, pkgutil, sys

sys.modules["triton"] = None
import torch

import pytest

from tunekit import kernels

for module in pkgutil.iter_modules(kernels.__path__):
    importlib.import_module(f"tunekit.kernels.{module.name}")
import tunekit.models.fusion.fuse
from tunekit.kernels.backend import uses_triton
from tunekit.kernels.rms_norm import rms_norm

assert not uses_triton(torch.ones(1, device="meta"))
x = torch.tensor([[3.0, 4.0]])
print(rms_norm(x, torch.tensor([1.0, 2.0]), eps=0.0).tolist())
"""


@pytest.mark.slow
def test_without_triton_the_torch_forms_are_there():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # 3 and 4 by the root of 25 / 2; the second one doubled.
    one, other = json.loads(done.stdout)[0]
    assert abs(one - 3 / 12.5**0.5) < 1e-6
    assert abs(other - 8 / 12.5**0.5) < 1e-6
