"""Section of a recipe on its trained parameters: every weight or a part of them, or adapters on frozen ones."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator

from tunekit.recipe.sections.section import ESCAPE, Conflict, Section, regex_problem, type_alone

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer but the head."""


InitLoraWeights = Literal[
    True,
    "gaussian",
    "orthogonal",
    "olora",
    "pissa",
    "pissa_niter_4",
    "pissa_niter_8",
    "pissa_niter_16",
    "pissa_niter_32",
    "corda",
    "eva",
    "loftq",
]
"""Initial weights of an adapter, by PEFT's names."""


def layer_of(name: str) -> int | None:
    """Return the number of the layer of a module or parameter, the first number in its name; None outside of layers."""
    match = re.search(r"\.(\d+)\.", name)
    return None if match is None else int(match[1])


def is_any_of(name: str, endings: Iterable[str]) -> bool:
    """Return whether a module's name is one of several, or ends in one of them behind a dot."""
    return any(f".{name}".endswith(f".{ending}") for ending in endings)


def pattern_of(patterns: Iterable[str], name: str) -> str | None:
    """Return the first of several patterns that matches the end of a module's name."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", name)), None)


class FullAdapter(Section):
    """Full fine-tuning of all parameters, or of a part of them."""

    shorthand = "type"

    type: Literal["full"] = "full"
    """Full fine-tuning."""

    last_layers: Annotated[int, Field(gt=0)] | None = None
    """Train this number of last decoder layers and the parameters of `unfrozen_parameters`; freeze the rest. Default:
    train all parameters."""

    unfrozen_parameters: Annotated[list[str], Field(min_length=1)] | None = None
    """Train the parameters whose names contain a match of one of these regular expressions, such as `lm_head` or
    `layers\\.(30|31)\\.mlp`, and `last_layers`; freeze the rest, which stays in float32."""

    new_layers: Annotated[int, Field(gt=0)] | None = None
    """Insert this number of copied decoder layers, evenly spaced and initialized as identities, and train only these
    (LLaMA Pro, arXiv 2401.02415). Must divide the number of layers; the saved model includes them. Default: none."""

    vision_tower: Literal["frozen", "full"] = "frozen"
    """For rows with images: `full` trains the vision tower too, without its projector."""

    projector: Literal["frozen", "full"] = "frozen"
    """For rows with images: `full` trains what projects the vision tower's outputs to the language model's inputs."""

    language_model: Literal["frozen", "full"] = "full"
    """`frozen` trains only the vision tower or projector, as in LLaVA's first stage (arXiv 2304.08485)."""

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield patterns that are no regular expressions, parts beside new layers, and a model all frozen."""
        if self.language_model == "frozen":
            if self.vision_tower == self.projector == "frozen":
                what = "nothing is trained: vision_tower and projector are frozen too"
                yield Conflict(("language_model",), what, "set projector=full")
            for name in ("last_layers", "unfrozen_parameters", "new_layers"):
                if dict(self)[name] is not None:
                    yield Conflict((name,), "mutually exclusive with language_model=frozen", "unset one of them")
        for name in ("last_layers", "unfrozen_parameters"):
            if self.new_layers is not None and dict(self)[name] is not None:
                what = "mutually exclusive with new_layers: only the new layers are trained"
                yield Conflict((name,), what, "unset one of them")
        for number, pattern in enumerate(self.unfrozen_parameters or ()):
            if (problem := regex_problem(pattern)) is not None:
                yield Conflict(("unfrozen_parameters", number), problem, ESCAPE)

    @property
    def is_partial(self) -> bool:
        """True if some parameters of the language model are frozen."""
        parts = (self.last_layers, self.unfrozen_parameters, self.new_layers)
        return self.language_model == "frozen" or any(part is not None for part in parts)

    def training_of(self, part: str) -> str:
        """Return how a part of a model that text does not pass through is trained: `frozen` or `full`."""
        trained = {"vision_tower": self.vision_tower, "projector": self.projector}
        return trained.get(part, "frozen")

    @property
    def of_text(self) -> Self:
        """The section of the text decoder alone."""
        return self.model_copy(update={"vision_tower": "frozen", "projector": "frozen"})

    def is_new(self, layer: int, num_layers: int) -> bool:
        """Return whether a layer is a new one: the last of each of as many groups.

        Args:
            layer: Its number.
            num_layers: Decoder layers of the model, the new ones included.
        """
        return self.new_layers is not None and (layer + 1) % (num_layers // self.new_layers) == 0

    def trains(self, name: str, num_layers: int) -> bool:
        """Return whether a parameter is trained.

        Args:
            name: Its name in the model.
            num_layers: Decoder layers of the model.
        """
        layer = layer_of(name)
        if layer is not None and self.is_new(layer, num_layers):
            return True
        if self.last_layers is not None and layer is not None and layer >= num_layers - self.last_layers:
            return True
        return not self.is_partial or any(re.search(pattern, name) for pattern in self.unfrozen_parameters or ())


Shape = tuple[int, ...]


class PeftAdapter(Section):
    """Adapters of PEFT on frozen weights.

    Which modules get one follows PEFT's rules for names alone. A list matches the ends of names, part by part; a
    regular expression matches a whole name. A layer's number is the first number in a name.
    """

    shorthand = "type"
    adapts_experts: ClassVar[bool] = False
    """True if fused experts and routers get adapters too, by the names of their former linear layers."""
    times_rate_of_lora: ClassVar[int] = 1
    """Default learning rate as a multiple of LoRA's."""
    takes_full_rate: ClassVar[bool] = False
    """True if the default learning rate is that of full fine-tuning instead."""

    type: str
    """Kind of adapter."""

    target_modules: Literal["all-linear"] | str | list[str] = "all-linear"
    """Modules to adapt: `all-linear` (every linear layer except the LM head), a list of name suffixes such as
    [q_proj, v_proj], or a regular expression that matches whole names of linear layers."""

    exclude_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Modules of `target_modules` to exclude, by name suffixes such as [down_proj, layers.0.self_attn.q_proj]."""

    layers_to_transform: Annotated[list[int], Field(min_length=1)] | None = None
    """Indices of the decoder layers to adapt, from 0. Default: all."""

    modules_to_save: list[str] | None = None
    """Modules to train in full and save with the adapter, such as [embed_tokens, lm_head]."""

    def training_of(self, part: str) -> str:
        """Return how a part of a model that text does not pass through is trained: `frozen` or `lora`."""
        return str(dict(self).get(part, "frozen"))

    @property
    def of_text(self) -> Self:
        """The section of the text decoder alone."""
        return self

    @field_validator("target_modules", "rank_pattern", "alpha_pattern", check_fields=False)
    @classmethod
    def _compiles(cls, value: Any) -> Any:
        for pattern in [value] if isinstance(value, str) else value if isinstance(value, dict) else []:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None
        return value

    def _conflicts_within(self) -> Iterator[Conflict]:
        if self.layers_to_transform and self.target_regex is not None:
            what = "does not apply to a regular expression in target_modules"
            yield Conflict(("layers_to_transform",), what, "select the layers in the expression")

    def targets(self, name: str) -> bool:
        """Return whether a linear layer gets an adapter, as far as that depends on its name."""
        if is_any_of(name, self.exclude_modules or ()):
            return False
        targets = self.target_modules
        if self.target_regex is not None:
            return re.fullmatch(self.target_regex, name) is not None
        if targets != ALL_LINEAR and name in targets:
            return True
        is_named = targets == ALL_LINEAR or is_any_of(name, targets)
        return is_named and (self.layers_to_transform is None or layer_of(name) in self.layers_to_transform)

    def rank_of(self, name: str) -> int:
        """Return the rank of a module's adapter; 0 where that is no product of two trained matrices."""
        return 0

    def ranks_of(self, sizes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """Return the ranks of adapters by module.

        Args:
            sizes: Outputs and inputs of all modules that get one.
        """
        return {name: self.rank_of(name) for name in sizes}

    def doubles_rank(self, name: str) -> bool:
        """Return whether a tensor of fused experts gets twice the rank, since it is two of their former layers."""
        return name.endswith("gate_up_proj")

    def shapes_of(self, name: str, outputs: int, inputs: int) -> dict[str, Shape]:
        """Return the shapes of what is trained of a linear layer, by PEFT's name for it.

        Args:
            name: Name of the layer.
            outputs: Its outputs.
            inputs: Its inputs.
        """
        raise NotImplementedError

    @property
    def words(self) -> str:
        """Kind and sizes as a plan states them."""
        raise NotImplementedError

    @property
    def splits_base(self) -> bool:
        """True if adapters begin with parts of the base weights."""
        return False

    @property
    def as_saved(self) -> Self:
        """The section of the adapter that is saved."""
        return self

    def saved_after(self, num_steps: int | None) -> Self:
        """Return the section of the adapter that is saved after a number of steps; None where that is not known."""
        return self.as_saved

    @property
    def chooses_by_name(self) -> bool:
        """True if modules are chosen or ranked by more than their last names."""
        return bool(self.target_regex or self.exclude_modules or self.layers_to_transform)

    @property
    def target_regex(self) -> str | None:
        """The regular expression in `target_modules`; None where it is something else."""
        targets = self.target_modules
        return targets if isinstance(targets, str) and targets != ALL_LINEAR else None


class ReloraSection(Section):
    """Restarts of a LoRA adapter: it is merged into the base weights and begins anew (ReLoRA, arXiv 2307.05695)."""

    steps: Annotated[int, Field(gt=0)]
    """Optimizer steps between restarts."""

    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps over which the learning rate rises from 0 to that of the schedule after a restart."""

    prune_ratio: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of the adapter's optimizer states, those of the smallest magnitude, that a restart sets to 0."""

    def _conflicts_within(self) -> Iterator[Conflict]:
        if self.warmup_steps >= self.steps:
            what = f"must be less than steps, got {self.warmup_steps} and {self.steps}"
            yield Conflict(("warmup_steps",), what, "lower it")

    def num_restarts(self, num_steps: int) -> int:
        """Return the number of restarts in a run: none after its last step.

        Args:
            num_steps: Optimizer steps of the run.
        """
        return (num_steps - 1) // self.steps


class LoraAdapter(PeftAdapter):
    """Low-rank adapters on frozen weights (LoRA, arXiv 2106.09685)."""

    adapts_experts = True

    type: Literal["lora"] = "lora"
    """Low-rank adaptation. A quantized base model is dequantized."""

    rank: Annotated[int, Field(gt=0)] = 16
    """Rank of the update matrices; their size grows with it."""

    alpha: Annotated[float, Field(gt=0)] = 32
    """Scaling: the update is multiplied by alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter input. Above 0 it costs activation memory."""

    rank_pattern: dict[str, Annotated[int, Field(gt=0)]] | None = None
    """Ranks of single modules, by name suffix or a regular expression for it, such as {q_proj: 8,
    "layers.0.mlp.up_proj": 32}. The first match counts; all other modules have `rank`."""

    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """Alphas of single modules, by keys as in `rank_pattern`."""

    init_lora_weights: InitLoraWeights = True
    """Initialization of matrices A and B: `true` (Kaiming-uniform and zero), `gaussian` (and zero), `orthogonal` to
    each other, `eva` (principal components of a module's inputs, and zero; arXiv 2410.07170), `loftq` (for `qlora`: the
    quantization error of the weights; arXiv 2310.08659), or parts of the base weights, which are then frozen without
    them: `olora` by QR (arXiv 2406.01775), `pissa` by SVD (arXiv 2404.02948), `pissa_niter_16` by a faster SVD of 16
    iterations, `corda` by SVD weighted by a module's inputs (arXiv 2406.05223). Such adapters are saved as plain LoRA
    of twice the rank, for the original base."""

    num_init_rows: Annotated[int, Field(gt=0)] = 256
    """Number of training rows, sampled by `train.seed`, from which `eva` and `corda` collect the inputs of modules."""

    corda_method: Literal["ipm", "kpm"] = "ipm"
    """Components that `corda` trains: the largest for the sampled rows (`ipm`, instruction-previewed), or the smallest,
    which preserves the model's knowledge of them (`kpm`, knowledge-preserved)."""

    rho: Annotated[float, Field(ge=1)] = 2.0
    """Maximum rank of a module with `eva`, as a multiple of `rank`: ranks are redistributed by explained variance of
    the inputs, with the same sum. 1: all ranks stay equal."""

    use_rslora: bool = False
    """Rank-stabilized scaling (arXiv 2312.03732)."""

    use_dora: bool = False
    """Weight-decomposed adaptation, DoRA (arXiv 2402.09353)."""

    lora_bias: bool = False
    """Train a bias for each matrix B. It can be merged only into layers with a bias."""

    target_parameters: Annotated[list[str], Field(min_length=1)] | None = None
    """Matrices of fused experts to adapt besides `target_modules`, which may then be empty, by name suffixes such as
    [experts.gate_up_proj, experts.down_proj]. Each expert gets its own adapter, all of the same rank."""

    trainable_token_indices: Annotated[list[int], Field(min_length=1)] | None = None
    """IDs of tokens whose embedding and head rows are trained with the adapter, such as chat template tokens that the
    base model was not trained on. Tokens that the recipe adds are always trained."""

    loraplus_lr_ratio: Annotated[float, Field(ge=1)] | None = None
    """Ratio of the learning rate of matrices B, and of vectors, to that of the other parameters (LoRA+, arXiv
    2402.12354). Default: the same rate for all."""

    vision_tower: Literal["frozen", "lora"] = "frozen"
    """For rows with images: `lora` also adapts the linear layers of the vision tower that `target_modules` names."""

    projector: Literal["frozen", "lora"] = "frozen"
    """For rows with images: `lora` also adapts what projects the vision tower's outputs to the language model's inputs.
    To train a projector in full, name it in `modules_to_save`."""

    relora: ReloraSection | None = None
    """Merge the adapter into the base weights every `steps` and restart it, so that the sum of updates has a high rank
    (ReLoRA, arXiv 2307.05695). The result is plain LoRA for the original base, whose rank grows with each restart.
    Default: none."""

    @property
    def of_text(self) -> Self:
        """The section of the text decoder alone."""
        return self.model_copy(update={"vision_tower": "frozen", "projector": "frozen"})

    @property
    def splits_base(self) -> bool:
        """True if adapters begin with parts of the base weights."""
        start = self.init_lora_weights
        return isinstance(start, str) and start.startswith(("pissa", "olora", "corda"))

    @property
    def moves_base(self) -> bool:
        """True if a run changes the base weights, and what is saved is an adapter for them as they were."""
        return self.splits_base or self.relora is not None

    @property
    def sees_rows(self) -> bool:
        """True if initial matrices are computed from training rows."""
        return self.init_lora_weights in ("corda", "eva")

    @property
    def needs_sources(self) -> bool:
        """True if initial matrices are computed from more than the base weights as they are loaded."""
        return self.sees_rows or self.is_of_4bit_base

    @property
    def is_of_4bit_base(self) -> bool:
        """True if the adapter makes up for what 4 bits lose, and so applies to no other base."""
        return self.init_lora_weights == "loftq"

    @property
    def distributes_ranks(self) -> bool:
        """True if training rows decide on the ranks of modules."""
        return self.init_lora_weights == "eva" and self.rho > 1

    @property
    def as_saved(self) -> Self:
        """The section of the adapter that is saved, as far as a recipe tells it.

        Where parts of the base weights were taken out, what is saved is plain LoRA of twice the rank: the trained
        matrices beside the initial ones, which it subtracts. Alpha grows so that the scale stays. Ranks that rows or
        restarts decide on stand in the folder, and a base in 4 bits is part of what an adapter of `loftq` is.
        """
        if self.distributes_ranks or self.is_of_4bit_base:
            return self
        return self.of_times_the_rank(2 if self.splits_base else 1)

    def saved_after(self, num_steps: int | None) -> Self:
        """Return the section of the adapter that is saved after a number of steps; None where that is not known."""
        if self.relora is None or num_steps is None:
            return self.as_saved
        return self.of_times_the_rank(1 + self.relora.num_restarts(num_steps))

    def of_times_the_rank(self, times: int) -> Self:
        """Return the section of plain LoRA of a multiple of the rank, with the same scale.

        Args:
            times: The multiple.
        """
        scale = math.sqrt(times) if self.use_rslora else times
        update: dict[str, Any] = {"rank": times * self.rank, "alpha": scale * self.alpha}
        if self.rank_pattern:
            update["rank_pattern"] = {name: times * rank for name, rank in self.rank_pattern.items()}
        if self.alpha_pattern:
            update["alpha_pattern"] = {name: scale * alpha for name, alpha in self.alpha_pattern.items()}
        return self.model_copy(update={"init_lora_weights": True, "relora": None, **_UNREAD, **update})

    def _conflicts_within(self) -> Iterator[Conflict]:
        yield from super()._conflicts_within()
        if self.lora_bias and self.use_dora:
            yield Conflict(("lora_bias",), "unsupported by PEFT with use_dora", "unset one of them")
        if self.lora_bias and self.init_lora_weights is not True:
            what = f"unsupported by PEFT with init_lora_weights {self.init_lora_weights}"
            yield Conflict(("lora_bias",), what, "unset one of them")
        if self.target_parameters:
            plain = self.init_lora_weights in (True, "gaussian")
            refused = {"dropout": self.dropout > 0, "use_dora": self.use_dora, "lora_bias": self.lora_bias}
            for name in [name for name, is_set in {**refused, "init_lora_weights": not plain}.items() if is_set]:
                yield Conflict((name,), "unsupported by PEFT with target_parameters", "unset one of them")
        adapts_towers = "lora" in (self.vision_tower, self.projector)
        if adapts_towers and self.init_lora_weights not in (True, "gaussian"):
            what = f"initial matrices of {self.init_lora_weights} are unsupported in towers"
            yield Conflict(("init_lora_weights",), what, "unset it, vision_tower and projector")
        for name in ("layers_to_transform", "relora"):
            if adapts_towers and dict(self)[name]:
                yield Conflict((name,), "unsupported with adapters in towers", "unset it, vision_tower and projector")
        if self.relora is not None:
            is_kept = self.init_lora_weights not in (True, "gaussian")
            for name in ("use_dora", "lora_bias", "target_parameters", *["init_lora_weights"] * is_kept):
                if dict(self)[name]:
                    yield Conflict((name,), "unsupported with relora, which merges plain LoRA", "unset one of them")
        for name, starts in _READ_BY.items():
            if dict(self)[name] != _UNREAD[name] and self.init_lora_weights not in starts:
                yield Conflict((name,), f"has no effect without init_lora_weights {' or '.join(starts)}", "unset it")
        if len(set(self.trainable_token_indices or ())) < len(self.trainable_token_indices or ()):
            yield Conflict(("trainable_token_indices",), "contains an ID twice", "remove it")

    @property
    def chooses_by_name(self) -> bool:
        """True if modules are chosen or ranked by more than their last names."""
        return super().chooses_by_name or bool(self.rank_pattern or self.target_parameters)

    def doubles_rank(self, name: str) -> bool:
        """Return whether a tensor of fused experts gets twice the rank: not where it is named itself."""
        return super().doubles_rank(name) and not self.targets_parameter(name)

    def targets_parameter(self, name: str) -> bool:
        """Return whether a parameter that is no module's weight gets an adapter by its own name."""
        return is_any_of(name, self.target_parameters or ())

    def rank_of(self, name: str) -> int:
        """Return the rank of a module's adapter."""
        patterns = self.rank_pattern or {}
        pattern = pattern_of(patterns, name)
        return self.rank if pattern is None else patterns[pattern]

    def ranks_of(self, sizes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """Return the ranks of adapters by module; where rows distribute them, so that the largest modules have most.

        No other distribution has more parameters.
        """
        if not self.distributes_ranks:
            return super().ranks_of(sizes)
        available, most, ranks = self.rank * len(sizes), round(self.rank * self.rho), dict.fromkeys(sizes, 0)
        for name in sorted(sizes, key=lambda name: -sum(sizes[name])):
            ranks[name] = min(most, available)
            available -= ranks[name]
        return ranks

    def shapes_of(self, name: str, outputs: int, inputs: int) -> dict[str, Shape]:
        """Return the shapes of the two matrices (section 4.1), and of DoRA's magnitudes (arXiv 2402.09353)."""
        rank = self.rank_of(name)
        shapes: dict[str, Shape] = {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}
        shapes |= {"lora_magnitude_vector": (outputs,)} if self.use_dora else {}
        return shapes | ({"lora_B_bias": (outputs,)} if self.lora_bias else {})

    @property
    def words(self) -> str:
        """Kind and sizes as a plan states them."""
        return f"{self.type}, rank {self.rank}, alpha {self.alpha:g}"


_READ_BY = {"num_init_rows": ("corda", "eva"), "corda_method": ("corda",), "rho": ("eva",)}
"""Fields that only some values of `init_lora_weights` read, and which."""

_UNREAD = {name: LoraAdapter.model_fields[name].default for name in _READ_BY}


class QloraAdapter(LoraAdapter):
    """LoRA on a base model quantized to 4 bits by bitsandbytes (QLoRA, arXiv 2305.14314) or to 8, or as published."""

    type: Literal["qlora"] = "qlora"  # type: ignore[assignment]
    """LoRA on a 4-bit base model. A base published in GPTQ, AWQ, MXFP4 or bitsandbytes' 4 or 8 bits keeps its
    format."""

    quant_type: Literal["nf4", "fp4", "int8"] = "nf4"
    """Data type of the base weights: 4 bits (`nf4`, `fp4`), or `int8`: 8 bits with a scale for each output of a linear
    layer, as LLM.int8() stores them (arXiv 2208.07339), here with unquantized activations."""

    double_quant: bool = True
    """Quantize the quantization constants of 4 bits too: saves about 0.05 bytes per weight."""

    @property
    def bits(self) -> int:
        """Bits of a weight that is quantized as it is loaded."""
        return 8 if self.quant_type == "int8" else 4

    def _conflicts_within(self) -> Iterator[Conflict]:
        yield from super()._conflicts_within()
        if self.bits == 8 and self.is_of_4bit_base:
            yield Conflict(("init_lora_weights",), "loftq is for 4-bit quant_types", "use gaussian, or unset it")
        if self.relora is not None:
            yield Conflict(("relora",), "merges into weights that are not quantized", "set adapter.type=lora")


class Ia3Adapter(PeftAdapter):
    """Learned factors of the outputs or inputs of linear layers ((IA)3, arXiv 2205.05638)."""

    times_rate_of_lora = 10  # The paper trains with 3e-3.

    type: Literal["ia3"] = "ia3"
    """Learned scaling of activations, (IA)^3 (arXiv 2205.05638)."""

    feedforward_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Adapted modules whose inputs are scaled instead of their outputs, by name suffixes such as [down_proj]."""

    def shapes_of(self, name: str, outputs: int, inputs: int) -> dict[str, Shape]:
        """Return the shape of the factors of a layer."""
        return {"ia3_l": (1, inputs) if self.scales_input(name) else (outputs, 1)}

    def scales_input(self, name: str) -> bool:
        """Return whether the inputs of a layer are multiplied."""
        return is_any_of(name, self.feedforward_modules or ())

    @property
    def words(self) -> str:
        """Kind and sizes as a plan states them."""
        inputs = f", inputs of {', '.join(self.feedforward_modules)}" if self.feedforward_modules else ""
        return f"{self.type}, scales outputs{inputs}"


class VeraAdapter(PeftAdapter):
    """Trained vectors around two random matrices that all layers share (VeRA, arXiv 2310.11454)."""

    times_rate_of_lora = 10  # A choice by analogy with (IA)3, whose vectors are scales too.

    type: Literal["vera"] = "vera"
    """VeRA: trained scaling vectors around shared random matrices (arXiv 2310.11454)."""

    rank: Annotated[int, Field(gt=0)] = 256
    """Rank of the two random matrices. A layer trains this number of values, plus one per output."""

    d_initial: Annotated[float, Field(gt=0)] = 0.1
    """Initial scaling values between the two matrices. Those of the outputs start at 0."""

    projection_prng_key: Annotated[int, Field(ge=0)] = 0
    """Seed of the random matrices, which are saved with the adapter."""

    def shapes_of(self, name: str, outputs: int, inputs: int) -> dict[str, Shape]:
        """Return the shapes of the two vectors of a layer."""
        return {"vera_lambda_b": (outputs,), "vera_lambda_d": (self.rank,)}

    @property
    def words(self) -> str:
        """Kind and sizes as a plan states them."""
        return f"{self.type}, rank {self.rank}"


class OftAdapter(PeftAdapter):
    """Rotations of the inputs of linear layers, block by block (OFT, arXiv 2306.07280, and OFTv2, arXiv 2506.19847)."""

    type: Literal["oft"] = "oft"
    """Orthogonal fine-tuning."""

    oft_block_size: Annotated[int, Field(gt=1)] = 32
    """Number of inputs rotated together. Must divide the input size of every adapted layer."""

    block_share: bool = False
    """Share one rotation among all blocks of a layer."""

    def shapes_of(self, name: str, outputs: int, inputs: int) -> dict[str, Shape]:
        """Return the shape of the values above the diagonal of the skew-symmetric matrix of each block."""
        size = self.oft_block_size
        return {"oft_R": (1 if self.block_share else inputs // size, size * (size - 1) // 2)}

    @property
    def words(self) -> str:
        """Kind and sizes as a plan states them."""
        return f"{self.type}, {'shared ' if self.block_share else ''}blocks of {self.oft_block_size}"


class MissAdapter(PeftAdapter):
    """One trained matrix per linear layer, which is added to each of the blocks of its weight (arXiv 2409.15371)."""

    takes_full_rate = True  # A step of AdamW moves each weight by the rate, as in full fine-tuning; PEFT's guide: 2e-5.

    type: Literal["miss"] = "miss"
    """MiSS, formerly Bone: one matrix per layer, shared by all blocks of its weight (arXiv 2409.15371)."""

    rank: Annotated[int, Field(gt=0)] = 64
    """Inputs of a block, and rows of the trained matrix."""

    def shapes_of(self, name: str, outputs: int, inputs: int) -> dict[str, Shape]:
        """Return the shape of the matrix of a layer."""
        return {"miss_block": (self.rank, outputs)}

    @property
    def words(self) -> str:
        """Kind and sizes as a plan states them."""
        return f"{self.type}, rank {self.rank}"


class AdaloraAdapter(PeftAdapter):
    """Low-rank updates among which a run distributes ranks by importance (AdaLoRA, arXiv 2303.10512)."""

    type: Literal["adalora"] = "adalora"
    """AdaLoRA: LoRA that reallocates ranks during training (arXiv 2303.10512)."""

    init_r: Annotated[int, Field(gt=1)] = 12
    """Initial rank of each module. Memory is used for this rank throughout."""

    target_r: Annotated[int, Field(gt=0)] = 8
    """Target average rank per module."""

    alpha: Annotated[float, Field(gt=0)] = 24
    """Scaling: the update is multiplied by alpha / `init_r`."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter input. Above 0 it costs activation memory."""

    tinit: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps before ranks start to decrease."""

    tfinal: Annotated[int, Field(ge=0)] = 0
    """Final optimizer steps with fixed ranks."""

    deltaT: Annotated[int, Field(gt=0)] = 1
    """Optimizer steps between reallocations of ranks."""

    beta1: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Decay of the moving average of a weight's importance."""

    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Decay of the moving average of that importance's uncertainty."""

    orth_reg_weight: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the orthogonality penalty, which is part of the logged loss."""

    def _conflicts_within(self) -> Iterator[Conflict]:
        yield from super()._conflicts_within()
        if self.target_r >= self.init_r:
            yield Conflict(
                ("target_r",), f"must be less than init_r, got {self.target_r} and {self.init_r}", "lower it"
            )

    def rank_of(self, name: str) -> int:
        """Return the rank of a module's adapter before ranks are distributed."""
        return self.init_r

    def shapes_of(self, name: str, outputs: int, inputs: int) -> dict[str, Shape]:
        """Return the shapes of directions and values of a layer (section 3.1)."""
        return {"lora_A": (self.init_r, inputs), "lora_E": (self.init_r, 1), "lora_B": (outputs, self.init_r)}

    @property
    def words(self) -> str:
        """Kind and sizes as a plan states them."""
        return f"{self.type}, rank {self.init_r} to {self.target_r} on average, alpha {self.alpha:g}"


class PromptTuningAdapter(PeftAdapter):
    """Trained embeddings before each row, in a model that stays as it is (prompt tuning, arXiv 2104.08691)."""

    times_rate_of_lora = 100  # Near the 3e-2 of PEFT's guide; the paper takes 0.3, with Adafactor.
    # No module is adapted.
    target_modules: ClassVar[Any] = ()  # type: ignore[misc]
    exclude_modules: ClassVar[Any] = None  # type: ignore[misc]
    layers_to_transform: ClassVar[Any] = None  # type: ignore[misc]
    modules_to_save: ClassVar[Any] = None  # type: ignore[misc]

    type: Literal["prompt_tuning"] = "prompt_tuning"
    """Prompt tuning: trained embeddings of virtual tokens before each row (arXiv 2104.08691)."""

    num_virtual_tokens: Annotated[int, Field(gt=0)] = 20
    """Number of virtual tokens. They take positions of the model besides `data.max_length`. Beyond 20 the paper gains
    little (section 3.2)."""

    prompt_tuning_init: Literal["SAMPLE_VOCAB", "RANDOM", "TEXT"] = "SAMPLE_VOCAB"
    """Initial embeddings: those of tokens sampled from the vocabulary (`SAMPLE_VOCAB`), of `prompt_tuning_init_text`
    (`TEXT`), or of a normal distribution (`RANDOM`), which the paper finds worst for all but the largest models."""

    prompt_tuning_init_text: str | None = None
    """Text for `TEXT`, such as a description of the task. Its tokens are repeated or cut to `num_virtual_tokens`."""

    def _conflicts_within(self) -> Iterator[Conflict]:
        if (self.prompt_tuning_init == "TEXT") == bool(self.prompt_tuning_init_text):
            return
        if self.prompt_tuning_init == "TEXT":
            yield Conflict(("prompt_tuning_init_text",), "required with prompt_tuning_init TEXT", "set it")
        else:
            what = "has no effect without prompt_tuning_init TEXT"
            yield Conflict(("prompt_tuning_init_text",), what, "unset it, or set prompt_tuning_init=TEXT")

    @property
    def words(self) -> str:
        """Kind and sizes as a plan states them."""
        return f"{self.type}, {self.num_virtual_tokens} virtual tokens from {self.prompt_tuning_init}"


def num_virtual_tokens(adapter: "Adapter") -> int:
    """Return the number of positions that an adapter puts before each row."""
    return adapter.num_virtual_tokens if isinstance(adapter, PromptTuningAdapter) else 0


_Peft = (
    LoraAdapter
    | QloraAdapter
    | Ia3Adapter
    | VeraAdapter
    | OftAdapter
    | MissAdapter
    | AdaloraAdapter
    | PromptTuningAdapter
)
Adapter = Annotated[FullAdapter | _Peft, Field(discriminator="type"), BeforeValidator(type_alone)]
"""What is trained, told apart by `adapter.type`. `adapter: qlora` is short for `adapter: {type: qlora}`."""

AnyPeftAdapter = Annotated[_Peft, Field(discriminator="type")]
"""The adapters among them."""
