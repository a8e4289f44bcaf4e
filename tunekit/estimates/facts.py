"""Inputs of a plan: plain facts about the machine, the model and the data.

Facts are gathered by `tunekit.probe` and `tunekit.data`, or written down by hand in a test. Nothing here looks at
anything; nothing here decides anything.

Origin of training where that is a run or an adapter: its contents and its own origin.

A run gives the next one its model: all weights of a run that trained all, or an adapter on the base that it was trained
on. A new adapter section then either trains that adapter further, with the same matrices, or has it merged into the
base first, if all weights are to be trained.
"""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict

from tunekit.estimates.memory.experts import (
    ROUTERS,
    Mixture,
    adapted_experts,
    expert_adapters,
    mixture_of,
    parameter_sizes,
)
from tunekit.estimates.models.model_config import model_types, read_past_of
from tunekit.estimates.models.rope import Rope, scaled
from tunekit.estimates.models.towers import Part, Tower, is_unread, part_of
from tunekit.estimates.traces import Deviations
from tunekit.recipe.methods.spec import ScoreHead
from tunekit.recipe.sections.adapters import (
    Adapter,
    AnyPeftAdapter,
    FullAdapter,
    LoraAdapter,
    PeftAdapter,
    QloraAdapter,
    layer_of,
)
from tunekit.recipe.sections.data import Format, MediaKind
from tunekit.recipe.sections.model import ModelSection

_FREE = frozenset({"type", "dropout", "loraplus_lr_ratio", "quant_type", "double_quant"})
"""Fields of an adapter section that do not say what the trained tensors are and mean: an adapter that is trained
further keeps all others."""


