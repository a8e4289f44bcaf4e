"""The section of a recipe that says which model to start from."""

from typing import Annotated, Literal

from pydantic import Field

from tunekit.recipe.sections.section import EXPANDS_ENV, Section


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
