"""What stands in for a kernel in the trace makes and saves what the kernel does, here on a CPU with real tensors."""

import pytest
import torch
import transformers.integrations.moe as moe

from tunekit.models.step_trace import LiveBytes, dropout, grouped_mm


@pytest.mark.parametrize("transposed", [False, True], ids=["outputs first", "inputs first"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("trained", ["both", "rows", "weight"])
def test_the_product_of_experts_makes_and_saves_what_torchs_does(trained, dtype, transposed):
    experts, inputs, outputs, num_rows = 4, 64, 96, 256

    def bytes_of(product) -> tuple[list[int], int, int]:
        """Bytes saved, live between forward and backward pass, and at the most."""
        rows = torch.randn(num_rows, inputs, dtype=dtype, requires_grad=trained != "weight")
        stored = (experts, inputs, outputs) if transposed else (experts, outputs, inputs)
        weight = torch.randn(stored, dtype=dtype, requires_grad=trained != "rows")
        offsets = torch.tensor([64, 64, 200, 256], dtype=torch.int32)
        saved: list[int] = []

        def keep(tensor):
            if tensor.dtype == dtype:
                saved.append(tensor.nbytes)
            return tensor

        with LiveBytes([rows, weight, offsets]) as tracker:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = product(rows, weight if transposed else weight.transpose(1, 2), offsets)
            live = tracker.live
            (result * 1.0).backward(torch.ones_like(result))
        gradients = [t.grad.is_contiguous() for t in (rows, weight) if t.grad is not None]
        assert all(gradients)
        return sorted(saved), live, tracker.peaks["forward"]

    assert bytes_of(grouped_mm) == bytes_of(moe._grouped_mm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_dropout_keeps_a_byte_for_each_value_whatever_their_type(dtype):
    """So does CUDA's kernel; without the stand-in the mask is as wide as the values."""
    values = torch.randn(64, 32, dtype=dtype, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        passed = dropout(values, 0.25, True)
    assert [(tensor.dtype, tensor.nbytes) for tensor in saved] == [(torch.bool, values.numel())]
    passed.sum().backward()
    assert torch.equal(passed == 0, values.grad == 0)
    assert dropout(values, 0.25, False) is values or torch.equal(dropout(values, 0.25, False), values)


def test_a_tensor_at_the_address_of_one_that_was_replaced_is_counted():
    """bitsandbytes gives a bias other storage in place, and what comes later may lie where it was."""
    module = torch.nn.Linear(8, 8)
    with LiveBytes(module.parameters()) as tracker:
        module.bias.data = module.bias.data.to(torch.bfloat16)
        kept = [torch.empty(8) for _ in range(256)]
    assert tracker.live == sum(tensor.nbytes for tensor in (module.bias, *kept))
