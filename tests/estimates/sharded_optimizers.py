"""Which optimizers take a step on weights that FSDP2 has divided, as on whole ones: run in two processes, prints names.

torchrun --standalone --nproc_per_node 2 tests/estimates/sharded_optimizers.py NAME ...
"""

import copy
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

from tunekit.kernels.adam_mini import AdamMini
from tunekit.kernels.adamw import AdamW
from tunekit.kernels.low_rank import ApolloAdamW, GaLoreAdamW
from tunekit.kernels.muon import Muon
from tunekit.recipe.sections.section import LOW_RANK_OPTIMS


def works(optim: str, folder: str) -> bool:
    """Whether five steps on divided weights give what they give on whole ones."""
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(128, 96), torch.nn.Linear(96, 64))
    divided, start = copy.deepcopy(whole), copy.deepcopy(whole)
    for module in (*divided, divided):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    kind, options = optimizer_class(optim, folder)
    inputs = torch.randn(16, 128)
    for model in (whole, divided):
        matrices, vectors = [[one for one in model.parameters() if one.dim() == dim] for dim in (2, 1)]
        of_matrices = {"use_muon": True, "low_rank": True, "rows_per_block": 1}
        optimizer = kind([{"params": matrices, **of_matrices}, {"params": vectors}], **options)
        for _ in range(5):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other, before in zip(divided.parameters(), whole.parameters(), start.parameters(), strict=True):
        assert not torch.equal(other, before)
        if not torch.allclose(one.full_tensor(), other, rtol=1e-5, atol=1e-6):
            return False
    return True


def optimizer_class(optim: str, folder: str) -> tuple[Any, dict[str, Any]]:
    """Class and options of an optimizer: transformers' for a name of its own, else ours."""
    if optim == "tunekit_adamw":
        return AdamW, {"lr": 1e-2, "states": "float32"}
    if optim == "muon":
        return Muon, {"lr": 1e-2}
    if optim == "adam_mini":
        return AdamMini, {"lr": 1e-2}
    if optim in LOW_RANK_OPTIMS:
        return {"galore_adamw": GaLoreAdamW, "apollo_adamw": ApolloAdamW}[optim], {"lr": 1e-2, "rank": 8}
    arguments = TrainingArguments(output_dir=folder, optim=optim, use_cpu=True, report_to="none", learning_rate=1e-2)
    return Trainer.get_optimizer_cls_and_kwargs(arguments)


def main() -> None:
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        for optim in sys.argv[1:]:
            try:
                ok = works(optim, folder)
            except (RuntimeError, NotImplementedError):
                ok = False
            if ok and os.environ["RANK"] == "0":
                print(f"ok {optim}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
