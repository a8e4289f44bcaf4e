"""State of DDP for an exact resume."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer


def settle_buckets(trainer: "Trainer") -> None:
    """Have gradients summed from the first step on as in a run that is under way. Called by all processes together.

    DDP puts them into buckets in the order of the parameters, and after the first backward pass anew, in the order in
    which they came (torch 2.13, `Reducer::rebuild_buckets`). In which order three numbers or more are added depends on
    where they stand in a bucket: the first step that a resumed run takes would be another one in the last bit. So a
    backward pass whose gradients are 0 goes before.
    """
    import torch

    model = trainer.model_wrapped
    ids = torch.zeros(1, 2, dtype=torch.long, device=trainer.args.device)
    loss = model(input_ids=ids, use_cache=False).logits.float().sum() * 0.0
    trainer.accelerator.backward(loss)
    model.zero_grad(set_to_none=True)
