"""Score tokens by the logits that a model's own forward pass gives.

A fused head takes hidden states times one weight for the logits, with a scale and a soft cap known by name. Some
models do more: they transform hidden states before the head (BERT, ModernBERT's decoder), divide them (muP), or cap
logits by a name of their own. Their logits are made whole here, for each token of a micro-batch, and scored as a fused
head scores them.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from tunekit.kernels.linear_ce import TokenScores, places_of


def score_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    index: Tensor | None,
    statistics: Collection[str],
    temperature: float,
    entropy_gradient: bool,
) -> TokenScores:
    """Each token's log-probability, with a gradient, and the statistics of `linear_ce`.

    Args:
        logits: `(batch, seq, vocabulary)`, as the model gives them.
        labels: The token to score at each place, `(batch, seq)`; -100: none.
        index: Places of the flattened labels that have one; looked up where left out.
        statistics: Those of `cross_entropy.STATISTICS` that are wanted.
        temperature: Divides the logits.
        entropy_gradient: Whether the entropy has a gradient.
    """
    places = places_of(labels) if index is None else index
    z = logits.flatten(0, -2).index_select(0, places).float() / temperature
    of_tokens = labels.flatten().index_select(0, places)
    log_p = z.log_softmax(-1)

    def spread(column: Tensor) -> Tensor:
        return column.new_zeros(labels.numel()).index_copy(0, places, column).view(labels.shape)

    entropy = None
    if "entropy" in statistics:
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            # A word that cannot be chosen adds nothing; 0 times -inf would be NaN.
            entropy = spread(-(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0)).sum(-1))
    with torch.no_grad():
        sums = spread((2 * log_p).logsumexp(-1)) if "log_sum_sq_probs" in statistics else None
        means = spread(z.mean(-1)) if "mean_logits" in statistics else None
        tops = spread(z.argmax(-1) == of_tokens) if "is_top1" in statistics else None
    log_probs = spread(log_p.gather(-1, of_tokens[:, None]).squeeze(-1))
    return TokenScores(None, log_probs, entropy, sums, means, tops)
