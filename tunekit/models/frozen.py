"""Frozen parts of a model, computed without gradients.

Gradient checkpointing beside an adapter makes the outputs of all embeddings require gradients, those of towers too
(transformers 5.24, `enable_input_require_grads`). Autograd then keeps what a frozen tower computes, and goes back
through it for nothing: Llama 3.2 Vision keeps 6 GiB a picture so.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module


def compute_without_gradients(model: "Module", names: Iterable[str]) -> None:
    """Have modules compute without gradients, but for those with a parameter that is trained.

    Args:
        model: The model, once it is known what is trained.
        names: Names of modules that its inputs, and no other modules, lead to.
    """
    for name in names:
        module = model.get_submodule(name)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            before: list[bool] = []
            module.register_forward_pre_hook(_begin(before))
            module.register_forward_hook(_end(before), always_call=True)


def _begin(before: list[bool]) -> Any:
    import torch

    def begin(_module: "Module", _inputs: Any) -> None:
        before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)

    return begin


def _end(before: list[bool]) -> Any:
    import torch

    def end(_module: "Module", _inputs: Any, _output: Any) -> None:
        torch.set_grad_enabled(before.pop())

    return end
