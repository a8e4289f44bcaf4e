"""What a plan is decided from: plain facts about the machine, the model and the data.

Facts are gathered by `tunekit.probe` and `tunekit.data`, or written down by hand in a test. Nothing here looks at
anything; nothing here decides anything.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Facts(BaseModel):
    """Plain, frozen data that can be written to and read from YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Device(Facts):
    """One device that can compute: a processor with its main memory, or an accelerator with its own."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    native_bfloat16: bool
    """Whether bfloat16 products are computed by the hardware at speed."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability, such as (9, 0)."""
    peak_bfloat16_flops: float | None = None
    """Dense 16-bit products a second by the vendor's sheet, in FLOP/s; None where it is not known."""
    peak_float32_flops: float | None = None
    """Float32 products a second by the vendor's sheet, in FLOP/s."""
    memory_bandwidth_bytes_per_second: float | None = None
    """How fast its memory is read or written, by the vendor's sheet."""
    price_per_hour_usd: float | None = None
    """What an hour of it costs, where it is rented."""


class Hardware(Facts):
    """The machine of one process: its processor, and its accelerators if it has any."""

    cpu: Device
    accelerators: tuple[Device, ...] = ()
    num_cores: int
    flash_attn: bool = False
    """Whether the flash-attn package is installed."""


class ModelFacts(Facts):
    """A causal language model seen from its config.json and the headers of its weight files.

    The names and shapes of the tensors give exact counts; the rest describes the decoder layers.
    """

    path: str
    architecture: str
    model_type: str
    """The name that transformers has for its code."""
    layer_types: tuple[str, ...] = ()
    """How each layer mixes tokens, by transformers' names; empty where config.json does not say."""
    tensors: Mapping[str, tuple[int, ...]]
    """Shape of every stored tensor by name."""
    dtype: str
    """Type in which most weights are stored."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int | None
    has_chat_template: bool

    @property
    def num_params(self) -> int:
        """Number of parameters, a tied head counted once."""
        return sum(_size(shape) for shape in self.tensors.values())

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The two sizes of every linear layer but the head, by module name (what PEFT calls `all-linear`)."""
        return {
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape in self.tensors.items()
            if len(shape) == 2 and name.endswith(".weight") and not _is_vocabulary(name)
        }

    def num_params_in(self, modules: list[str]) -> int:
        """Number of parameters of the modules whose names end in one of `modules`."""
        return sum(
            _size(shape)
            for name, shape in self.tensors.items()
            if any(_ends_in(name.rpartition(".")[0], module) for module in modules)
        )

    def adapter_linears(self, target_modules: str | list[str]) -> dict[str, tuple[int, int]]:
        """The linear layers which get an adapter, matched by name endings as PEFT does."""
        if target_modules == "all-linear":
            return self.linears
        return {
            name: sizes
            for name, sizes in self.linears.items()
            if any(_ends_in(name, target) for target in target_modules)
        }


class SourceFacts(Facts):
    """One of the sources of a mixture."""

    name: str
    num_rows: int
    """Rows that are trained on, each as often as it is used."""
    size: int
    """Their tokens; before tokenising, their bytes."""


class DataFacts(Facts):
    """How much there is to train on.

    `tokenized` is false while only rows were counted. Afterwards the counts are those of the sequences that are
    trained on: rows without a trainable token left out, and packed where the recipe asks for it.
    """

    num_train: int
    num_eval: int | None = None
    format: Literal[
        "messages", "prompt_completion", "text", "tokens", "preference", "unpaired_preference", "prompts"
    ] = "messages"
    """Shape of the rows, after other shapes were converted to it."""
    tokenized: bool = False
    sources: tuple[SourceFacts, ...] = ()
    """What is trained on by source, in the order of the recipe."""
    num_rows: int | None = None
    """Rows that were read to train on."""
    num_train_tokens: int | None = None
    num_trainable_tokens: int | None = None
    longest_tokens: int | None = None
    num_truncated: int | None = None
    num_split: int | None = None
    num_dropped: int | None = None

    @property
    def truncated_share(self) -> float:
        """Share of the rows that were cut."""
        return (self.num_truncated or 0) / max(1, self.num_rows or 0)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def _ends_in(module: str, ending: str) -> bool:
    return module == ending or module.endswith("." + ending)


def _is_vocabulary(name: str) -> bool:
    """Whether a weight belongs to an embedding table or the head rather than to a linear layer between them."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    return module in {
        "embed_tokens",
        "wte",
        "wpe",
        "embed_in",
        "embed_out",
        "word_embeddings",
        "lm_head",
        "output",
    }
