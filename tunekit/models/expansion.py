"""New decoder layers of LLaMA Pro (arXiv 2401.02415): copies that begin as identities, evenly among the old ones.

Each copy stands behind the layer that it is of. The products that its attention and its MLP end in are zero, so that
it adds nothing to what passes through until it is trained, and the model computes what it did before, to the bit. The
configuration has the new number of layers, and its lists with a value for each layer have one for each copy: what is
saved is a model of its type like any other.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from tunekit.errors import ModelError
from tunekit.recipe.sections.adapters import FullAdapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def expand(model: "PreTrainedModel", num_new: int) -> "PreTrainedModel":
    """Insert new layers into a model's decoder, one behind each of as many groups of layers, and return the model.

    Args:
        model: The model, whole, with its weights.
        num_new: Number of new layers; it divides that of the old ones.

    Raises:
        ModelError: Its decoder has no list of layers, or a layer has no product that its attention or MLP ends in.
    """
    config = model.config.get_text_config(decoder=True)
    name, layers = _layers_of(model, config)
    num_layers = len(layers)
    every = num_layers // num_new
    sources = [layer for number in range(num_layers) for layer in [number] * (2 if (number + 1) % every == 0 else 1)]
    expanded: list[nn.Module] = []
    for before, source in zip([None, *sources], sources, strict=False):
        layer = layers[source]
        expanded.append(layer if source != before else _identity(layer, config))
    for number, layer in enumerate(expanded):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = number
    setattr(model.get_decoder(), name, nn.ModuleList(expanded))
    for field, values in list(vars(config).items()):
        if "layer" in field and isinstance(values, list | tuple) and len(values) == num_layers:
            setattr(config, field, [values[source] for source in sources])
    config.num_hidden_layers = len(expanded)
    return model


@contextmanager
def bypassed(model: "PreTrainedModel", adapter: FullAdapter) -> Iterator[None]:
    """Within it, a model computes what it would without its new layers."""
    config = model.config.get_text_config(decoder=True)
    _, layers = _layers_of(model, config)
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            if adapter.is_new(number, len(layers)):
                handle = layer.register_forward_hook(_take_input, with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _take_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    states = args[0] if args else kwargs["hidden_states"]
    return states if isinstance(output, torch.Tensor) else (states, *output[1:])


def _layers_of(model: "PreTrainedModel", config: "PretrainedConfig") -> tuple[str, nn.ModuleList]:
    """Return the list of a decoder's layers, and its name there.

    Raises:
        ModelError: There is none.
    """
    for name, module in model.get_decoder().named_children():
        is_list = isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
        if is_list and all(isinstance(layer, GradientCheckpointingLayer) for layer in module):
            return name, module
    raise _unknown(model, "has no list of decoder layers")


def _identity(layer: nn.Module, config: "PretrainedConfig") -> nn.Module:
    """Return a copy of a layer whose attention and MLP add zero."""
    # The configuration stays that of the model.
    copied = deepcopy(layer, {id(config): config})
    for name, part in copied.named_children():
        linears = [module for module in part.modules() if isinstance(module, nn.Linear | Conv1D)]
        ends = [linear for linear in linears if _num_outputs(linear) == config.hidden_size]
        if linears and not ends:
            raise _unknown(layer, f"has no projection in {name} that adds to the residual stream")
        if ends:
            for parameter in ends[-1].parameters():
                nn.init.zeros_(parameter)
    return copied


def _num_outputs(linear: nn.Module) -> int:
    return int(linear.nf if isinstance(linear, Conv1D) else linear.out_features)  # type: ignore[arg-type]


def _unknown(module: nn.Module, what: str) -> ModelError:
    return ModelError(f"adapter.new_layers: {type(module).__name__} {what}", hint="unset it, or use another model")
