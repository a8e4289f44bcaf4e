"""Floating-point operations (FLOPs) of a training step: its products of matrices, two for each multiplication.

They are counted as torch's FlopCounterMode counts them; the tests compare the two.

Symbols: N parameters of the linear layers without the head, A those of their adapters, V vocabulary, h hidden size,
q = heads x head size, L layers.
"""

from collections.abc import Mapping

from tunekit.planner.facts import ModelFacts
from tunekit.planner.isolation import ATTENTION_LAYERS, CARRY_STATE
from tunekit.recipe.schema import FullAdapter, LoraAdapter


def is_counted(model: ModelFacts) -> bool:
    """Whether the closed form holds: a dense decoder whose layers mix tokens by attention alone."""
    if any("expert" in name for name in model.tensors):
        return False
    if model.layer_types:
        return set(model.layer_types) <= ATTENTION_LAYERS
    return model.model_type not in CARRY_STATE


def flops_per_token(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    *,
    attended_tokens: float,
    head_share: float,
    gradient_checkpointing: bool,
) -> float:
    """Floating-point operations of one token in a training step.

    A product costs 2 forward and 2 for each of the gradients of its input and its weight: 6N where weights are
    trained, 4N + 6A with adapters. Attention costs 12 L q a over `a` tokens, causal or not (arXiv 2204.02311, appendix
    B; kernels that skip the masked half do half of it). The head is TRL's in tiles: computed, computed again in the
    backward pass, and one or two gradients. Checkpointing computes each layer again up to the input of its last
    product. DoRA's norms, which are computed once a step and not for each token, are not counted.

    Args:
        model: A model that `is_counted`.
        adapter: What is trained.
        attended_tokens: Length of a row of attention scores.
        head_share: Share of the tokens for which logits are computed.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
    """
    linear = _sizes(model.linears)
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * attended_tokens
    last = {name: s for name, s in model.linears.items() if s == (model.hidden_size, model.intermediate_size)}
    if isinstance(adapter, FullAdapter):
        forward, backward, head_is_trained = 2 * linear, 4 * linear, True
    else:
        adapted = model.adapter_linears(adapter.target_modules)
        added = sum(adapter.rank * (outputs + inputs) for outputs, inputs in adapted.values())
        whole = adapter.modules_to_save or []
        forward = 2 * linear + 2 * added
        backward = 2 * linear + 4 * added + 2 * (_sizes(model.adapter_linears(whole)) if whole else 0)
        head_is_trained = "lm_head" in whole
        # Where the last product has an adapter, the adapter's own comes after it and is the one left out.
        last = {name: s for name, s in last.items() if name not in adapted}
    head = (8 if head_is_trained else 6) * model.vocab_size * model.hidden_size * head_share
    again = forward + attention - 2 * _sizes(last) if gradient_checkpointing else 0
    return forward + backward + 3 * attention + head + again


def _sizes(linears: Mapping[str, tuple[int, int]]) -> int:
    return sum(outputs * inputs for outputs, inputs in linears.values())
