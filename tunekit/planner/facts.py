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
    """As torch names it; its ROCm builds say `cuda` too."""
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    native_bfloat16: bool
    """Whether bfloat16 products are computed by the hardware at speed."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability, such as (9, 0)."""


class Figures(Facts):
    """What data sheets, price lists and the driver say of one accelerator; None where they do not.

    These are peaks: what a program reaches is less. Operations are dense ones, without structured sparsity, and links
    count one direction.
    """

    flops_16bit: float | None = None
    """Floating-point operations a second, of 16-bit factors summed in float32."""
    flops_fp8: float | None = None
    """Floating-point operations a second, of 8-bit factors."""
    memory_bytes_per_second: float | None = None
    """From its own memory."""
    link_bytes_per_second: float | None = None
    """To the other accelerators of its node: over NVLink or its like, or else over PCIe."""
    host_bytes_per_second: float | None = None
    """To the main memory of its node."""
    network_bytes_per_second: float | None = None
    """Its share of the network, to other nodes."""
    usd_per_hour: float | None = None
    price_source: str | None = None
    """Whose price that is, and of which day."""


class Hardware(Facts):
    """The machine of a run: the processor and the accelerators of a node, and how many such nodes there are."""

    cpu: Device | None = None
    """None for a machine that is only named and does not say what hosts its accelerators."""
    accelerators: tuple[Device, ...] = ()
    """Those of one node."""
    num_cores: int | None = None
    flash_attn: bool | None = False
    """Whether the flash-attn package is installed; None where it cannot be known."""
    num_nodes: int = 1
    figures: Figures | None = None
    """Of each accelerator."""
    note: str | None = None
    """What is to be said of every plan for it."""

    @property
    def device(self) -> Device:
        """The device that one process computes on."""
        if self.accelerators:
            return self.accelerators[0]
        assert self.cpu is not None, "a machine has a processor or an accelerator"
        return self.cpu

    @property
    def num_accelerators(self) -> int:
        """Accelerators of all nodes."""
        return self.num_nodes * len(self.accelerators)


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
