"""Learning rates of single parameters: by pattern, by LoRA+, by layer.

One rule for the plan, which knows tensors by the names of the model's files, and for the optimizer, which knows
parameters by PEFT's names. A pattern goes before all else. LoRA+ (arXiv 2402.12354) multiplies the rate of the matrices
B and of vectors, as PEFT's `create_loraplus_optimizer` does. Decay by layer (arXiv 1801.06146) multiplies once for each
layer above, and for the embedding once for each layer.
"""

import re
from collections import Counter
from collections.abc import Iterable
from math import prod

from tunekit.estimates.facts import ModelFacts, is_embedding
from tunekit.estimates.memory.states import trained_tensors
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import LoraAdapter, layer_of

_OF_PEFT = re.compile(r"^base_model\.model\.|\.modules_to_save(?=\.)|\.default(?=\.|$)")
"""What PEFT adds to the names of a model."""


def plain_name(name: str) -> str:
    """Return the name of a parameter without what PEFT adds to it."""
    return _OF_PEFT.sub("", name)


def has_groups(recipe: Recipe) -> bool:
    """Return whether not all parameters have the same learning rate."""
    adapter, train = recipe.adapter, recipe.train
    by_matrix = isinstance(adapter, LoraAdapter) and adapter.loraplus_lr_ratio is not None
    return by_matrix or train.learning_rates is not None or train.layerwise_lr_decay is not None


def rate_of(recipe: Recipe, name: str, num_dims: int, num_layers: int) -> float:
    """Return the peak learning rate of a trained parameter.

    Args:
        recipe: The recipe.
        name: The parameter's plain name.
        num_dims: Its dimensions.
        num_layers: Decoder layers of the model.
    """
    train, adapter = recipe.train, recipe.adapter
    for pattern, rate in (train.learning_rates or {}).items():
        if re.search(pattern, name):
            return rate
    rate = recipe.learning_rate
    if isinstance(adapter, LoraAdapter) and adapter.loraplus_lr_ratio is not None and is_raised(name, num_dims):
        rate *= adapter.loraplus_lr_ratio
    if train.layerwise_lr_decay is not None:
        rate *= train.layerwise_lr_decay ** _num_above(name, num_layers)
    return rate


def is_raised(name: str, num_dims: int) -> bool:
    """Return whether LoRA+ raises the learning rate of a parameter."""
    return "lora_B" in name or num_dims == 1


def _num_above(name: str, num_layers: int) -> int:
    """Return the number of layers above a parameter."""
    layer = layer_of(name)
    if layer is not None:
        return num_layers - 1 - layer
    return num_layers if is_embedding(name) else 0


def rates_of(recipe: Recipe, model: ModelFacts) -> dict[float, int]:
    """Return the number of parameters of each learning rate; first that which logs show."""
    sizes: Counter[float] = Counter()
    for name, shape in trained_tensors(model, recipe.adapter).items():
        sizes[rate_of(recipe, name, len(shape), model.num_layers)] += prod(shape)
    base = recipe.learning_rate
    return dict(sorted(sizes.items(), key=lambda item: (item[0] != base, -item[0])))


def unmatched(recipe: Recipe, names: Iterable[str]) -> list[str]:
    """Return the patterns that match no trained parameter.

    Args:
        recipe: The recipe.
        names: Plain names of what is trained.
    """
    trained = list(names)
    return [
        pattern
        for pattern in recipe.train.learning_rates or ()
        if not any(re.search(pattern, name) for name in trained)
    ]
