"""Divergence of a model's next-token distribution from a teacher's, by TRL's tiled kernel (trl 1.16)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from trl.kernels.chunked_divergence import VOCAB_CHUNK_SIZE, ChunkedDivergenceFunction
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import maybe_gather_lm_head_ctx

from tunekit.methods.head import language_model, whole


class Scorer(NamedTuple):
    """Last hidden states of a model, and its head.

    Attributes:
        hidden: Hidden states whose next tokens are compared, `(tokens, hidden)`.
        weight: Weight of the head, `(vocabulary, hidden)`.
        bias: Its bias, `(vocabulary,)`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def hidden_states(model: Any, inputs: Mapping[str, Any], places: Tensor) -> Tensor:
    """Return last hidden states of a batch, `(tokens, hidden)`. Called within the model's forward pass.

    Args:
        model: The model, with or without an adapter.
        inputs: The batch, without labels.
        places: Places in the flattened batch, `(tokens,)`.
    """
    hidden: Tensor = language_model(model).base_model(**inputs, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, places)


def with_head(model: Any, hidden: Tensor) -> Scorer:
    """Return hidden states with the head of their model."""
    head = language_model(model).get_output_embeddings()
    return Scorer(hidden, whole(head.weight), None if head.bias is None else whole(head.bias))


def log_probs_of(scorer: Scorer, targets: Tensor, bound: Mapping[str, Any], temperature: float = 1.0) -> Tensor:
    """Return the log-probability of the next token after each hidden state, `(tokens,)`.

    Args:
        scorer: Hidden states of a model, and its head.
        targets: The tokens, `(tokens,)`.
        bound: Scale and soft cap of the logits, as TRL's head has them.
        temperature: Softmax temperature.
    """
    settings = VOCAB_CHUNK_SIZE, bound["final_logit_softcapping"], bound["logit_scale"], ()
    with maybe_gather_lm_head_ctx(scorer.weight, scorer.bias):
        log_probs: Tensor
        log_probs, *_ = ChunkedLogProbFunction.apply(*scorer, targets, temperature, *settings)
    return log_probs


def divergences(
    student: Scorer,
    teacher: Scorer,
    bound: Mapping[str, Any],
    its_bound: Mapping[str, Any],
    *,
    beta: float,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return the divergence of each token, and the student's entropy, each `(tokens,)`, in nats.

    Args:
        student: The trained model.
        teacher: Its teacher, over the same vocabulary.
        bound: Scale and soft cap of the student's logits, as TRL's head has them.
        its_bound: Those of the teacher's.
        beta: 0 is the forward, 1 the reverse Kullback-Leibler divergence, between them the generalized Jensen-Shannon
            divergence.
        temperature: Softmax temperature of both.
    """
    each: tuple[Tensor, Tensor] = ChunkedDivergenceFunction.apply(
        *student,
        *teacher,
        beta,
        temperature,
        bound["logit_scale"],
        bound["final_logit_softcapping"],
        its_bound["logit_scale"],
        its_bound["final_logit_softcapping"],
    )
    return each
