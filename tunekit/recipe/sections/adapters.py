"""Trained parameters: every weight, or low-rank updates beside frozen ones."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tunekit.recipe.sections.section import Section, type_alone


class FullAdapter(Section):
    """Train every weight of the model."""

    shorthand = "type"

    type: Literal["full"] = "full"
    """Train every weight."""


class LoraAdapter(Section):
    """Train low-rank updates beside frozen weights (LoRA, arXiv 2106.09685)."""

    shorthand = "type"

    type: Literal["lora"] = "lora"
    """Low-rank adaptation."""

    rank: Annotated[int, Field(gt=0)] = 16
    """Rank of the update matrices; their size grows with it."""

    alpha: Annotated[float, Field(gt=0)] = 32
    """Scale: the update is multiplied by alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the update matrices. Above 0 it costs activation memory."""

    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Modules that get an adapter: `all-linear` (every linear layer but the head) or a list of name endings such as
    [q_proj, v_proj]."""

    use_rslora: bool = False
    """Rank-stabilised scaling (arXiv 2312.03732)."""

    use_dora: bool = False
    """Weight-decomposed adaptation (arXiv 2402.09353)."""

    modules_to_save: list[str] | None = None
    """Modules trained wholly and saved with the adapter, such as [embed_tokens, lm_head]."""


class QloraAdapter(LoraAdapter):
    """LoRA over a base model quantised to 4 bits by bitsandbytes (QLoRA, arXiv 2305.14314)."""

    type: Literal["qlora"] = "qlora"  # type: ignore[assignment]
    """Low-rank adaptation over a 4-bit base."""

    quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit data type of the base weights."""

    double_quant: bool = True
    """Quantise the quantisation constants too: saves about 0.05 bytes a weight."""


Adapter = Annotated[FullAdapter | LoraAdapter | QloraAdapter, Field(discriminator="type"), BeforeValidator(type_alone)]
"""What is trained, told apart by `adapter.type`. `adapter: qlora` is short for `adapter: {type: qlora}`."""
