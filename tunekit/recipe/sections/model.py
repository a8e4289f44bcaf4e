"""Sections of a recipe on the model and its trained parameters.

The section of a recipe that says which model to start from.

Trained parameters: every weight, or low-rank updates beside frozen ones.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tunekit.recipe.sections.section import EXPANDS_ENV, Section, type_alone


class ModelSection(Section):
    """The model to start from. `model: NAME` is short for `model: {path: NAME}`."""

    shorthand = "path"

    path: Annotated[str, Field(min_length=1, json_schema_extra=EXPANDS_ENV)]
    """`pico` (ships with tunekit), a local folder, or a model's name on the Hugging Face hub. Or a finished run, by its
    folder (`runs/my-sft`) or its name (`my-sft`: the newest one): training goes on with its weights or its adapter, its
    tokenizer and its chat template. So it does with the folder of an adapter that PEFT saved."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type in which the frozen weights are kept and the products are computed. `auto`: bfloat16 where the device
    computes it natively, else float32. Trained weights and their optimizer states are always float32."""

    attn_implementation: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "tunekit_varlen"
    ] = "auto"
    """Attention implementation by its transformers name, or `tunekit_varlen`: tunekit's for rows that lie one behind
    the other, by torch's flash attention, or document by document on a CPU. `auto`: the fastest that is correct on the
    device."""

    kernels: Literal["auto", "tunekit", "liger", "torch"] = "auto"
    """Whose kernels compute norms, gated MLPs, rotary embeddings, adapters and the head: `tunekit`'s own, those of
    liger-kernel (`liger`, on CUDA), or none but torch's (`torch`). `auto`: tunekit's where they are known to be right;
    the plan says where not."""

    chat_template: Annotated[str | None, Field(json_schema_extra=EXPANDS_ENV)] = None
    """Jinja file to use instead of the tokenizer's own chat template. It is saved with the trained model."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for code that you have read: of a hub model at the full commit in
    `revision`, of a folder as it is when the run is made."""


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
