"""Sections of a recipe on the model and its trained parameters.

The section of a recipe that says which model to start from.

Trained parameters: every weight, or low-rank updates beside frozen ones.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tunekit.recipe.sections.section import ESCAPE, EXPANDS_ENV, Conflict, Section, regex_problem, type_alone


class ModelSection(Section):
    """Model to start from. `model: NAME` is short for `model: {path: NAME}`."""

    shorthand = "path"

    path: Annotated[str, Field(min_length=1, json_schema_extra=EXPANDS_ENV)]
    """`pico` (ships with tunekit), a local folder, or a model name on the Hugging Face Hub. Or a finished run, by
    folder (`runs/my-sft`) or by name (`my-sft`: the newest): training continues its weights or adapter, with its
    tokenizer and chat template. The folder of a PEFT adapter works the same way."""

    revision: str | None = None
    """Branch, tag or commit of a Hub model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of frozen weights and of compute. `auto`: bfloat16 if the device supports it natively, else float32.
    Trained weights and optimizer states are always float32."""

    attn_implementation: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "tunekit_varlen"
    ] = "auto"
    """Attention implementation by its transformers name, or `tunekit_varlen`: tunekit's for padding-free rows, by
    torch's flash attention, or document by document on a CPU. `auto`: the fastest that is correct on the device."""

    kernels: Literal["auto", "tunekit", "liger", "torch"] = "auto"
    """Kernel implementation for norms, gated MLPs, rotary embeddings, adapters and the LM head: `tunekit`, `liger`
    (liger-kernel, on CUDA), or `torch`. `auto`: tunekit's wherever they are verified; the plan lists exceptions."""

    chat_template: Annotated[str | None, Field(json_schema_extra=EXPANDS_ENV)] = None
    """Jinja file to use instead of the tokenizer's chat template. Saved with the trained model."""

    trust_remote_code: bool = False
    """Run Python code that ships with the model. Only for code you have read: of a Hub model at the full commit in
    `revision`, of a folder as it is when the run starts."""


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a parameter's name begins with; None outside of the layers."""
    match = re.search(r"\.(\d+)\.", name)
    return None if match is None else int(match[1])


class FullAdapter(Section):
    """Full fine-tuning of all parameters, or of a part of them."""

    shorthand = "type"

    type: Literal["full"] = "full"
    """Full fine-tuning."""

    last_layers: Annotated[int, Field(gt=0)] | None = None
    """Train this number of last decoder layers, and what `unfrozen_parameters` names; freeze the rest. Default: train
    all parameters."""

    unfrozen_parameters: Annotated[list[str], Field(min_length=1)] | None = None
    """Regular expressions: train the parameters in whose names one is found, such as `lm_head` or
    `layers\\.(30|31)\\.mlp`, and `last_layers`; freeze the rest, in float32."""

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield patterns that are no regular expressions."""
        for number, pattern in enumerate(self.unfrozen_parameters or ()):
            if (problem := regex_problem(pattern)) is not None:
                yield Conflict(("unfrozen_parameters", number), problem, ESCAPE)

    @property
    def is_partial(self) -> bool:
        """True if some parameters are frozen."""
        return self.last_layers is not None or self.unfrozen_parameters is not None

    def trains(self, name: str, num_layers: int) -> bool:
        """Return whether a parameter is trained.

        Args:
            name: Its name in the model.
            num_layers: Decoder layers of the model.
        """
        layer = layer_of(name)
        if self.last_layers is not None and layer is not None and layer >= num_layers - self.last_layers:
            return True
        return not self.is_partial or any(re.search(pattern, name) for pattern in self.unfrozen_parameters or ())


class LoraAdapter(Section):
    """Low-rank adapters on frozen weights (LoRA, arXiv 2106.09685)."""

    shorthand = "type"

    type: Literal["lora"] = "lora"
    """Low-rank adaptation."""

    rank: Annotated[int, Field(gt=0)] = 16
    """Rank of the update matrices; their size grows with it."""

    alpha: Annotated[float, Field(gt=0)] = 32
    """Scaling: the update is multiplied by alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter input. Above 0 it costs activation memory."""

    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Modules to adapt: `all-linear` (every linear layer except the LM head) or a list of name suffixes such as
    [q_proj, v_proj]."""

    use_rslora: bool = False
    """Rank-stabilized scaling (arXiv 2312.03732)."""

    use_dora: bool = False
    """Weight-decomposed adaptation, DoRA (arXiv 2402.09353)."""

    loraplus_lr_ratio: Annotated[float, Field(ge=1)] | None = None
    """Ratio of the learning rate of matrices B, and of vectors, to that of the other parameters (LoRA+, arXiv
    2402.12354). Default: the same rate for all."""

    modules_to_save: list[str] | None = None
    """Modules to train in full and save with the adapter, such as [embed_tokens, lm_head]."""


class QloraAdapter(LoraAdapter):
    """LoRA on a base model quantized to 4 bits by bitsandbytes (QLoRA, arXiv 2305.14314)."""

    type: Literal["qlora"] = "qlora"  # type: ignore[assignment]
    """LoRA on a 4-bit base model."""

    quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit data type of the base weights."""

    double_quant: bool = True
    """Quantize the quantization constants too: saves about 0.05 bytes per weight."""


Adapter = Annotated[FullAdapter | LoraAdapter | QloraAdapter, Field(discriminator="type"), BeforeValidator(type_alone)]
"""What is trained, told apart by `adapter.type`. `adapter: qlora` is short for `adapter: {type: qlora}`."""
