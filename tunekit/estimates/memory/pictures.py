"""Bytes of pictures in a training step: their pixels, what a vision tower needs, and what it gives.

A frozen tower computes without gradients, before the text decoder and beside nothing of it but the embedded text. So it
needs the most of the moments of one layer. Of a trained one autograd keeps what the backward pass reads until that of
the text decoder is over; with checkpointing it keeps the inputs of layers, and one layer is computed again. The pixels
of all micro-batches of a step are on the device until the step is over: transformers' `get_batch_samples` fetches them
together, and Accelerate's data loader puts each there. What a tower gives stays in the model's outputs until the
forward pass is over.

Symbols: h hidden size, i intermediate size, N patches, e bytes of the compute type, s of the tower's residual stream,
n of what a norm gives. Autocast computes layer norms in float32, casts one frozen weight at a time, and keeps the casts
of trained ones.
`tests/estimates/oracle_vision.py` traces the real modules.
"""

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import get_args

from tunekit.estimates.memory.activations import Products
from tunekit.estimates.memory.states import BYTES
from tunekit.estimates.models.towers import Part, Tower, part_of
from tunekit.recipe.sections.adapters import Adapter, PeftAdapter

_PIXEL = BYTES["float32"]
"""Bytes of a pixel's value: image processors give float32."""


@dataclass(frozen=True)
class PictureLoad:
    """Pictures of a micro-batch.

    Attributes:
        values: Values of all pixels, at the most.
        num_batches: Micro-batches of an optimizer step on a device.
    """

    values: int
    num_batches: int = 1


@dataclass(frozen=True)
class PictureBytes:
    """Bytes of pictures on a device."""

    pixels: int
    """Pixels of a step, from its begin to its end."""
    encoding: int
    """At the most while the tower computes, besides the pixels."""
    outputs: int
    """Outputs of the tower, until the forward pass is over."""
    kept: int = 0
    """Kept of a trained tower and projector for their backward pass."""
    casts: int = 0
    """Casts of their weights that only the forward pass keeps, since the layers are computed again."""
    backward: int = 0
    """Of a layer of the tower in its backward pass, besides what is kept."""
    embedded: int = 0
    """Embedded text beside what the first layer reads, until the backward pass is over."""
    states: int = 0
    """States that cross-attention reads, until the backward pass of the first layer with it."""
    crossed: int = 0
    """Kept of layers with cross-attention for the backward pass."""
    recomputed: int = 0
    """Of one such layer, where layers are computed again."""


def picture_bytes(
    tower: Tower, load: PictureLoad, products: Products, num_tokens: int, adapter: Adapter, *, checkpointing: bool
) -> PictureBytes:
    """Return the bytes of the pictures of a step.

    Args:
        tower: The tower.
        load: The pictures.
        products: The products of the step.
        num_tokens: Tokens of a micro-batch of text, with its padding.
        adapter: What is trained, perhaps of the tower too.
        checkpointing: Whether layers are computed again, for which an adapter has the embedded text require gradients.
    """
    e, num_patches = products.e, round(load.values / tower.values_per_patch)
    weight = 4 if products.casted and products.full else e
    mask = load.values // 3 if tower.has_pixel_mask else 0
    pixels = load.num_batches * (_PIXEL * load.values + mask)
    copy = 0
    if tower.keeps_pixels and (weight < _PIXEL or tower.has_pixel_mask):
        copy = weight * load.values + mask
    embedded = products.stream_bytes * products.model.hidden_size * num_tokens
    features = int(num_patches / tower.patches_per_token) * products.model.hidden_size
    if tower.form == "crossed":
        return _crossed(tower, load, products, num_tokens, checkpointing=checkpointing)
    if tower.form == "rotary":
        encoding = _rotary(tower, num_patches, e, weight)
        # Joined once more, beside those of the outputs.
        outputs = e * tower.hidden_size * num_patches + (e + products.stream_bytes) * features
    else:
        encoding = _encoder(tower, num_patches, e, weight, casts=products.casted)
        normed = 4 if products.casted else e
        outputs = normed * tower.hidden_size * num_patches + (normed + products.stream_bytes) * features
    kept_embedded = embedded if checkpointing and not products.full else 0
    plain = PictureBytes(pixels, embedded + copy + encoding, outputs, kept_embedded)
    return _with_training(plain, tower, num_patches, products, adapter, checkpointing=checkpointing)


