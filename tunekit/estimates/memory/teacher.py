"""Memory of a teacher, a second, frozen model: its forward pass, and the comparison with it.

A closed form; a test compares its peak with a trace of TRL's loss.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tunekit.estimates.facts import ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.activations import HEAD_COLUMNS, HEAD_TOKENS, Head, Layers
from tunekit.estimates.memory.states import BYTES, Dtype, Need, Phase


def teacher_needs(
    teacher: ModelFacts,
    dtype: Dtype,
    layout: Layout,
    layers: Layers,
    head: Head,
    num_tokens: int,
    num_scored: int,
    needs: Mapping[Phase, Need],
) -> Iterator[tuple[Phase, Need]]:
    """Yield the needs of the phases where a teacher scores each token.

    Its pass is one without gradients, up to its head. Then the probabilities of both are compared in tiles of float32,
    one of each model's, both in the forward and in the backward pass (trl/kernels/chunked_divergence.py).

    Args:
        teacher: The teacher.
        dtype: Type of the products, and of its weights.
        layout: How the run is spread.
        layers: What the decoder layers of the model that learns hold.
        head: What its final norm and head hold.
        num_tokens: Tokens of a micro-batch on a device, with its padding.
        num_scored: Those of them that are compared.
        needs: What the phases need without a teacher.
    """
    e, forward, backward = BYTES[dtype], needs["forward"], needs["head"]
    layer = 3 * e * teacher.intermediate_size + 4 * e * teacher.hidden_size
    rows = min(num_scored, HEAD_TOKENS)
    # The tile of the model alone is in its head already.
    kept_bytes, more = e * teacher.hidden_size * num_scored, (2 * 4 - e) * rows * HEAD_COLUMNS
    cast = e * rows * min(teacher.vocab_size, HEAD_COLUMNS) if e == 2 else 0
    gathered = forward.gathered + (e * teacher.num_params if layout.strategy == "zero3" else 0)
    passing = replace(
        forward,
        activations=layers.kept + layers.shared + head.kept + layer * num_tokens,
        logits=0,
        gathered=gathered,
    )
    comparing = replace(
        forward, activations=forward.activations + kept_bytes, logits=head.forward + more, gathered=gathered
    )
    yield "reference", max(passing, comparing, key=lambda need: need.total)
    # Gradients of the tile are cast from float32.
    yield (
        "head",
        replace(
            backward,
            activations=backward.activations + kept_bytes,
            logits=max(backward.logits, head.backward) + more + cast,
            gathered=backward.gathered + gathered - forward.gathered,
        ),
    )
