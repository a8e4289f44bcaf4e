"""Choice between padding the rows of a micro-batch and concatenating them in a single row.

Padding is computed and thrown away. Rows in a single row need none, but attention has to keep them apart: flash
attention and tunekit's own are told where each begins and do no more work than for each alone, while sdpa and eager
take a mask over the whole micro-batch and compute what it hides.
"""

from dataclasses import dataclass

from tunekit.errors import PlanError
from tunekit.planner.decisions.isolation import ISOLATE_WITH_FLASH_ONLY, VARLEN, why_not_isolated
from tunekit.planner.facts import ModelFacts
from tunekit.planner.passes import SFT, Passes
from tunekit.planner.plan import Reason
from tunekit.recipe.sections.data import DataSection


@dataclass(frozen=True)
class Padding:
    """Collation of the rows of a micro-batch.

    Attributes:
        is_free: Whether they lie one behind the other, packed or not.
        mask_length: Length of a row of the attention mask, None where attention needs none.
        why: Why so.
    """

    is_free: bool
    mask_length: int | None
    why: str

    def reason(self) -> Reason:
        """The decision for the plan."""
        choice = "none: rows lie one behind the other" if self.is_free else "to the longest row of a micro-batch"
        return Reason(topic="padding", choice=choice, why=self.why)


def padding_of(
    data: DataSection, model: ModelFacts, attn_implementation: str, micro_batch_size: int, passes: Passes = SFT
) -> Padding:
    """Choose the collation of the rows of a micro-batch, with the reason."""
    masks = needs_mask(attn_implementation)
    is_single = micro_batch_size * passes.sequences_per_row == 1
    if passes.always_pads:
        mask_length = data.max_length if masks and not is_single else None
        return Padding(False, mask_length, f"TRL pads the batches of {passes.method}")
    whole = micro_batch_size * data.max_length
    apart = f"{attn_implementation} keeps them apart by a mask over the whole micro-batch" if masks else ""
    if data.packing:
        return Padding(True, whole if masks else None, f"packed; {apart}" if masks else "packed")
    requested = data.padding_free
    if requested is True:
        masked = masks and not is_single
        return Padding(True, whole if masked else None, f"as in the recipe; {apart}" if masked else "as in the recipe")
    padded = None if is_single else data.max_length
    if requested is False:
        return Padding(False, padded, "as in the recipe")
    if is_single:
        return Padding(False, padded, "one row at a time needs none")
    if masks:
        why = f"laid one behind the other, {attn_implementation} would need a mask that grows with their square"
        return Padding(False, padded, why)
    why_not = why_not_isolated(model, attn_implementation)
    if why_not is not None:
        return Padding(False, padded, f"laid one behind the other, rows would see each other: {why_not}")
    return Padding(True, None, f"{attn_implementation} is told where each begins")


def needs_mask(attn_implementation: str) -> bool:
    """Return whether concatenated rows are kept apart by a mask over all of them.

    FlexAttention's says it of blocks of tokens and takes next to no room.
    """
    return not (attn_implementation.startswith("flash_attention") or attn_implementation in (VARLEN, "flex_attention"))


def check_isolation(data: DataSection, model: ModelFacts, attn_implementation: str) -> None:
    """Refuse what the recipe asks for where documents in one row would see each other.

    Raises:
        PlanError: Packing or padding-free batches are asked for, and the model does not keep documents apart.
    """
    if not (data.packing or data.padding_free is True):
        return
    why = why_not_isolated(model, attn_implementation)
    if why is None:
        return
    key = "data.packing" if data.packing else "data.padding_free"
    hint = f"set {key}=false"
    if model.model_type in ISOLATE_WITH_FLASH_ONLY and why_not_isolated(model, "flash_attention_2") is None:
        hint += ", or use flash_attention_2 on a device that has it"
    raise PlanError(f"{key}: documents in one row would see each other in {model.path}: {why}", hint=hint)
