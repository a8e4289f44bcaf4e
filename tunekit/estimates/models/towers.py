"""Vision towers: the sizes that the memory and the time of encoding pictures depend on.

A tower is known by its config.json and by a row of `towers.yaml` for the type of the whole model, which says how its
code is built. What no row describes is not counted, and a plan says so.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tunekit.estimates.models.model_config import model_types
from tunekit.files import read_table

Part = Literal["vision_tower", "projector", "audio_tower"]
"""Part of a model that text does not pass through."""

Form = Literal["encoder", "rotary", "crossed"]
"""Kind of a tower's code. `encoder`: layers with layer norms and an MLP of two products, such as SigLIP's. `rotary`:
RMS norms, a gated MLP, and rotary embeddings in float32 (Qwen2.5-VL). `crossed`: an encoder over tiles, of which the
text decoder reads several layers by cross-attention (Llama 3.2 Vision)."""


class Tower(BaseModel):
    """A vision tower with its projector."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    form: Form
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    values_per_patch: float
    """Values of pixels that make a patch, with those at the edges of a picture that fill none."""
    patches_per_token: float
    """Patches that one token of the text decoder stands for."""
    patches_per_picture: int = 0
    """Patches of a picture, where all are scaled to one size; 0 elsewhere."""
    keeps_pixels: bool = False
    """True if a copy of the pixels in the type of the weights is there while the tower computes."""
    has_pixel_mask: bool = False
    """True if a batch says of each pixel whether it is padding."""
    masks_text: bool = False
    """True if attention of text beside pictures has a mask of its own, also where no row is padded."""
    output_size: int = 0
    """Width of what the text decoder's cross-attention reads before it is projected; 0 without cross-attention."""
    tiles_per_picture: int = 1
    """Tiles of each picture, those that are padding too."""

    def most_values(self, num_tokens: int) -> int:
        """Values of the pixels of the pictures that fill so many tokens, or of one picture."""
        # A picture that is read by cross-attention takes one token: how many a row has is not known by its length.
        num_tokens = 0 if self.output_size else num_tokens
        least = self.patches_per_picture * self.tiles_per_picture
        return int(max(num_tokens * self.patches_per_token, least) * self.values_per_patch)


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    form: Form
    merged: Mapping[str, str]
    keeps_pixels: bool = False
    has_pixel_mask: bool = False
    masks_text: bool = False


@cache
def _rows() -> dict[str, _Row]:
    table = read_table(Path(__file__).with_name("towers.yaml"))
    return {name: _Row.model_validate(row) for name, row in table.items()}


def describes(model_type: str | None) -> bool:
    """Return whether there is a row for the towers of a type."""
    return model_type in _rows()


def part_of(name: str) -> Part:
    """Return the part that a module or parameter of a tower belongs to, by its name."""
    parts = name.split(".")
    if any("audio" in part for part in parts):
        return "audio_tower"
    return "vision_tower" if model_types().projectors.isdisjoint(parts) else "projector"


def num_read_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers of a vision tower whose outputs are read; None where all are.

    Models with a `vision_feature_layer` read the states behind that layer: 0 is what the embedding gives.

    Args:
        config: A config.json that leaves nothing out of this.
    """
    layers, num_layers = (
        config.get("vision_feature_layer"),
        (config.get("vision_config") or {}).get("num_hidden_layers"),
    )
    if layers is None or num_layers is None:
        return None
    return max(int(layer) % (int(num_layers) + 1) for layer in (layers if isinstance(layers, list) else [layers]))


def is_unread(name: str, num_read: int | None) -> bool:
    """Return whether a module or parameter of a tower gives the text decoder nothing.

    Args:
        name: Its name.
        num_read: Number of layers that are read; None where all are, with the norm behind them.
    """
    parts = name.split(".")
    if num_read is None or part_of(name) != "vision_tower":
        return False
    number = next((int(part) for part in parts if part.isdigit()), None)
    return "post_layernorm" in parts or (number is not None and number >= num_read)


def tower_of(config: Mapping[str, Any]) -> Tower | None:
    """Return the vision tower of a config.json that leaves nothing out; None where no row describes it."""
    row, vision = _rows().get(str(config.get("model_type"))), config.get("vision_config")
    if row is None or not vision:
        return None
    patch = _first(vision, "patch_size")
    size = _first(vision, "image_size") if "image_size" in vision else patch
    edge = size // patch if "image_size" in vision else None
    return Tower(
        form=row.form,
        hidden_size=_first(vision, "hidden_size"),
        intermediate_size=_first(vision, "intermediate_size"),
        num_layers=_first(vision, "num_hidden_layers", "depth") + vision.get("num_global_layers", 0),
        num_heads=_first(vision, "num_attention_heads", "num_heads", "attention_heads"),
        values_per_patch=_first(vision, "num_channels", "in_channels", "in_chans")
        * vision.get("temporal_patch_size", 1)
        * (size / (edge or 1)) ** 2,
        patches_per_token=_merged(row.merged, {**vision, **config}, edge),
        patches_per_picture=0 if edge is None else edge**2,
        keeps_pixels=row.keeps_pixels,
        has_pixel_mask=row.has_pixel_mask,
        masks_text=row.masks_text,
        output_size=vision["vision_output_dim"] if row.form == "crossed" else 0,
        tiles_per_picture=vision["max_num_tiles"] if row.form == "crossed" else 1,
    )


def _merged(merged: Mapping[str, str], config: Mapping[str, Any], edge: int | None) -> float:
    if "edge" in merged:
        return float(config[merged["edge"]] ** 2)
    return 1.0 if edge is None or not merged else edge**2 / config[merged["per_picture"]]


def _first(config: Mapping[str, Any], *names: str) -> int:
    """The first of some numbers that is there; the first of two equal ones, where it is a pair."""
    value = next(config[name] for name in names if config.get(name) is not None)
    return int(value[0] if isinstance(value, list | tuple) else value)