def counts(tower: Tower, adapter: Adapter) -> bool:
    """Return whether the bytes of a tower are counted as it is trained: cross-attention's only where it is frozen."""
    return tower.form != "crossed" or all(adapter.training_of(part) == "frozen" for part in get_args(Part))


def _with_training(
    plain: PictureBytes, tower: Tower, num_patches: int, products: Products, adapter: Adapter, *, checkpointing: bool
) -> PictureBytes:
    """Return the bytes with those that training of the tower and its projector adds."""
    model, e, h = products.model, products.e, tower.hidden_size
    trains_tower, trains_projector = (adapter.training_of(part) != "frozen" for part in ("vision_tower", "projector"))
    if not trains_tower and not trains_projector:
        return plain
    linears = [name for name in model.linears if model.is_tower(name) and model.trains_in_tower(name, adapter)]
    if isinstance(adapter, PeftAdapter):
        adapted = model.adapted(adapter)
        linears = [name for name in adapted.sizes if model.is_tower(name)]
        weights = sum(adapted.ranks[name] * sum(adapted.sizes[name]) for name in linears)
        ranks = sum(adapted.ranks[name] for name in linears if part_of(name) == "vision_tower") / tower.num_layers
    else:
        names = (name for name in model.tensors if model.is_tower(name) and model.trains_in_tower(name, adapter))
        weights = sum(math.prod(model.tensors[name]) for name in names if len(model.tensors[name]) > 1)
        ranks = 0.0
    casts = e * weights if products.casted else 0
    # Of the projector its input, whose width is that of all patches of a token, and what stands behind the norm.
    projector = (e + 4) * h * num_patches
    per_layer = backward = 0
    if trains_tower:
        leaves = frozenset(name.rpartition(".")[2] for name in linears if part_of(name) == "vision_tower")
        form = _kept_rotary if tower.form == "rotary" else _kept_encoder
        per_layer = int((form(tower, products, leaves) + e * ranks) * num_patches)
        stream = 4 if products.casted and products.full else e
        backward = 2 * stream * h * num_patches + 3 * e * tower.intermediate_size * num_patches
    if not checkpointing:
        return replace(plain, kept=tower.num_layers * per_layer + projector + casts, backward=backward)
    inputs = tower.num_layers * (4 if products.casted and products.full else e) * h * num_patches
    kept = projector + (inputs if trains_tower else 0)
    return replace(plain, kept=kept, casts=casts, backward=per_layer + backward)


def _kept_encoder(tower: Tower, products: Products, leaves: AbstractSet[str]) -> int:
    """Bytes of a patch that a layer with layer norms keeps for the backward pass.

    Args:
        tower: The tower.
        products: The products of the step.
        leaves: Last names of its trained or adapted linear layers.
    """
    e, h, i = products.e, tower.hidden_size, tower.intermediate_size
    norms = 2 * ((4 if products.casted else e) * h + 8)
    inputs = _num_inputs(({"q_proj", "k_proj", "v_proj"}, {"fc1"}), leaves, casts=products.casted)
    own = 0 if products.full else e * h * ("out_proj" in leaves)
    return norms + e * h * (inputs + 4) + 4 * tower.num_heads + own + e * i * (1 + ("fc2" in leaves))


def _kept_rotary(tower: Tower, products: Products, leaves: AbstractSet[str]) -> int:
    """The same of a layer with RMS norms in float32, a gated MLP, and queries, keys and values of one product."""
    e, h, i = products.e, tower.hidden_size, tower.intermediate_size
    norms = 2 * ((8 if products.full else 4) * h + 4)
    inputs = _num_inputs(({"qkv"}, {"gate_proj", "up_proj"}), leaves, casts=products.casted)
    # Of queries, keys and values a view of their product stays, and of attention what its parts are joined to.
    attention = (5 if products.full else 6) * e * h + e * h * (not products.full and "proj" in leaves)
    return norms + e * h * inputs + attention + 4 * tower.num_heads + e * i * (3 + ("down_proj" in leaves))


def _num_inputs(readers: Iterable[set[str]], leaves: AbstractSet[str], *, casts: bool) -> int:
    """Return how often what norms give is kept for trained layers that read it together: a cast of each has its own."""
    read = [len(names & leaves) for names in readers]
    return sum(read) if casts else sum(num > 0 for num in read)


