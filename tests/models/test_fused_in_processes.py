"""Fused models divided over two processes: their gradients are those of the whole plain model in one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models.architectures import padded_batch
from tests.models.test_fused_models import TIGHT, distances, gradients, model_of
from tests.processes import in_processes
from tunekit.models.fusion.fuse import fuse

CASES = {
    "ddp": [("llama", "full", False), ("qwen3", "lora", True), ("phi3", "nf4", False)],
    "fsdp2": [("gemma3_text", "full", True), ("qwen3", "lora", False), ("olmo2", "lora", True)],
}
"""Architecture, adapter, and whether activations are computed again. bitsandbytes' 4-bit weights are not divided."""


def halves_of_gradients(kind):
    """In each process: how far the gradients of models that see one of two rows each are from those of plain ones."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    far = {
        (architecture, adapter): distance(kind, architecture, adapter, *more)
        for architecture, adapter, *more in CASES[kind]
    }
    # By now DDP's models are gone: one that outlives its group may wait for a thread of gloo's that waits for Python's
    # lock (torch 2.13).
    dist.destroy_process_group()
    return far


def distance(kind, architecture, adapter, is_checkpointed):
    """How far the gradients of one model are from those of a plain one that sees both rows."""
    batch = padded_batch()
    num_labels = int((batch["labels"][:, 1:] != -100).sum())
    row = {name: tensor[dist.get_rank()][None] for name, tensor in batch.items()}
    plain, fused = (model_of(architecture, adapter) for _ in range(2))
    fuse(fused)
    if is_checkpointed:
        fused.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        fused.enable_input_require_grads()
    _, right = gradients(plain, batch)
    divided = nn.parallel.DistributedDataParallel(fused) if kind == "ddp" else sharded(fused)
    # Gradients are means over the processes.
    loss = divided(**row, num_items_in_batch=num_labels).loss * dist.get_world_size()
    loss.backward()
    found = {name: whole(weight.grad) for name, weight in fused.named_parameters() if weight.requires_grad}
    return max(distances(found, right).values())


def sharded(model):
    """The model with FSDP2's units, as Accelerate makes them: each layer, and the whole."""
    from torch.distributed.fsdp import fully_shard

    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, reshard_after_forward=True)
    return fully_shard(model)


def whole(gradient):
    """A gradient, gathered where it is divided."""
    from torch.distributed.tensor import DTensor

    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_two_processes_have_the_gradients_of_one(kind):
    for far in in_processes(2, halves_of_gradients, kind):
        assert len(far) == len(CASES[kind])
        assert max(far.values()) < TIGHT, far
