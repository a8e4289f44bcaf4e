"""Embeddings of answers, and the rewards of energy-based fine-tuning by their similarity (arXiv 2603.12248).

For the embeddings `e_1 ... e_n` of the completions of a prompt and `e` of the row's own answer, all of length 1, the
reward of completion j is

    2 a cos(e_j, e) - 2 d / (n - 1) * (sum of <e_j, e_i> over all i other than j)

with the coefficients of alignment `a` and of diversity `d` (equation 7 of the paper; Axolotl 0.21 has the same). Its
gradient is that of the squared distance of the completions' mean embedding from `e`, the feature-matching loss, without
the bias of a completion that is compared with itself. Whitened embeddings are not normalized: their similarity to the
answer is a cosine all the same, and that to each other an inner product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from tunekit.recipe.methods.ebft import EmbedMethod

MIN_SINGULAR_VALUE = 1e-5
"""Smallest singular value that whitening inverts, as a share of the largest; Axolotl's."""


class FeatureRewards(NamedTuple):
    """Rewards of completions, and what they are made of."""

    rewards: Tensor
    """`(completions,)`."""
    alignment: Tensor
    """Cosine of each completion with the row's answer, `(completions,)`."""
    diversity: Tensor
    """Mean inner product of each completion with others of its prompt, `(completions,)`."""
    cfm_loss: Tensor
    """Squared distance of the completions' mean from the answer, `(prompts,)`."""


def layer_indices(fractions: Sequence[float], num_layers: int) -> list[int]:
    """Return indices into the hidden states of a model, of which the first are its token embeddings.

    Args:
        fractions: Fractions of the depth.
        num_layers: Layers of the model.
    """
    return [int(fraction * num_layers) for fraction in fractions]


def pooled(hidden: Tensor, prompt_lengths: Tensor, lengths: Tensor, method: EmbedMethod) -> Tensor:
    """Return an embedding for each sequence, `(batch, features)`, of `concat` `(batch, 3 * features)`.

    Args:
        hidden: Hidden states of prompts with answers, padded on the right, `(batch, seq, features)`.
        prompt_lengths: Tokens of the prompts, `(batch,)`.
        lengths: Tokens of prompts with answers, `(batch,)`.
        method: Pooling. The mean over an answer without tokens is zero.
    """
    rows = torch.arange(len(hidden), device=hidden.device)
    if method == "last_token":
        return hidden[rows, lengths - 1]
    if method == "concat":
        return torch.cat([hidden[rows, lengths * quarter // 4] for quarter in (1, 2, 3)], dim=-1)
    places = torch.arange(hidden.size(1), device=hidden.device)
    start = prompt_lengths if method == "completion_mean" else torch.zeros_like(prompt_lengths)
    is_counted = (places >= start[:, None]) & (places < lengths[:, None])
    total = (hidden * is_counted[..., None]).sum(1)
    return total / is_counted.sum(1).clamp(min=1)[:, None]


def whitened(completions: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Return embeddings without the correlations of their features, each of the shape that it had.

    Both are multiplied by `U S^-1 U^T`, where `U S V^T` is the singular value decomposition of the completions'
    embeddings as columns; singular values near zero are left out.

    Args:
        completions: Embeddings of the completions of a prompt, `(completions, features)`.
        answer: Embedding of the row's answer, `(1, features)`.
    """
    u, s, _ = torch.linalg.svd(completions.T, full_matrices=False)
    inverse = torch.where(s > MIN_SINGULAR_VALUE * s.max(), 1 / s, 0)
    return completions @ u * inverse @ u.T, answer @ u * inverse @ u.T


def feature_rewards(
    completions: Tensor,
    answers: Tensor,
    *,
    alignment_coef: float,
    diversity_coef: float,
    use_whitening: bool,
) -> FeatureRewards:
    """Return the rewards of completions, those of a prompt one behind the other.

    Args:
        completions: Their embeddings, `(prompts * completions, features)`.
        answers: Embeddings of the rows' answers, `(prompts, features)`.
        alignment_coef: Weight of the similarity to the answer.
        diversity_coef: Weight of the similarity to other completions. A single completion of a prompt has none.
        use_whitening: Whiten embeddings instead of normalizing them.
    """
    groups = completions.view(len(answers), -1, completions.size(-1))
    num_completions = groups.size(1)
    if use_whitening and num_completions > 1:
        white = [whitened(group, answer[None]) for group, answer in zip(groups, answers, strict=True)]
        groups = torch.stack([group for group, _ in white])
        answers = torch.cat([answer for _, answer in white])
    else:
        groups, answers = normalize(groups, dim=-1), normalize(answers, dim=-1)
    alignment = cosine_similarity(groups, answers[:, None], dim=-1)
    products = groups @ groups.transpose(1, 2)
    with_others = products.sum(-1) - products.diagonal(dim1=1, dim2=2)
    diversity = with_others / max(1, num_completions - 1)
    return FeatureRewards(
        (2 * alignment_coef * alignment - 2 * diversity_coef * diversity).flatten(),
        alignment.flatten(),
        diversity.flatten(),
        (groups.mean(1) - answers).square().sum(-1),
    )