_OF_RANKS = ("rank", "rank_pattern", "init_lora_weights", "rho")
_CHOOSING = (
    *("type", *_OF_RANKS, "target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    *get_args(Part),
)
"""Fields of an adapter section that say which modules get an adapter, and of which rank."""


class Facts(BaseModel):
    """Plain, frozen data that can be written to and read from YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def __dir__(self) -> list[str]:
        """List the names of this class alone, for completion: pydantic adds forty."""
        return [name for name in super().__dir__() if name.startswith("__") or name not in _OF_PYDANTIC]


_OF_PYDANTIC = frozenset(dir(BaseModel))


class Ancestor(Facts):
    """A run that a model came from."""

    name: str
    path: str
    """Its folder."""
    method: str
    adapter: str

    @property
    def words(self) -> str:
        """Its name and how it trained: `my-sft (sft, lora)`."""
        return f"{self.name} ({self.method}, {self.adapter})"


class Origin(Facts):
    """A trained model or adapter that training starts from."""

    folder: str
    """Folder of its weights, and of its tokenizer if it has one."""
    base: ModelSection
    """Model that transformers loads: the one below the adapter, or that folder."""
    adapter: AnyPeftAdapter | None
    """Settings of the adapter's training; None where the folder holds a whole model."""
    start: str
    """The model that the first run started from."""
    runs: tuple[Ancestor, ...]
    """The runs that it came from, the first one first; none where it is an adapter that no run is known of."""

    @property
    def name(self) -> str:
        """Its name: that of the last run, or the folder."""
        return self.runs[-1].name if self.runs else self.folder

    @property
    def chain(self) -> str:
        """All that it came from: `pico > my-sft (sft, lora) > my-dpo (dpo, lora)`."""
        return " > ".join([self.start, *(run.words for run in self.runs)] if self.runs else [self.start, self.folder])

    def loaded_for(self, section: ModelSection) -> ModelSection:
        """Return what transformers loads for a recipe's model section: the base, as the section changes it."""
        names = ("rope_scaling", "add_tokens", "add_special_tokens", "special_tokens")
        changes = {name: value for name, value in section if name in names and value is not None}
        return self.base.model_copy(update=changes)

    def is_merged_for(self, adapter: Adapter) -> bool:
        """Return whether its adapter is merged into the weights, all of which are trained."""
        return self.adapter is not None and isinstance(adapter, FullAdapter)


def continued_adapter(origin: Origin | None, adapter: Adapter) -> Origin | None:
    """The origin whose adapter is trained further; None where training starts with a new one, or with none."""
    return origin if origin is not None and origin.adapter is not None and isinstance(adapter, PeftAdapter) else None


class Contradiction(NamedTuple):
    """A field of the adapter section that the adapter to be trained further has otherwise."""

    field: str
    asked: Any
    has: Any


def contradictions(origin: Origin, adapter: Adapter) -> Iterator[Contradiction]:
    """Yield the recipe's adapter settings that contradict the existing adapter."""
    if origin.adapter is None or not isinstance(adapter, PeftAdapter):
        return
    if not _are_alike(adapter, origin.adapter):
        yield Contradiction("type", adapter.type, origin.adapter.type)
        return
    of_base = isinstance(origin.adapter, LoraAdapter) and origin.adapter.is_of_4bit_base
    free = _FREE - {"type", "quant_type", "double_quant"} if of_base else _FREE
    for name in type(adapter).model_fields:
        if name in adapter.model_fields_set and name not in free:
            requested, has = dict(adapter)[name], dict(origin.adapter)[name]
            if _set_of(requested) != _set_of(has):
                yield Contradiction(name, requested, has)


def _set_of(value: Any) -> Any:
    """A list or table of names whatever their order, where no name is as good as none."""
    if isinstance(value, dict):
        return frozenset(value.items())
    return frozenset(value) if isinstance(value, list) else frozenset() if value is None else value


def taken_over(origin: Origin, adapter: Adapter, *, is_type_asked: bool) -> Adapter:
    """The adapter section of a recipe, with what it leaves out as in the adapter that is trained further.

    Args:
        origin: Where training starts.
        adapter: The section.
        is_type_asked: Whether the recipe says `lora` or `qlora` itself.
    """
    if origin.adapter is None or not isinstance(adapter, PeftAdapter):
        return adapter
    if is_type_asked and not _are_alike(adapter, origin.adapter):
        return adapter
    kind = type(adapter) if is_type_asked else type(origin.adapter)
    explicit = {name: value for name, value in adapter if name in adapter.model_fields_set}
    fields = {name: value for name, value in {**dict(origin.adapter), **explicit}.items() if name in kind.model_fields}
    return kind.model_validate({**fields, "type": kind.model_fields["type"].default})


def _are_alike(adapter: PeftAdapter, other: PeftAdapter) -> bool:
    """Return whether two sections are of one kind of adapter, whatever the base is stored as."""
    return isinstance(adapter, type(other)) or isinstance(other, type(adapter))


def start_words(origin: Origin, adapter: Adapter) -> tuple[str, str]:
    """Return choice and reason of a plan about the start of training."""
    choice = origin.chain
    if origin.adapter is None:
        return choice, f"training starts from the weights of {origin.name}"
    if isinstance(adapter, FullAdapter):
        return choice, f"adapter of {origin.name} merged into {origin.base.path} in float32, all parameters trained"
    why = f"adapter of {origin.name} trained further, on {origin.base.path}"
    was, is_now = (_base_words(each) for each in (origin.adapter, adapter))
    if was != is_now:
        why += f"; trained on {was}, continues on {is_now} with slightly different outputs"
    return choice, why


def _base_words(adapter: PeftAdapter) -> str:
    """Return what the base of an adapter is stored as."""
    if not isinstance(adapter, QloraAdapter):
        return "an unquantized one"
    return "an 8-bit base" if adapter.bits == 8 else "a 4-bit base"


DeviceKind = Literal["cpu", "cuda", "mps"]
"""Kind of a device as torch names it; its ROCm builds say `cuda` too."""


class Device(Facts):
    """One device that can compute: a CPU with its host memory, or an accelerator with its own."""

    kind: DeviceKind
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    native_bfloat16: bool
    """True if the hardware computes bfloat16 products at full speed."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability, such as (9, 0)."""
    gfx: str | None = None
    """AMD's name for its instruction set, such as gfx942."""
    link: str | None = None
    """Links to the other accelerators of its node and to host memory: `18 × NVLink, PCIe 5.0 x16`."""
    visible_as: str | None = None
    """Value of CUDA_VISIBLE_DEVICES, or HIP_VISIBLE_DEVICES on ROCm, for a process that sees this device alone."""


class Figures(Facts):
    """Figures of one accelerator from data sheets, price lists and the driver; None where unknown.

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
    """To the host memory of its node."""
    network_bytes_per_second: float | None = None
    """Its share of the network, to other nodes."""
    disk_bytes_per_second: float | None = None
    """Of the node's local disk, which all its accelerators share."""
    usd_per_hour: float | None = None
    price_source: str | None = None
    """Source of the price, with its date."""


class Hardware(Facts):
    """The machine of a run: the CPU and the accelerators of a node, and how many such nodes there are."""

    cpu: Device | None = None
    """None for a machine that is only named and does not say what hosts its accelerators."""
    accelerators: tuple[Device, ...] = ()
    """Those of one node that a run can use: equal ones, in the order in which programs see them."""
    unused: tuple[Device, ...] = ()
    """Accelerators that are there too and that no run uses: unlike the others, of a kind that is not trained on, or
    more than the launcher starts processes for."""
    num_cores: int | None = None
    flash_attn: bool | None = False
    """True if the flash-attn package is installed; None where it cannot be known."""
    flash_attn_3: bool | None = None
    """The same of FlashAttention 3 (`flash_attn_interface`)."""
    flash_attn_4: bool | None = None
    """The same of FlashAttention 4 (`flash-attn-4`)."""
    triton: bool | None = None
    """The same of Triton."""
    liger_kernel: bool | None = None
    """The same of liger-kernel."""
    torchao: bool | None = None
    """The same of torchao."""
    schedulefree: bool | None = None
    """The same of schedulefree."""
    compressed_tensors: bool | None = None
    """The same of compressed-tensors."""
    shards_4bit: bool | None = None
    """True if torch's FSDP2 shards weights that are no floating-point numbers, as of 2.12."""
    cxx: bool | None = None
    """True if there is a C++ compiler, which torch.compile needs for a CPU."""
    deepspeed: bool | None = None
    """The same of DeepSpeed."""
    vllm: bool | None = None
    """The same of vLLM."""
    automodel: bool | None = None
    """The same of the version of NeMo Automodel that tunekit runs."""
    num_nodes: int = 1
    environment: Mapping[str, str] = {}
    """Variables for torch that the user has set, and that a plan would decide otherwise."""
    figures: Figures | None = None
    """Of each accelerator."""
    disk_free_bytes: int | None = None
    """Free where the run will lie; None where that is not known, as of another machine."""
    note: str | None = None
    """Note for every plan on this machine."""

    @property
    def device(self) -> Device:
        """The device that one process computes on."""
        if self.accelerators:
            return self.freest(1)[0]
        assert self.cpu is not None, "a machine has a CPU or an accelerator"
        return self.cpu

    def freest(self, num: int) -> tuple[Device, ...]:
        """The `num` accelerators of a node with the most memory free, in the order in which programs see them."""
        order = sorted(
            range(len(self.accelerators)), key=lambda index: self.accelerators[index].memory_free_bytes, reverse=True
        )
        return tuple(self.accelerators[index] for index in sorted(order[:num]))

    @property
    def num_accelerators(self) -> int:
        """Accelerators of all nodes."""
        return self.num_nodes * len(self.accelerators)

    def with_processes(self, num: int | None) -> "Hardware":
        """The machine as `num` processes find it: without accelerators, each has its share of the host memory."""
        if self.accelerators or self.cpu is None or num is None or num % self.num_nodes:
            return self
        of_a_node = num // self.num_nodes
        if num == 1:
            return self
        parts = {
            "memory_total_bytes": self.cpu.memory_total_bytes // of_a_node,
            "memory_free_bytes": self.cpu.memory_free_bytes // of_a_node,
        }
        return self.model_copy(update={"accelerators": (self.cpu.model_copy(update=parts),) * of_a_node})


@dataclass(frozen=True)
class Shapes:
    """Number of tensors of each shape, by their location in the model."""

    layers: tuple[tuple[Counter[tuple[int, ...]], int], ...]
    """Of each kind of layer, and how many layers are of it."""
    embedding: Counter[tuple[int, ...]]
    head: Counter[tuple[int, ...]]
    """Of a head with weights of its own."""
    others: Counter[tuple[int, ...]]
    """Of the final norm, and what else is in no layer."""


_LAYER = re.compile(r".*?\.\d+\.")
"""The beginning of the name of a tensor in a layer, such as `model.layers.0.`."""

_NUMBER = re.compile(r"\.\d+(?=\.)")
"""The number of a layer in a name."""


@dataclass(frozen=True)
class Linears:
    """Linear layers, or what is adapted like them."""

    sizes: dict[str, tuple[int, int]]
    """Outputs and inputs by module name."""
    adapters: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """Number of adapters by outputs and inputs of their layer, and by their rank, for all experts of a layer."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Rank of the adapter of a module, or of one expert's, by name."""

    @cached_property
    def shapes(self) -> Counter[tuple[int, int]]:
        """Number of tensors of each size."""
        return Counter(self.sizes.values())

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Their names without the numbers of layers."""
        return frozenset(_NUMBER.sub("", name) for name in self.sizes)

    @cached_property
    def largest_ranks(self) -> dict[str, int]:
        """Largest rank of the adapters of modules with one last name, experts apart."""
        largest: dict[str, int] = {}
        for name, rank in self.ranks.items():
            if not _is_expert(name):
                leaf = name.rpartition(".")[2]
                largest[leaf] = max(rank, largest.get(leaf, 0))
        return largest

    def rank_of(self, leaves: Collection[str]) -> int:
        """Rank of the adapters of a decoder layer's modules of these last names, added up: the largest of each."""
        return sum(self.largest_ranks.get(leaf, 0) for leaf in set(leaves))

    @cached_property
    def num_params(self) -> int:
        """Number of their parameters."""
        return sum(outputs * inputs * times for (outputs, inputs), times in self.shapes.items())


SCORE, SCORE_BIAS = "score.weight", "score.bias"
"""Names in transformers of the head of a reward model; only of one that scores steps it has a bias."""

_TEXT = re.compile(
    r"(?:\w+\.)*?(?:language_model|text_model|llm)\.|(?:model\.)?(?:embed_tokens|layers|norm)\.|(?:\w+\.)?(?:lm_head|score)\."
)
"""Names of what text passes through in a multimodal model, as checkpoints store it."""


def is_thinker(architecture: str) -> bool:
    """Return whether a class is the part of a model that reads and writes, without what speaks (Qwen-Omni)."""
    return architecture.endswith("ThinkerForConditionalGeneration")


def is_beside_text(name: str) -> bool:
    """Return whether text does not pass through a tensor or module of a multimodal model, by its full name."""
    return not _TEXT.match(name)


_LANGUAGE_MODEL = re.compile(r"language_model\.model\.|model\.(?=(?:layers|embed_tokens|norm)\.)")
"""Beginnings of names of a language model in older checkpoints of multimodal ones; transformers 5 has one for both."""

_LATENT_NORM = re.compile(r"\.(q|kv)_a_layernorm\.weight$")


KEPT_PACKED = ("gptq", "awq", "bitsandbytes_8bit")
"""Quantizations whose linear layers stay as they are published below an adapter on few bits, outside bitsandbytes."""


class PackedWeights(Facts):
    """Linear layers of a checkpoint that hold their weights in few bits."""

    bits: int
    weights: Mapping[str, int]
    """Bytes of each as it is kept, with its scales, by the name of its module."""
    quant_type: str | None = None
    """Data type by the name of `adapter.quant_type`; None where it has none."""
    double_quant: bool | None = None
    """True if constants of bitsandbytes' 4 bits are quantized too."""


class TemplateFacts(Facts):
    """Chat template that a recipe names, or of the model's type, in the tokenizer of its model."""

    of_type: str | None = None
    """Its name where the recipe names none: models of the type come without one."""
    end: str
    """Token that ends answers."""
    replaces: str | None = None
    """End token that the tokenizer had, where that is another one."""
    as_text: tuple[str, ...] = ()
    """Tokens of the template that the tokenizer lacks, so that they are read as ordinary text."""


class ModelFacts(Facts):
    """A causal language model seen from its config.json, and from the headers of its weight files where it has them.

    The names and shapes of the tensors give exact counts; the rest describes the decoder layers.
    """

    path: str
    architecture: str
    model_type: str
    """The name that transformers has for its code."""
    layer_types: tuple[str, ...] = ()
    """Kind of each layer's token mixing, by transformers' names; empty where config.json does not say."""
    tensors: Mapping[str, tuple[int, ...]]
    """Shape of every tensor by name, as stored, but for experts: those of a layer are fused, as transformers' modules
    have them."""
    known_from: Literal["weights", "config", "table"] = "weights"
    """Source of the tensors: the weight files, or shapes made from config.json or from tunekit's own table."""
    dtype: str
    """Type in which most weights are stored."""
    hidden_size: int
    intermediate_size: int
    """Width of the MLP that a token goes through, that of all its experts taken together."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int | None
    rope: Mapping[str, Any] | None = None
    """Rotary parameters of the layers that see all tokens, by transformers' names; None without rotary embeddings."""
    new_tokens: tuple[int, ...] = ()
    """Ids of the tokens that the recipe adds to the tokenizer; the tensors have their rows already."""
    num_new_rows: int = 0
    """Rows that embedding and head got for them; the others take rows that were spare."""
    num_new_layers: int = 0
    """Copies of layers that the recipe inserts; they are among the tensors already."""
    known_tokens: tuple[str, ...] = ()
    """Tokens that the recipe asks to add and that the tokenizer has."""
    sliding_window: int | None = None
    """Tokens that a layer with a sliding window looks back; None where no layer has one."""
    attention_dropout: float = 0.0
    """Share of the attention weights that are dropped in training."""
    num_experts: int = 0
    """Routed experts in a layer that has them; 0 in a dense model."""
    num_experts_per_token: int = 0
    router_aux_loss_coef: float | None = None
    """Coefficient of the routers' auxiliary loss by its config; None where its code has none."""
    has_chat_template: bool
    template: TemplateFacts | None = None
    """The chat template that the recipe names, or of the model's type; None where there is neither, or the tokenizer is
    not at hand."""
    published_as: str | None = None
    """Quantization of the stored weights, by transformers' `quant_method`; None where they are not quantized."""
    packed: PackedWeights | None = None
    """Weights that a quantized checkpoint holds in few bits and that can be kept so."""
    why_unread: str | None = None
    """Reason that the layout of a quantized checkpoint is not read, behind "its weights are published"."""
    origin: Origin | None = None
    """The run or the adapter that training starts from, where it is not the model itself; the rest is of the base."""
    judges: bool = False
    """True if it has a score of a text in the place of its head."""
    is_multimodal: bool = False
    """True if its config.json describes the text decoder as one part among others."""
    tower: Tower | None = None
    """Its vision tower; None where there is none, or none that is described."""

    num_read_tower_layers: int | None = None
    """Layers of its vision tower whose outputs are read; None where all are, with the norm behind them."""
    deviations: Deviations | None = None
    """Bytes by which a trace of its step exceeds the formulas; None where it was not traced."""
    why_untraced: str | None = None
    """Reason that a model that the formulas do not know was not traced."""

    def loaded_for(self, section: ModelSection) -> ModelSection:
        """Return what transformers loads for a recipe's model section."""
        return section if self.origin is None else self.origin.loaded_for(section)

    @property
    def vocabulary_tables(self) -> list[str]:
        """Names of the tensors with a row for each token: embeddings, and a head of its own."""
        return [
            name
            for name, shape in self.tensors.items()
            if (is_embedding(name) or is_head(name)) and shape[0] == self.vocab_size
        ]

    def with_new_tokens(self, ids: tuple[int, ...], known: tuple[str, ...]) -> Self:
        """The model with a row in each table for each of these tokens."""
        rows = max((*(token + 1 for token in ids), self.vocab_size))
        grown = {name: (rows, *self.tensors[name][1:]) for name in self.vocabulary_tables}
        num_rows = self.num_new_rows + rows - self.vocab_size
        changes = {"new_tokens": (*self.new_tokens, *ids), "known_tokens": known, "num_new_rows": num_rows}
        return self.model_copy(update={"tensors": {**self.tensors, **grown}, "vocab_size": rows, **changes})

    @property
    def rotary(self) -> Rope | None:
        """Rotary embeddings before a recipe scales them; None where there are none."""
        if self.rope is None or self.max_position_embeddings is None:
            return None
        return Rope(self.rope, self.max_position_embeddings)

    def positions_for(self, section: ModelSection) -> int | None:
        """Positions as a recipe's model section has them; None where the model has no limit."""
        scaling, rope = self.loaded_for(section).rope_scaling, self.rotary
        return self.max_position_embeddings if scaling is None or rope is None else scaled(rope, scaling).positions

    @property
    def num_sliding_layers(self) -> int:
        """Number of layers with sliding attention; all of them where a window is set and their types are not."""
        if self.sliding_window is None:
            return 0
        return self.layer_types.count("sliding_attention") if self.layer_types else self.num_layers

    def __copy__(self) -> Self:
        """A copy that has yet to count: `model_copy` may give it other tensors."""
        copied = super().__copy__()
        for name in set(copied.__dict__) - set(type(self).model_fields):
            del copied.__dict__[name]
        return copied

    @cached_property
    def num_params(self) -> int:
        """Number of parameters, a tied head counted once."""
        return sum(prod(shape) for shape in self.tensors.values())

    @cached_property
    def shapes(self) -> Shapes:
        """Number of tensors of each shape, by their location in the model."""
        layers: dict[str, Counter[tuple[int, ...]]] = {}
        counters: dict[str, Counter[tuple[int, ...]]] = {"embedding": Counter(), "head": Counter(), "others": Counter()}
        for name, shape in self.tensors.items():
            layer = _LAYER.match(name)
            if layer is not None:
                layers.setdefault(layer[0], Counter())[shape] += 1
            else:
                counters["head" if is_head(name) else "embedding" if _is_vocabulary(name) else "others"][shape] += 1
        alike = Counter(frozenset(layer.items()) for layer in layers.values())
        return Shapes(layers=tuple((Counter(dict(kind)), times) for kind, times in alike.items()), **counters)

    @property
    def num_active_params(self) -> int:
        """Number of parameters that one token goes through: of the routed experts only its own.

        The embedding is among them; some model cards leave it out.
        """
        if not self.num_experts:
            return self.num_params
        experts = sum(prod(shape) for name, shape in self.tensors.items() if _is_expert(name))
        return self.num_params - experts + experts * self.num_experts_per_token // self.num_experts

    def is_tower(self, name: str) -> bool:
        """True for a tensor or module of a vision or audio tower or of its projector: text does not pass through it."""
        return self.is_multimodal and is_beside_text(name)

    def module_name(self, name: str) -> str:
        """Return the name in transformers 5 of a module or tensor that a checkpoint may store under an older one."""
        if not self.is_multimodal:
            return name
        return _LANGUAGE_MODEL.sub("model.language_model.", name, count=1) if _LANGUAGE_MODEL.match(name) else name

    def is_untrained(self, name: str, adapter: FullAdapter | PeftAdapter | None = None) -> bool:
        """True for a tensor or module that gets no gradient, in a tower or elsewhere.

        Args:
            name: Its name.
            adapter: A section that may train towers; None for text alone.
        """
        if self.is_tower(name) and (adapter is None or not self.trains_in_tower(name, adapter)):
            return True
        return not model_types().without_gradient.isdisjoint(name.split("."))

    def trains_in_tower(self, name: str, adapter: FullAdapter | PeftAdapter) -> bool:
        """Return whether a tensor or module of a tower is trained, or gets an adapter if its name is a target's."""
        return adapter.training_of(part_of(name)) != "frozen" and not is_unread(name, self.num_read_tower_layers)

    def num_untrained_params(self, adapter: Adapter) -> int:
        """Number of parameters that get no gradient however a section trains the others.

        Args:
            adapter: The section.
        """
        in_towers = 0
        if any(adapter.training_of(part) != "frozen" for part in get_args(Part)):
            names = (name for name in self.tensors if self.is_tower(name) and not self.is_untrained(name, adapter))
            in_towers = sum(prod(self.tensors[name]) for name in names)
        return self._num_without_text_gradient - in_towers

    @cached_property
    def _num_without_text_gradient(self) -> int:
        return sum(prod(shape) for name, shape in self.tensors.items() if self.is_untrained(name))

    @property
    def num_tower_params(self) -> int:
        """Number of parameters of vision and audio towers and their projectors."""
        return sum(prod(shape) for name, shape in self.tensors.items() if self.is_tower(name))

    @cached_property
    def has_tied_head(self) -> bool:
        """True if the head has no weights of its own and uses those of the embedding."""
        return not self.judges and not any(is_head(name) for name in self.tensors)

    def as_judge(self, head: ScoreHead) -> "ModelFacts":
        """The model with a score in the place of its head, as transformers loads it; only that of tokens has biases."""
        tensors = {name: shape for name, shape in self.tensors.items() if not is_head(name)}
        score: dict[str, tuple[int, ...]] = {SCORE: (head.num_labels, self.hidden_size)}
        if head.scores == "steps":
            score[SCORE_BIAS] = (head.num_labels,)
        return self.model_copy(update={"tensors": tensors | score, "judges": True})

    def with_new_layers(self, num_new: int) -> "ModelFacts":
        """The model with a copy of a layer behind each of as many groups of layers."""
        every = self.num_layers // num_new
        tensors: dict[str, tuple[int, ...]] = {}
        for name, shape in self.tensors.items():
            layer = _LAYER.match(name)
            if layer is None:
                tensors[name] = shape
                continue
            *prefix, number, _ = layer[0].split(".")
            place = int(number) + int(number) // every
            for copy in range(1 + ((int(number) + 1) % every == 0)):
                tensors[".".join([*prefix, str(place + copy), name[layer.end() :]])] = shape
        ends = range(every - 1, self.num_layers, every)
        types = [kind for at, kind in enumerate(self.layer_types) for _ in range(1 + (at in ends))]
        changes = {"num_layers": self.num_layers + num_new, "layer_types": tuple(types), "num_new_layers": num_new}
        return self.model_copy(update={"tensors": tensors, **changes})

    @cached_property
    def mixture(self) -> Mixture | None:
        """The sizes of its experts; None where there are none."""
        if not self.num_experts:
            return None
        return mixture_of(self.tensors, self.num_experts, self.num_experts_per_token, self.hidden_size)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of every linear layer but the head, by module name.

        Routed experts and their router are not among them, however the files store them: in transformers 5 they are no
        linear modules. The linear layers of a vision tower are.
        """
        return self.all_linears.sizes

    @cached_property
    def all_linears(self) -> Linears:
        """The same, with their counts."""
        first, second = (1, 0) if self.model_type in model_types().stored_transposed else (0, 1)
        return Linears(
            {
                name.removesuffix(".weight"): (shape[first], shape[second])
                for name, shape in self.tensors.items()
                if len(shape) == 2 and name.endswith(".weight") and not self._is_no_linear(name)
            }
        )

    @cached_property
    def quantised_linears(self) -> Linears:
        """Those that QLoRA keeps in 4 bits, or as a checkpoint has them packed."""
        if self.packed is not None:
            return Linears({name: sizes for name, sizes in self.linears.items() if name in self.packed.weights})
        dense, ends = read_past_of(self.model_type), model_types().unquantized_linears.get(self.model_type, ())
        linears = {name: sizes for name, sizes in self.linears.items() if _leaf(name) not in dense}
        return Linears({name: sizes for name, sizes in linears.items() if not name.endswith(ends)})

    def is_packed_for(self, adapter: Adapter) -> bool:
        """Return whether QLoRA holds linear layers in few bits outside bitsandbytes' 4: in 8, or as published."""
        if not isinstance(adapter, QloraAdapter):
            return False
        return self.published_as in KEPT_PACKED or (self.published_as is None and adapter.bits == 8)

    @cached_property
    def latent_widths(self) -> dict[str, int]:
        """Widths of the vectors into which a layer compresses queries, or keys and values (arXiv 2405.04434).

        By the name of the linear layer that reads them.
        """
        return {
            match[1] + "_b_proj": shape[0]
            for name, shape in self.tensors.items()
            if (match := _LATENT_NORM.search(name)) is not None
        }

    @cached_property
    def attended_width(self) -> int:
        """Width of what all heads of attention give, which is not that of the queries where values are narrower."""
        inputs = (shape[1] for name, shape in self.tensors.items() if name.endswith(".self_attn.o_proj.weight"))
        return next(inputs, self.num_heads * self.head_dim)

    def divided_by(self, tp_size: int) -> "ModelFacts":
        """The model as one of `tp_size` devices has it in tensor parallel, by transformers' plan for Llama.

        Queries, keys, values, gate and up projection are divided by outputs, the other two linear layers by inputs.
        Norms and embedding are not; the head is, but TRL gathers it to compute the loss, so it is counted whole.
        """
        if tp_size not in self._divided:
            shapes = {name: _divided(name, shape, tp_size) for name, shape in self.tensors.items()}
            parts = {
                "num_heads": -(-self.num_heads // tp_size),
                "num_kv_heads": -(-self.num_kv_heads // tp_size),
                "intermediate_size": -(-self.intermediate_size // tp_size),
            }
            self._divided[tp_size] = self.model_copy(update={"tensors": shapes, **parts})
        return self._divided[tp_size]

    @cached_property
    def _divided(self) -> "dict[int, ModelFacts]":
        """Cache of `divided_by`."""
        return {}

    @cached_property
    def layer_shapes(self) -> tuple[Counter[tuple[int, ...]], ...]:
        """Number of tensors of each shape in each decoder layer, in the order in which tokens pass through them."""
        layers: tuple[Counter[tuple[int, ...]], ...] = tuple(Counter() for _ in range(self.num_layers))
        for name, shape in self.tensors.items():
            number = None if self.is_tower(name) or _LAYER.match(name) is None else layer_of(name)
            if number is not None:
                # Layers behind the last one predict further tokens (DeepSeek V3).
                layers[min(number, self.num_layers - 1)][shape] += 1
        return layers

    def of_layers(self, start: int, stop: int) -> "ModelFacts":
        """The model with the layers from `start` to before `stop` alone, and all that is in no layer."""
        if (start, stop) not in self._cut:
            tensors = {
                name: shape
                for name, shape in self.tensors.items()
                if _LAYER.match(name) is None or start <= (layer_of(name) or 0) < stop
            }
            changes = {"num_layers": stop - start, "layer_types": self.layer_types[start:stop]}
            self._cut[start, stop] = self.model_copy(update={"tensors": tensors, **changes})
        return self._cut[start, stop]

    @cached_property
    def _cut(self) -> "dict[tuple[int, int], ModelFacts]":
        """Cache of `of_layers`."""
        return {}

    def _is_no_linear(self, name: str) -> bool:
        """Return whether a matrix is none. In transformers 5 only llama4 and phimoe have linear modules for routers."""
        # Granite's files have a layer in a router that is itself one.
        is_router = self.num_experts > 0 and _leaf(name.removesuffix(".layer.weight")) in ROUTERS
        return _is_vocabulary(name) or name == SCORE or _is_expert(name) or is_router

    def tensors_in(self, modules: list[str]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of the modules whose names end in one of `modules`, letter by letter as PEFT has it.

        A module may have others below it, as a projector does.
        """
        endings = tuple(modules)
        return {
            name: shape
            for name, shape in self.tensors.items()
            if any(owner.endswith(endings) for owner in accumulate(name.split(".")[:-1], "{}.{}".format))
        }

    @property
    def num_linear_params(self) -> int:
        """Number of parameters of the linear layers but the head."""
        return self.all_linears.num_params

    @cached_property
    def expert_stacks(self) -> Counter[tuple[int, ...]]:
        """Number of stacks of each shape that hold a matrix of every expert of a layer, and that QLoRA quantizes."""
        if self.model_type in model_types().unquantized_experts:
            return Counter()
        return Counter(shape for name, shape in self.tensors.items() if _is_expert(name) and len(shape) == 3)

    @cached_property
    def expert_shapes(self) -> frozenset[tuple[int, ...]]:
        """Shapes of the stacks that hold a matrix of every expert of a layer."""
        stacks = (shape for shape in self.tensors.values() if len(shape) == 3)
        return frozenset(shape for shape in stacks if shape[0] == self.num_experts)

    @cached_property
    def num_stream_norms(self) -> int:
        """Norms of the residual stream in a layer: two, or four where they stand before and behind (Gemma)."""
        norms = [
            name
            for name, shape in self.tensors.items()
            if shape == (self.hidden_size,)
            and "norm" in name
            and not name.endswith(("q_norm.weight", "k_norm.weight"))
            and not self.is_tower(name)
        ]
        return (len(norms) - 1) // self.num_layers

    @cached_property
    def has_query_norms(self) -> bool:
        """True if queries and keys have norms of their own (Qwen 3, Gemma 3)."""
        return any(name.endswith("self_attn.q_norm.weight") and not self.is_tower(name) for name in self.tensors)

    def num_params_in(self, modules: list[str]) -> int:
        """Number of parameters of the modules whose names end in one of `modules`."""
        return sum(prod(shape) for shape in self.tensors_in(modules).values())

    def adapter_linears(self, targets: str | list[str] | PeftAdapter) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of what gets an adapter, matched by names as PEFT does.

        Mostly linear layers. Of some types also fused experts and routers, and then neither dense MLPs nor shared
        experts: see `tunekit.estimates.memory.experts`.

        Args:
            targets: Target modules, or a section with all that chooses modules.
        """
        return self.adapted(targets).sizes

    def adapted(self, targets: str | list[str] | PeftAdapter) -> Linears:
        """The same, with their ranks and counts. Of target modules alone, ranks are 1."""
        adapter = targets if isinstance(targets, PeftAdapter) else LoraAdapter(rank=1, target_modules=targets)
        fields = dict(adapter)
        key = repr([fields.get(name) for name in _CHOOSING])
        if key not in self._adapted:
            sizes = self._matched(adapter)
            ranks = adapter.ranks_of(sizes)
            adapters = Counter((*size, ranks[name]) for name, size in sizes.items() if not _is_expert(name))
            for name in filter(_is_expert, sizes):
                shapes = expert_adapters(name, self.tensors, self.num_experts, is_double=adapter.doubles_rank(name))
                adapters.update((outputs, inputs, each * ranks[name]) for outputs, inputs, each in shapes)
            self._adapted[key] = Linears(sizes, adapters, ranks)
        return self._adapted[key]

    @cached_property
    def _adapted(self) -> dict[str, Linears]:
        """Cache of `adapted`, by what it depends on."""
        return {}

    @cached_property
    def trained_bytes(self) -> dict[tuple[Hashable, ...], tuple[int, int]]:
        """Cache of `states.trained_bytes`, by adapter, optimizer, type and low rank."""
        return {}

    def _matched(self, adapter: PeftAdapter) -> dict[str, tuple[int, int]]:
        former = self.former_linears if adapter.adapts_experts else None
        refused = read_past_of(self.model_type)
        matched = {
            name: sizes
            for name, sizes in self.linears.items()
            if not self.is_untrained(name, adapter)
            and (
                adapter.targets(name) or (adapter.target_regex is not None and adapter.targets(self.module_name(name)))
            )
            and _leaf(name) not in (former or ())
            and _leaf(name) not in refused
        }
        if isinstance(adapter, LoraAdapter) and adapter.target_parameters:
            matched |= parameter_sizes(self.tensors, filter(adapter.targets_parameter, self.tensors))
        if not former or adapter.target_regex is not None:
            return matched
        return matched | adapted_experts(self.tensors, former, adapter.target_modules)

    @property
    def former_linears(self) -> Mapping[str, str] | None:
        """What became of the linear layers that PEFT takes the names of for fused experts; None where it does not."""
        # PEFT goes by the type of the whole model.
        is_converted = self.num_experts and not self.is_multimodal
        return model_types().former_linears.get(self.model_type) if is_converted else None


class SourceFacts(Facts):
    """One of the sources of a mixture."""

    name: str
    num_rows: int
    """Rows that are trained on, each as often as it is used."""
    size: int
    """Their tokens; before tokenizing, their bytes."""


class DataFacts(Facts):
    """Amount of training data.

    `tokenized` is false while only rows were counted. Afterwards the counts are those of the sequences that are
    trained on: rows without a trainable token left out, and packed where the recipe asks for it.
    """

    num_train: int
    num_eval: int | None = None
    format: Format = "messages"
    """Shape of the rows, after other shapes were converted to it."""
    is_conversational: bool | None = None
    """True if rows, or their prompts, are messages that the chat template formats; None in plans of older versions."""
    tokenized: bool = False
    sources: tuple[SourceFacts, ...] = ()
    """Amount of training data of each source, in the order of the recipe."""
    num_rows: int | None = None
    """Rows that were read to train on."""
    num_train_tokens: int | None = None
    num_trainable_tokens: int | None = None
    longest_tokens: int | None = None
    num_truncated: int | None = None
    num_split: int | None = None
    num_dropped: int | None = None
    has_pictures: bool = False
    """True if rows have pictures, or videos, which the same tower encodes."""
    has_videos: bool = False
    """True if rows have videos."""
    num_pictures: int | None = None
    """Pictures and videos."""
    num_picture_tokens: int | None = None
    """Tokens of all of these."""
    has_audio: bool = False
    """True if rows have audio clips."""
    num_clips: int | None = None
    num_clip_tokens: int | None = None
    """Tokens of all clips."""
    num_pixel_values: int | None = None
    """Values of the pixels of all pictures and videos, as the model's processor cuts and scales them."""
    most_pixel_values: int | None = None
    """The same of the sequence with the most: a row, or several that are packed."""
    num_good: int | None = None
    """Rows to train on whose answer is good, where rows say so."""

    @property
    def is_chat(self) -> bool:
        """True if a prompt is a turn of a conversation, rather than a text to complete."""
        if self.is_conversational is None:
            return self.format not in ("text", "tokens", "prompt_completion")
        return self.is_conversational

    @property
    def media(self) -> tuple[MediaKind, ...]:
        """Kinds of media of the rows."""
        flags: dict[MediaKind, bool] = {"image": self.has_pictures, "audio": self.has_audio}
        return tuple(kind for kind, is_there in flags.items() if is_there)

    @property
    def has_lengths(self) -> bool:
        """True if the lengths of sequences are known; of prompts alone they are not, as answers are yet to be
        generated.
        """
        return self.tokenized and self.format != "prompts"

    @property
    def truncated_share(self) -> float:
        """Share of the rows that were cut."""
        return (self.num_truncated or 0) / max(1, self.num_rows or 0)


def is_embedding(name: str) -> bool:
    """Return whether a weight is an embedding table."""
    return _is_vocabulary(name) and not is_head(name)


def is_head(name: str) -> bool:
    """Return whether a weight is that of a head of its own."""
    return _leaf(name) in model_types().heads and _LAYER.match(name) is None


def _divided(name: str, shape: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
    if _leaf(name) in {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}:
        return (-(-shape[0] // tp_size), *shape[1:])
    if _leaf(name) in {"o_proj", "down_proj"}:
        return (*shape[:-1], -(-shape[-1] // tp_size))
    return shape


def _is_vocabulary(name: str) -> bool:
    """Return whether a weight belongs to an embedding table or the head rather than to a linear layer between them."""
    return is_head(name) or _leaf(name) in model_types().embeddings


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _leaf(name: str) -> str:
    """The last name of the module that a weight belongs to."""
    return name.removesuffix(".weight").rpartition(".")[2]
