"""Floating-point operations (FLOPs) of a training step: its products of matrices, two for each multiplication.

They are counted as torch's FlopCounterMode counts them; the tests compare the two. Of routed experts a token goes
through a few, and so only these are counted; what PEFT adds to the fused matrix of all experts is made once for all
tokens of a micro-batch (see `tunekit.planner.memory.sparse`).

Symbols: N parameters of the linear layers without the head, A those of their adapters, V vocabulary, h hidden size,
q = heads x head size, L layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tunekit.planner.decisions.isolation import ATTENTION_LAYERS, CARRY_STATE
from tunekit.planner.facts import ModelFacts
from tunekit.planner.memory.sparse import trained_experts
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter


def is_counted(model: ModelFacts) -> bool:
    """Return whether the closed form holds: a decoder whose layers mix tokens by attention alone."""
    if any("expert" in name for name in model.tensors) and model.mixture is None:
        return False
    if model.layer_types:
        return set(model.layer_types) <= ATTENTION_LAYERS
    return model.model_type not in CARRY_STATE


def flops_per_token(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    *,
    attended_tokens: float,
    num_tokens: float,
    head_share: float,
    gradient_checkpointing: bool,
    whole_head: bool = False,
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
        num_tokens: Tokens of a micro-batch.
        head_share: Share of the tokens for which logits are computed.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
        whole_head: Whether logits are computed once: all together, and kept, or in chunks with their gradients.
    """
    linear = _sizes(model.linears)
    attention = 2 * model.num_layers * (model.num_heads * model.head_dim + _value_width(model)) * attended_tokens
    last = {name: s for name, s in model.linears.items() if _is_last(name, s, model)}
    experts = _experts(model, adapter, num_tokens)
    forward: float
    backward: float
    if isinstance(adapter, FullAdapter):
        forward, backward, head_is_trained = 2 * linear, 4 * linear, True
    else:
        adapted = {n: s for n, s in model.adapter_linears(adapter.target_modules).items() if n in model.linears}
        added = sum(adapter.rank * (outputs + inputs) for outputs, inputs in adapted.values())
        whole = adapter.modules_to_save or []
        forward = 2 * linear + 2 * added
        backward = 2 * linear + 4 * added + 2 * (_sizes(model.adapter_linears(whole)) if whole else 0)
        head_is_trained = model.judges or "lm_head" in whole
        # Where the last product has an adapter, the adapter's own comes after it and is the one left out.
        last = {name: s for name, s in last.items() if name not in adapted}
    forward, backward = forward + experts.forward, backward + experts.backward
    head = ((6 if whole_head else 8) - (0 if head_is_trained else 2)) * head_params(model) * head_share
    again = forward + attention - 2 * _sizes(last) if gradient_checkpointing else 0
    return forward + backward + 3 * attention + head + again


def forward_flops_per_token(model: ModelFacts, *, attended_tokens: float, head_share: float) -> float:
    """Floating-point operations of one token in a forward pass without gradients and without adapters.

    Args:
        model: A model that `is_counted`.
        attended_tokens: Length of a row of attention scores.
        head_share: Share of the tokens for which logits are computed.
    """
    attention = 2 * model.num_layers * (model.num_heads * model.head_dim + _value_width(model)) * attended_tokens
    experts = _experts(model, FullAdapter(), 1).forward
    return 2 * _sizes(model.linears) + experts + attention + 2 * head_params(model) * head_share


def head_params(model: ModelFacts) -> int:
    """Parameters of the product that scores a token: by each word of the vocabulary, or a text by one number."""
    return (1 if model.judges else model.vocab_size) * model.hidden_size


def _is_last(name: str, sizes: tuple[int, int], model: ModelFacts) -> bool:
    """Return whether a linear layer is the last product of its decoder layer; experts are weighted after it."""
    if model.num_experts:
        return name.endswith(".down_proj")
    return sizes == (model.hidden_size, model.intermediate_size)


def _value_width(model: ModelFacts) -> int:
    """Width of all values, which with latent attention are narrower than queries and keys."""
    inputs = [inputs for name, (_, inputs) in model.linears.items() if name.endswith("self_attn.o_proj")]
    return inputs[0] if inputs else model.num_heads * model.head_dim


@dataclass(frozen=True)
class _Passes:
    forward: float = 0
    backward: float = 0


def _experts(model: ModelFacts, adapter: FullAdapter | LoraAdapter, num_tokens: float) -> _Passes:
    """Operations per token of all layers' routers and routed experts.

    An adapter of experts is added to their matrices before the product, so that the whole matrices' gradients are
    computed as in full training, and then those of the adapter's two factors.
    """
    mixture = model.mixture
    if mixture is None:
        return _Passes()
    h, layers = model.hidden_size, mixture.num_layers
    trained = trained_experts(None if isinstance(adapter, FullAdapter) else model.adapted(adapter.target_modules).kinds)
    router = mixture.num_experts * h
    down = mixture.per_token * mixture.inner * h
    linear = router + 3 * down
    gradients = router * trained.router + 2 * down * trained.gate_up + down * trained.down
    forward: float = 2 * linear
    backward: float = 2 * linear + 2 * gradients
    if not isinstance(adapter, FullAdapter):
        all_gate_up, all_down = mixture.expert_params(h)
        ranks = 2 * adapter.rank * all_gate_up * trained.gate_up + adapter.rank * all_down * trained.down
        ranks += adapter.rank * router * trained.router
        # Twice forward: torch tries a parametrization when it is registered, which PEFT does in each forward pass.
        forward, backward = forward + 4 * ranks / num_tokens, backward + 4 * ranks / num_tokens
    return _Passes(layers * forward, layers * backward)


def _sizes(linears: Mapping[str, tuple[int, int]]) -> int:
    return sum(outputs * inputs for outputs, inputs in linears.values())
