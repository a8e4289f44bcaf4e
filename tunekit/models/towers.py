"""Towers of a model: what text does not pass through, frozen or trained.

Frozen parts compute without gradients, and their batch norms with the statistics that they came with. Gradient
checkpointing beside an adapter makes the outputs of all embeddings require gradients, those of towers too (transformers
5.24, `enable_input_require_grads`). Autograd then keeps what a frozen tower computes, and goes back through it for
nothing: Llama 3.2 Vision keeps 6 GiB a picture so.

Trained parts get a gradient in every backward pass, of zeros where a micro-batch has no pictures: DDP waits for one of
each trained parameter, and FSDP2 and ZeRO exchange those that are there, which have to be the same in all processes.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tunekit.estimates.models.towers import is_unread, num_read_layers, part_of
from tunekit.recipe.sections.adapters import FullAdapter, PeftAdapter

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def towers(model: "Module") -> list[str]:
    """Names of the outermost modules that text does not pass through: vision and audio towers and their projectors.

    They are the modules without a parameter of the text decoder, its embedding or its head; a model that is a text
    decoder alone has none.
    """
    text = _of_text(model)
    return list(_outermost_without(text, model, "")) if text else []


def _of_text(model: "Module") -> "set[Module | None]":
    """The text decoder of a multimodal model, its embedding and its head; nothing of another one."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or model.config.get_text_config(decoder=True) is model.config:
        return set()
    text = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()}
    return text | {dict(model.named_children()).get("score")}


def _beside_text(model: "Module") -> "Iterator[tuple[str, Module, str]]":
    """Yield the parameters that text does not pass through: their full name, their module, and their name there.

    Besides those of towers they are what the model has beside them, such as LLaVA-NeXT's `image_newline`.
    """
    text = _of_text(model)
    own = {id(parameter) for part in text if part is not None for parameter in part.parameters()}
    for prefix, module in model.named_modules() if text else ():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in own:
                yield f"{prefix}.{name}".removeprefix("."), module, name


def _outermost_without(parts: "set[Module | None]", module: "Module", prefix: str) -> Iterator[str]:
    """Yield the names of the outermost modules below a module that have parameters, and none of those of some parts."""
    own = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    for name, child in module.named_children():
        parameters = [id(parameter) for parameter in child.parameters()]
        if child in parts or not parameters:
            continue
        if own.isdisjoint(parameters):
            yield prefix + name
        else:
            yield from _outermost_without(parts, child, f"{prefix}{name}.")


def train_towers(model: "Module", adapter: FullAdapter) -> None:
    """Have the parameters of towers require gradients as a section says, where it trains them themselves.

    Args:
        model: The model, below any adapter.
        adapter: The section.
    """
    num_read = num_read_layers(_config_of(model))
    for name, module, own_name in _beside_text(model):
        is_full = adapter.training_of(part_of(name)) == "full" and not is_unread(name, num_read)
        module.get_parameter(own_name).requires_grad_(is_full)


def _config_of(model: Any) -> dict[str, Any]:
    settings: dict[str, Any] = model.config.to_dict()
    return settings


def excluded_in_towers(model: "Module", adapter: PeftAdapter, names: Iterable[str]) -> list[str]:
    """Return those of some modules that are in towers and get no adapter by a section, whatever their names.

    Args:
        model: The model, below any adapter.
        adapter: The section.
        names: Names of modules.
    """
    prefixes, num_read = tuple(f"{name}." for name in towers(model)), num_read_layers(_config_of(model))
    return [
        name
        for name in names
        if f"{name}.".startswith(prefixes)
        and (adapter.training_of(part_of(name)) != "lora" or is_unread(name, num_read))
    ]


def compute_without_gradients(model: "Module") -> None:
    """Have the frozen parts of towers compute without gradients, but for those that gradients pass through.

    Args:
        model: The model below any adapter, once it is known what is trained.
    """
    trained = {part_of(name) for name, module, own in _beside_text(model) if module.get_parameter(own).requires_grad}
    for name in towers(model):
        for part in _frozen_in(model.get_submodule(name), name):
            if part_of(part) == "audio_tower" or "vision_tower" not in trained:
                module = model.get_submodule(part)
                before: list[bool] = []
                module.register_forward_pre_hook(_begin(before, _batch_norms(module)))
                module.register_forward_hook(_end(before), always_call=True)


def _frozen_in(module: "Module", name: str) -> Iterator[str]:
    """Yield the outermost modules without a trained parameter; a projector is one, or none."""
    from torch.nn import ModuleList

    is_frozen = not any(parameter.requires_grad for parameter in module.parameters())
    if is_frozen and not isinstance(module, ModuleList):
        yield name
    elif part_of(name) != "projector":
        for child_name, child in module.named_children():
            if any(True for _ in child.parameters()):
                yield from _frozen_in(child, f"{name}.{child_name}")


def give_all_gradients(model: Any) -> None:
    """Have every trained parameter of a tower get a gradient in each backward pass, where there is one.

    Args:
        model: The model below any adapter, once it is known what is trained.
    """
    places = [(module, own) for _, module, own in _beside_text(model) if module.get_parameter(own).requires_grad]
    if not places:
        return
    import torch

    def add(_module: "Module", _inputs: Any, hidden: "Tensor") -> "Tensor":
        if not torch.is_grad_enabled():
            return hidden
        # By their places: engines put other tensors there.
        zeros: Tensor = _with_zeros().apply(hidden, *(module.get_parameter(name) for module, name in places))
        return zeros

    model.get_input_embeddings().register_forward_hook(add)


def _with_zeros() -> Any:
    """An autograd function that gives its first input, and zeros as gradients of the others."""
    import torch

    class WithZeros(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: "Tensor", *parameters: "Tensor") -> "Tensor":
            ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, *grads: "Tensor") -> Any:
            zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like]
            return grads[0], *zeros

    return WithZeros


def _batch_norms(module: "Module") -> "list[Module]":
    """The norms of a module that keep statistics of what passes through them while they are trained."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


def _begin(before: list[bool], norms: "list[Module]") -> Any:
    import torch

    def begin(_module: "Module", _inputs: Any) -> None:
        for norm in norms:
            norm.eval()
        before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)

    return begin


def _end(before: list[bool]) -> Any:
    import torch

    def end(_module: "Module", _inputs: Any, _output: Any) -> None:
        torch.set_grad_enabled(before.pop())

    return end
