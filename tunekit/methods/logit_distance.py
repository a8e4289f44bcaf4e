"""Distance of a model's next-token distribution from a teacher's over another vocabulary, some pieces at a time.

Universal logit distillation (arXiv 2402.12030) compares two distributions by rank: the sum of the distances between
their probabilities, each sorted, the shorter one filled with zeros. The hybrid loss of TRL's GOLD (trl 1.16,
`ULDLoss`) compares tokens that both vocabularies have by the generalized Jensen-Shannon divergence, and only the others
by rank. Whole vocabularies are sorted, so logits are made of a few pieces at once, forward and backward.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from trl.trainer.utils import maybe_gather_lm_head_ctx

from tunekit.kernels.linear_ce import add_product, compute_dtype
from tunekit.methods.divergence import Scorer

TILE_PIECES = 32
"""Pieces of text whose logits are made at once."""

_SMALLEST = 1e-8
"""Probability below which the logarithm of a matched token's is that of this one, as in TRL."""


@dataclass(frozen=True)
class Hybrid:
    """Comparison of the tokens that two vocabularies have in common.

    Attributes:
        own: Ids of these tokens in the model's vocabulary, `(matched,)`.
        its: Their ids in the teacher's, `(matched,)`.
        beta: 0 is the forward, 1 the reverse Kullback-Leibler divergence, between them the generalized Jensen-Shannon
            divergence.
        matched_weight: Weight of these tokens; None: their share of the teacher's vocabulary.
        unmatched_weight: Weight of the others; None: their share.
    """

    own: Tensor
    its: Tensor
    beta: float
    matched_weight: float | None
    unmatched_weight: float | None

    def to(self, device: torch.device) -> "Hybrid":
        """Return it with its ids on a device."""
        weights = self.matched_weight, self.unmatched_weight
        return Hybrid(self.own.to(device), self.its.to(device), self.beta, *weights)

    def distance(self, own: Tensor, its: Tensor) -> Tensor:
        """Return the distance of each piece, `(pieces,)`, of probabilities `(pieces, vocabulary)` of both models."""
        share = len(self.its) / its.size(-1)
        matched_weight = share if self.matched_weight is None else self.matched_weight
        unmatched_weight = 1 - share if self.unmatched_weight is None else self.unmatched_weight
        matched = _divergence(own[:, self.own], its[:, self.its], self.beta)
        others = _without(own, self.own), _without(its, self.its)
        # TRL compares nothing where one vocabulary is part of the other.
        unmatched = rank_distance(*others) if all(other.size(-1) for other in others) else own.new_zeros(len(own))
        return matched_weight * matched + unmatched_weight * unmatched


def rank_distance(own: Tensor, its: Tensor) -> Tensor:
    """Return the sum of the distances between sorted probabilities, `(pieces,)`, of two vocabularies."""
    size = max(own.size(-1), its.size(-1))
    sorted_own, sorted_its = (
        F.pad(each.sort(dim=-1, descending=True).values, (0, size - each.size(-1))) for each in (own, its)
    )
    return (sorted_own - sorted_its).abs().sum(-1)


def _without(probabilities: Tensor, ids: Tensor) -> Tensor:
    keeps = torch.ones(probabilities.size(-1), dtype=torch.bool, device=probabilities.device)
    keeps[ids] = False
    return probabilities[:, keeps]


