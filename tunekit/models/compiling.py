"""Decoder layers that are compiled, and products in float8, as the plan says.

Modules stay what they are where weights are named, saved and divided: a layer is compiled in place, and a linear layer
in float8 has the weights of the one that it stands for.
"""

from typing import TYPE_CHECKING

from tunekit.errors import ModelError
from tunekit.planner.decisions.compiling import FLOAT8_MULTIPLE

if TYPE_CHECKING:
    from torch.nn import Module


def compile_layers(model: "Module", *, backend: str = "inductor") -> int:
    """Have each decoder layer compiled when it is first called, and return how many there are.

    Layers of the same code share what is compiled. It is to be done before the model is divided or wrapped, whose
    hooks then run around what is compiled.

    Raises:
        ModelError: No layer was found.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no decoder layers to compile", hint="set train.torch_compile=false"
        )
    for layer in layers:
        layer.compile(backend=backend)
    return len(layers)


def to_float8(model: "Module") -> int:
    """Have linear layers compute in float8, but for the head, and return how many do.

    It is to be done before the model is divided. Those whose sizes float8 products do not take stay as they are.
    """
    from torch import nn
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear
    from transformers import PreTrainedModel

    assert isinstance(model, PreTrainedModel), "float8 is for models that are trained whole"
    head = model.get_output_embeddings()

    def fits(module: nn.Module, _: str) -> bool:
        assert isinstance(module, nn.Linear)
        sizes = module.in_features, module.out_features
        return module is not head and all(size % FLOAT8_MULTIPLE == 0 for size in sizes)

    convert_to_float8_training(model, module_filter_fn=fits)
    return sum(isinstance(module, Float8Linear) for module in model.modules())