def _encoder(tower: Tower, num_patches: int, e: int, weight: int, *, casts: bool) -> int:
    """The most of the moments of a layer with layer norms, beside the first stream, which stays until the end."""
    h, i, s, n = tower.hidden_size, tower.intermediate_size, weight, 4 if casts else e
    cast = e * h * i if weight != e else 0
    reads = e * h if n != e else 0
    moments = (
        # Queries, keys and values, what attention gives, and the last product of it.
        (2 * s * h + n * h + 5 * e * h) * num_patches,
        # The first product of the MLP, and its activation.
        (3 * s * h + n * h + reads + e * i) * num_patches + cast,
        (3 * s * h + n * h + 2 * e * i) * num_patches,
        (3 * s * h + n * h + e * i + e * h) * num_patches + cast,
    )
    return max(moments)


def _rotary(tower: Tower, num_patches: int, e: int, weight: int) -> int:
    """The most of the moments of a layer whose rotary embeddings are computed in float32, or of the merger."""
    h, i, n = tower.hidden_size, tower.intermediate_size, weight
    angles = 2 * 4 * (h // tower.num_heads)
    casts, merged = weight != e, int(h * tower.patches_per_token)
    reads = e * h if casts else 0
    moments = (
        (e * h + n * h + reads + 3 * e * h + angles) * num_patches + 3 * e * h * h * casts,
        # Queries and keys as they were, both in float32, the rotated queries, and three parts of the keys.
        (e * h + n * h + 3 * e * h + 6 * 4 * h + angles) * num_patches,
        (2 * e * h + n * h + 3 * e * i + angles) * num_patches,
        (2 * e * h + n * h + reads + 2 * e * i + angles) * num_patches + e * h * i * casts,
        # The merger's first product, of several patches at once.
        (e * h + n * h + reads + e * h) * num_patches + e * merged * merged * casts,
    )
    return max(moments)


def _crossed(
    tower: Tower, load: PictureLoad, products: Products, num_tokens: int, *, checkpointing: bool
) -> PictureBytes:
    """Return the bytes of an encoder over tiles whose outputs are keys and values of layers of the text decoder.

    The code keeps the outputs of all layers, and joins some of them with the last one. Each layer of cross-attention
    keeps keys and values, repeated for every head since there is a mask, and what adapters read.
    """
    model, e, h = products.model, products.e, tower.hidden_size
    s, num_patches = 4 if products.casted else e, round(load.values / tower.values_per_patch)
    num_tiles = num_patches // tower.patches_per_picture
    # With a token of its own for each tile, and padded to a multiple of eight.
    num_read = num_tiles * (tower.patches_per_picture + 1)
    padded = -(-(tower.patches_per_picture + 1) // 8) * 8
    num_states = num_tiles * padded
    mask = e * num_states * tower.tiles_per_picture * padded
    embedded = products.stream_bytes * model.hidden_size * num_tokens
    layers = s * h * tower.num_layers * num_states + mask + e * h * num_patches
    joined = s * (tower.output_size - h) * num_states + s * tower.output_size * num_read
    one_layer = ((s + (4 if products.casted else e)) * h + 2 * e * tower.intermediate_size) * num_states
    states = e * model.hidden_size * num_read
    # Of each token which tiles it reads.
    states += e * num_tokens * tower.tiles_per_picture * (tower.patches_per_picture + 1)
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    num_readers = len(products.attention & {"k_proj", "v_proj"})
    of_layer = (2 * e * q + (4 + e * products.full) * kv) * num_read
    of_layer += 0 if products.full else products.read_bytes(model.hidden_size, num_readers, is_kept=True) * num_read
    num_layers = sum(name.endswith(".cross_attn.k_proj.weight") for name in model.tensors)
    return PictureBytes(
        pixels=load.num_batches * _PIXEL * load.values,
        encoding=layers + max(joined, one_layer),
        outputs=s * tower.output_size * num_read,
        embedded=embedded if checkpointing and not products.full else 0,
        states=states,
        crossed=0 if checkpointing else num_layers * of_layer,
        recomputed=of_layer + 2 * e * kv * num_read if checkpointing else 0,
    )
