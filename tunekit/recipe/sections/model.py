"""Section of a recipe on the model to start from: its weights, tokens and positions."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.chat_templates import is_unknown, named_template, unknown_words
from tunekit.recipe.sections.section import EXPANDS_ENV, Conflict, Section

RopeType = Literal["linear", "yarn", "llama3", "longrope"]
"""Methods of RoPE scaling whose frequencies do not depend on the rows seen before, by their transformers names."""


class RopeScaling(Section):
    """Longer contexts by scaled rotary embeddings, transformers' `rope_parameters`, saved in config.json."""

    rope_type: RopeType | None = None
    """RoPE scaling method by its transformers name. Default: the model's if it has one, else `yarn` (arXiv
    2309.00071)."""

    factor: Annotated[float, Field(ge=1)]
    """Scaling factor: positions as a multiple of the unscaled ones. It replaces the model's factor: 16 instead of 8
    doubles the positions."""

    original_max_position_embeddings: Annotated[int | None, Field(gt=0)] = None
    """Positions that `factor` multiplies. Default: the model's positions before any scaling."""

    attention_factor: Annotated[float | None, Field(gt=0)] = None
    """With yarn and longrope: scale of the attention logits. Default: from `factor`."""

    beta_fast: Annotated[float | None, Field(gt=0)] = None
    """With yarn: a frequency with more rotations than this within the original positions is not scaled. Default: 32."""

    beta_slow: Annotated[float | None, Field(gt=0)] = None
    """With yarn: a frequency with fewer rotations than this is divided by `factor`. Default: 1."""

    mscale: Annotated[float | None, Field(gt=0)] = None
    """With yarn and `mscale_all_dim`: weight of log(factor) in the scale of the attention logits."""

    mscale_all_dim: Annotated[float | None, Field(gt=0)] = None
    """With yarn and `mscale`: weight of log(factor) in the divisor of that scale."""

    low_freq_factor: Annotated[float | None, Field(gt=0)] = None
    """With llama3: original positions divided by the longest wavelength that is partly scaled. Llama 3.1: 1."""

    high_freq_factor: Annotated[float | None, Field(gt=0)] = None
    """With llama3: original positions divided by the longest wavelength that is not scaled. Llama 3.1: 4."""

    short_factor: Annotated[list[float] | None, Field(min_length=1)] = None
    """With longrope: divisor of each frequency for rows within the original positions."""

    long_factor: Annotated[list[float] | None, Field(min_length=1)] = None
    """With longrope: divisor of each frequency for longer rows."""


Token = Annotated[str, Field(min_length=1)]
"""Text of a token."""


class SpecialTokens(Section):
    """Special tokens by role. One that the tokenizer lacks is added."""

    bos_token: Token | None = None
    """Token that begins a text."""

    eos_token: Token | None = None
    """Token that ends a text or an answer."""

    pad_token: Token | None = None
    """Token that pads rows. Default: the tokenizer's, else its `eos_token`."""

    unk_token: Token | None = None
    """Token for text outside the vocabulary."""

    @property
    def by_role(self) -> dict[str, str]:
        """Those that are set, by role."""
        roles = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "unk_token": self.unk_token,
        }
        return {role: token for role, token in roles.items() if token is not None}


class ModelSection(Section):
    """Model to start from. `model: NAME` is short for `model: {path: NAME}`."""

    shorthand = "path"

    path: Annotated[str, Field(min_length=1, json_schema_extra=EXPANDS_ENV)]
    """`pico` or `pico-vision` (ship with tunekit), a local folder, or a model name on the Hugging Face Hub. Or a
    finished run, by folder (`runs/my-sft`) or by name (`my-sft`: the newest): training continues from its weights or
    adapter, with its tokenizer and chat template. The folder of a PEFT adapter works the same way."""

    revision: str | None = None
    """Branch, tag or commit of a Hub model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of frozen weights and of compute. `auto`: bfloat16 if the device supports it natively, else float32.
    Trained weights are float32 in any case, unless `train.pure_bf16` is set."""

    attn_implementation: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "tunekit_varlen"
    ] = "auto"
    """Attention implementation by its transformers name, or `tunekit_varlen`: tunekit's for padding-free rows, with
    torch's flash attention, or document by document on a CPU. `auto`: the fastest that is correct on the device."""

    kernels: Literal["auto", "tunekit", "liger", "torch"] = "auto"
    """Kernel implementation for norms, gated MLPs, rotary embeddings, adapters and the LM head: `tunekit`, `liger`
    (liger-kernel, on CUDA), or `torch`. `auto`: tunekit's wherever they are verified; the plan lists exceptions."""

    chat_template: Annotated[str | None, Field(json_schema_extra=EXPANDS_ENV)] = None
    """Chat template to use instead of the tokenizer's: a name such as `chatml`, `llama3` or `qwen3`, or a Jinja file.
    Saved with the trained model. A named one sets the tokenizer's end token to the token that ends its answers."""

    image_processor: Annotated[dict[str, Any] | None, Field(min_length=1)] = None
    """Settings of the model's image processor, by its names, such as {max_pixels: 501760} or {do_image_splitting:
    false}: they determine the size of images and their number of tokens. Saved with the trained model."""

    video_processor: Annotated[dict[str, Any] | None, Field(min_length=1)] = None
    """Settings of the model's video processor, by its names, such as {do_sample_frames: true, fps: 1, max_frames: 64}:
    they determine which frames of a video are read, and their size. Saved with the trained model."""

    rope_scaling: RopeScaling | None = None
    """RoPE scaling, for `data.max_length` beyond the model's positions."""

    add_tokens: Annotated[list[Token] | None, Field(min_length=1)] = None
    """Tokens to add to the tokenizer, such as [<tool>, </tool>]: one ID each, anywhere in a text. Their embedding and
    head rows are initialized near the mean of the others, and are trained with an adapter too."""

    add_special_tokens: Annotated[list[Token] | None, Field(min_length=1)] = None
    """Special tokens to add, which decoded answers omit."""

    special_tokens: SpecialTokens | None = None
    """Special tokens by role: `{pad_token: <pad>}`."""

    trust_remote_code: bool = False
    """Run Python code that ships with the model. Only for code you have read: a Hub model needs the full commit in
    `revision`; the code of a folder is pinned when the run starts."""

    @property
    def all_tokens(self) -> list[str]:
        """Tokens that the tokenizer is to have, each once, in the order in which they are added."""
        roles = {} if self.special_tokens is None else self.special_tokens.by_role
        return list(dict.fromkeys([*(self.add_tokens or []), *(self.add_special_tokens or []), *roles.values()]))

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield a token that is named twice, and chat templates that are unknown or end answers otherwise."""
        special = self.add_special_tokens or []
        for token in self.add_tokens or []:
            if token in special:
                yield Conflict(("add_tokens",), f"{token} is in add_special_tokens too", "remove it from one of them")
        if self.chat_template is not None and is_unknown(self.chat_template):
            yield Conflict(("chat_template",), *unknown_words(self.chat_template))
        template = named_template(self.chat_template)
        end = None if self.special_tokens is None else self.special_tokens.eos_token
        if template is not None and template.end is not None and end not in (None, template.end):
            what = f"{end} never ends an answer: chat_template {template.name} ends them with {template.end}"
            yield Conflict(("special_tokens", "eos_token"), what, "remove it")
