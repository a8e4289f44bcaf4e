"""The operations as one reads them, in plain torch, for autograd."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tunekit.kernels import glu, lora, rope
from tunekit.kernels.cross_entropy import IGNORED, Shape
from tunekit.kernels.dropout import dropout_factors
from tunekit.kernels.glu import Activation, Low
from tunekit.kernels.linear_ce import PLAIN, TokenScores
from tunekit.kernels.lora import Linear
from tunekit.kernels.rms_norm import Casting


def reference_glu(gate: Tensor, up: Tensor, *, activation: Activation) -> Tensor:
    """`glu` as one reads it."""
    return (glu._activated(gate.float(), activation) * up.float()).to(gate.dtype)


def reference_glu_lora(
    gate: Tensor, up: Tensor, gate_low: Low | None, up_low: Low | None, *, activation: Activation
) -> Tensor:
    """`glu_lora` as one reads it."""
    g, u = glu._added(gate.float(), gate_low), glu._added(up.float(), up_low)
    return reference_glu(g, u, activation=activation).to(gate.dtype)


def reference_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    casting: Casting = "llama",
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`rms_norm` as one reads it."""
    total = x if residual is None else x + residual
    n = total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        y = n.to(total.dtype)
    elif casting == "llama":
        y = (n.to(total.dtype) * (offset + weight.float())).to(torch.promote_types(total.dtype, weight.dtype))
    else:
        y = (n * (offset + weight.float())).to(total.dtype)
    return y if residual is None else (y, total)


def reference_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    casting: Casting = "llama",
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` in plain torch."""
    if q_weight is not None and k_weight is not None:
        q_normed, _ = rope._normed(q, q_weight, eps, offset, casting == "llama")
        k_normed, _ = rope._normed(k, k_weight, eps, offset, casting == "llama")
        return rope._turned(q_normed, cos, sin).to(q.dtype), rope._turned(k_normed, cos, sin).to(k.dtype)
    return rope._turned(q, cos, sin).to(q.dtype), rope._turned(k, cos, sin).to(k.dtype)


def reference_linear_ce(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    shape: Shape = PLAIN,
) -> TokenScores:
    """All of both functions with all logits at once, in the type of the arguments, for autograd."""
    z = torch.nn.functional.linear(hidden, weight, bias) * shape.logit_scale
    if shape.softcap is not None:
        z = shape.softcap * torch.tanh(z / shape.softcap)
    z = z / shape.temperature
    is_scored = labels != IGNORED
    lse = z.logsumexp(-1)
    log_probs = z.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) - lse
    losses = -(1 - shape.label_smoothing) * log_probs + shape.label_smoothing * (lse - z.mean(-1))
    losses = (losses + shape.z_loss * lse**2) * (1 if token_weights is None else token_weights)
    if shape.entropy_top_k:
        largest = z.detach().sort(-1, descending=True).values[..., : shape.entropy_top_k]
        entropy = torch.distributions.Categorical(logits=largest).entropy()
        losses = losses * (entropy / math.log(shape.entropy_top_k)) ** shape.entropy_power
    log_p = z - lse[..., None]
    columns = (
        log_probs,
        -(log_p.exp() * log_p).sum(-1),
        (2 * log_p).logsumexp(-1),
        z.mean(-1),
        z.argmax(-1) == labels,
    )
    return TokenScores(losses.where(is_scored, 0).sum(), *(column.where(is_scored, 0) for column in columns))


def reference_lora_linears(x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    """Reference of `lora_linears` in plain torch."""
    seed = lora._draw_seed(x, layers)
    outputs = []
    for place, layer in enumerate(layers):
        y = torch.nn.functional.linear(x, lora._dense(layer, x.dtype), layer.bias)
        if (low := layer.low) is not None:
            dropped = x if seed is None else x * dropout_factors(x, seed, place, low.dropout)
            y = (y + (dropped.to(low.a.dtype) @ low.a.T) @ low.b.T * low.scale).to(y.dtype)
        outputs.append(y)
    return tuple(outputs)