def _divergence(own: Tensor, its: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of measures, `(pieces,)`.

    Matched tokens have a part of all probability, and another part of each model's. A Kullback-Leibler divergence
    of such measures has their difference besides: without it, which TRL leaves out, it is least where the model gives
    these tokens more than the teacher does. In a mixture the differences cancel.
    """
    log_own, log_its = (each.clamp_min(_SMALLEST).log() for each in (own, its))
    if beta == 0:
        return (log_its.exp() * (log_its - log_own) - log_its.exp() + log_own.exp()).sum(-1)
    if beta == 1:
        return (log_own.exp() * (log_own - log_its) - log_own.exp() + log_its.exp()).sum(-1)
    log_mixture = torch.logaddexp(log_own + math.log(1 - beta), log_its + math.log(beta))
    of_its, of_own = (log.exp() * (log - log_mixture) for log in (log_its, log_own))
    return (beta * of_its + (1 - beta) * of_own).sum(-1)


@dataclass(frozen=True)
class _Side:
    """A model of the two: its head's settings, and the type of its products."""

    softcap: float | None
    logit_scale: float
    temperature: float
    dtype: torch.dtype

    @classmethod
    def of(cls, scorer: Scorer, bound: Mapping[str, Any], temperature: float) -> "_Side":
        softcap, scale = bound["final_logit_softcapping"], bound["logit_scale"]
        return cls(softcap, scale, temperature, compute_dtype(scorer.hidden))

    def logits(self, scorer: Scorer) -> Tensor:
        """Return the product of hidden states with the head, `(pieces, vocabulary)`, in float32 at least."""
        hidden, weight = scorer.hidden.to(self.dtype), scorer.weight.to(self.dtype)
        logits = hidden.new_empty(len(hidden), len(weight), dtype=torch.promote_types(self.dtype, torch.float32))
        add_product(logits, hidden, weight.t(), is_first=True)
        return logits if scorer.bias is None else logits.add_(scorer.bias)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return the logarithms of the softmax of logits as the head scales and caps them."""
        scaled = logits * self.logit_scale if self.logit_scale != 1 else logits
        if self.softcap is not None:
            scaled = self.softcap * torch.tanh(scaled / self.softcap)
        return torch.log_softmax(scaled / self.temperature, dim=-1)


def distances(
    student: Scorer,
    before: Tensor,
    teacher: Scorer,
    its_before: Tensor,
    bound: Mapping[str, Any],
    its_bound: Mapping[str, Any],
    *,
    temperature: float,
    hybrid: Hybrid | None,
) -> tuple[Tensor, Tensor]:
    """Return the distance of each piece of text, and the entropy of its last token in nats, each `(pieces,)`.

    The probabilities of a piece are those of its last token, times that of the tokens before it, by the chain rule.

    Args:
        student: The trained model, with the hidden states that the last tokens of pieces follow.
        before: Log-probability of the tokens before that in each piece, `(pieces,)`.
        teacher: Its teacher, with its own hidden states, head and vocabulary.
        its_before: As `before`, in tokens of the teacher.
        bound: Scale and soft cap of the student's logits, as TRL's head has them.
        its_bound: Those of the teacher's.
        temperature: Softmax temperature of both.
        hybrid: Tokens that are compared by a divergence; None: all are compared by rank.
    """
    sides = _Side.of(student, bound, temperature), _Side.of(teacher, its_bound, temperature)
    each: tuple[Tensor, Tensor] = _Distances.apply(  # type: ignore[no-untyped-call]
        *student, before, *teacher, its_before, *sides, hybrid
    )
    return each


class _Distances(torch.autograd.Function):
    """Distances whose logits are made a tile at a time, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        tensors, (side, its_side, hybrid) = given[:8], given[8:]
        ctx.save_for_backward(*tensors)
        ctx.settings = side, its_side, hybrid
        student, before, teacher, its_before = _unpacked(tensors)
        each, entropies = torch.empty_like(before), torch.empty_like(before)
        with _gathered(student, teacher):
            for tile in _tiles(len(before)):
                logits = side.log_probabilities(side.logits(_part(student, tile)))
                its = (its_side.log_probabilities(its_side.logits(_part(teacher, tile)))).exp_()
                entropies[tile] = -(logits.exp() * logits).sum(-1)
                its.mul_(its_before[tile, None].exp())
                each[tile] = _compare((logits + before[tile, None]).exp(), its, hybrid)
        ctx.mark_non_differentiable(entropies)
        return each, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        side, its_side, hybrid = ctx.settings
        student, before, teacher, its_before = _unpacked(ctx.saved_tensors)
        hidden_grad = torch.zeros_like(student.hidden)
        before_grad = torch.zeros_like(before)
        weight_grad = bias_grad = None
        with _gathered(student, teacher):
            # A sum over tiles in float32 at least.
            wide = torch.promote_types(side.dtype, torch.float32)
            if ctx.needs_input_grad[1]:
                weight_grad = torch.zeros_like(student.weight, dtype=wide)
            if ctx.needs_input_grad[2] and student.bias is not None:
                bias_grad = torch.zeros_like(student.bias, dtype=wide)
            for tile in _tiles(len(before)):
                part = _part(student, tile)
                its = (its_side.log_probabilities(its_side.logits(_part(teacher, tile)))).exp_()
                its.mul_(its_before[tile, None].exp())
                logits = side.logits(part).requires_grad_()
                with torch.enable_grad():
                    lead = before[tile].detach().requires_grad_()
                    own = (side.log_probabilities(logits) + lead[:, None]).exp()
                    compared = _compare(own, its, hybrid)
                    logits_grad, before_grad[tile] = torch.autograd.grad(compared, (logits, lead), grad[tile])
                del own, compared, its, logits
                cast = logits_grad.to(side.dtype)
                hidden = logits_grad.new_empty(part.hidden.shape)
                add_product(hidden, cast, part.weight.to(side.dtype), is_first=True)
                hidden_grad[tile] = hidden.to(hidden_grad.dtype)
                if weight_grad is not None:
                    add_product(weight_grad, cast.t(), part.hidden.to(side.dtype), is_first=False)
                if bias_grad is not None:
                    bias_grad += logits_grad.sum(0)
            if weight_grad is not None:
                weight_grad = weight_grad.to(student.weight.dtype)
            if bias_grad is not None and student.bias is not None:
                bias_grad = bias_grad.to(student.bias.dtype)
        return hidden_grad, weight_grad, bias_grad, before_grad, *(None,) * 7


def _unpacked(tensors: tuple[Any, ...]) -> tuple[Scorer, Tensor, Scorer, Tensor]:
    return Scorer(*tensors[:3]), tensors[3], Scorer(*tensors[4:7]), tensors[7]


def _tiles(num_pieces: int) -> Iterator[slice]:
    yield from (slice(start, start + TILE_PIECES) for start in range(0, num_pieces, TILE_PIECES))


def _part(scorer: Scorer, tile: slice) -> Scorer:
    return scorer._replace(hidden=scorer.hidden[tile])


def _gathered(student: Scorer, teacher: Scorer) -> ExitStack:
    """Around the use of both heads, of which ZeRO-3 may have left a part to each device."""
    stack = ExitStack()
    for scorer in (student, teacher):
        stack.enter_context(maybe_gather_lm_head_ctx(scorer.weight, scorer.bias))
    return stack


def _compare(own: Tensor, its: Tensor, hybrid: Hybrid | None) -> Tensor:
    return rank_distance(own, its) if hybrid is None else hybrid.distance(own, its)
