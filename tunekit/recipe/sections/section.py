"""Base of a recipe's sections, and the sections on training, devices and output.

Every section is closed, frozen, strictly typed, and described by the strings under its fields. Three stand here:
how a model is trained (how long, how fast, in which steps, and what is kept), how a run is spread over devices and what
is done when one of them fails, and where a run is written and which trackers get its figures.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NewType, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tunekit.recipe.reading.parse import Key, dotted

TAG = "type"
"""The key by which the variants of a section are told apart."""

EXPANDS_ENV = {"expands_env": True}
"""Marks the string fields in which `${NAME}` stands for an environment variable, and a leading `~` for the home
folder. Elsewhere `${NAME}` is refused."""

FUNCTION_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
"""Pattern of the path of a function: `my_package.my_module:my_function`."""

FunctionPath = NewType("FunctionPath", str)
"""A function of the user's own, `module:function`. It is looked up when the recipe is loaded."""


_OwnFunction = Annotated[FunctionPath, Field(pattern=FUNCTION_PATTERN)]


class Conflict(NamedTuple):
    """A field that does not go together with others."""

    key: Key
    """The field, below the section that refuses it."""

    what: str
    hint: str


class Conflicts(ValueError):
    """Fields that are right one by one and do not go together: a section raises it, and readers find its places."""

    def __init__(self, found: list[Conflict]) -> None:
        self.found = found
        super().__init__("\n".join(f"{dotted(item.key)}: {item.what}; {item.hint}" for item in found))


class Section(BaseModel):
    """A part of a recipe: closed, frozen, strictly typed, described by the strings under its fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    shorthand: ClassVar[str | None] = None
    """The key that a lone string in place of the section sets: `model: pico` means `model: {path: pico}`."""

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        return {cls.shorthand: value} if isinstance(value, str) and cls.shorthand else value

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        conflicts = list(self._conflicts_within())
        if conflicts:
            raise Conflicts(conflicts)
        return self

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield the fields that do not go together with others of the section."""
        yield from ()


def from_word(sections: Sequence[type[Section]], word: str) -> dict[str, Any] | None:
    """Return the section that a lone word abbreviates; None where a word cannot stand for one.

    Among variants it is the name of one; with a colon it is `module:function` if one of them takes that.
    """
    shorthands = {section.shorthand: section for section in sections if section.shorthand is not None}
    name = TAG if TAG in shorthands else next(iter(shorthands), None)
    if name == TAG and ":" in word and len(shorthands) > 1:
        return next(
            {TAG: section.model_fields[TAG].default, other: word}
            for other, section in shorthands.items()
            if other != TAG
        )
    return {name: word} if name is not None else None


ESCAPE = "escape special characters with a backslash"
"""Remedy for what is no regular expression."""


def regex_problem(pattern: str) -> str | None:
    """Return why a pattern is no regular expression; None if it is one."""
    try:
        re.compile(pattern)
    except re.error as error:
        return f"{pattern!r} is not a valid regular expression: {error}"
    return None


def alone_in_list(value: Any) -> Any:
    """A list of which the only item is given by itself, written out."""
    return [value] if isinstance(value, str) else value


def type_alone(value: Any) -> Any:
    """A variant given by its name alone, written out."""
    return {"type": value} if isinstance(value, str) else value


METRIC_PATTERN = r"^eval_[\w/.-]+$"
"""Pattern of the name of an evaluation metric."""

_TorchOptim = Literal["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "ademamix"]
_BnbOptim = Literal["ademamix_8bit", "adamw_8bit", "adamw_bnb_8bit", "lion_32bit", "lion_8bit"]
_PagedAdam = Literal["paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"]
_PagedLion = Literal["paged_lion_32bit", "paged_lion_8bit"]
_Rmsprop = Literal["rmsprop_bnb", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit"]
_OurOptim = Literal["tunekit_adamw", "tunekit_adamw_8bit", "tunekit_adamw_4bit", "muon", "adam_mini"]
_AverageOptim = Literal["schedule_free_adamw"]
LowRankOptim = Literal["galore_adamw", "apollo_adamw"]
Optim = Literal[_TorchOptim, _BnbOptim, _PagedAdam, _PagedLion, _Rmsprop, _AverageOptim, LowRankOptim, _OurOptim]

BLOCK_OPTIMS: dict[Optim, int] = {"tunekit_adamw_8bit": 8, "tunekit_adamw_4bit": 4}
"""Optimizers whose states are in blocks of what a device holds of a weight, and the bits of these."""

STOCHASTIC_OPTIMS: frozenset[Optim] = frozenset[Optim]({"tunekit_adamw"}) | BLOCK_OPTIMS.keys()
"""Optimizers that round weights in bfloat16 stochastically (`tunekit.kernels.adamw`)."""

LOW_RANK_OPTIMS: frozenset[Optim] = frozenset(get_args(LowRankOptim))
"""Optimizers whose states of matrices have a low rank (`tunekit.kernels.low_rank`)."""

OUR_OPTIMS: frozenset[Optim] = STOCHASTIC_OPTIMS | LOW_RANK_OPTIMS | {"muon", "adam_mini"}
"""Optimizers that tunekit makes, and not transformers."""

_Decay = Literal["linear", "cosine", "cosine_with_restarts", "polynomial"]
_Constant = Literal["constant", "constant_with_warmup", "inverse_sqrt"]
_WithKwargs = Literal["cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"]
LrSchedulerType = Literal[_Decay, _Constant, _WithKwargs]

ONE_LENGTH = ("num_epochs", "max_steps")
"""The two ways to say how long to train: a recipe gives at most one of them."""


class LowRank(NamedTuple):
    """Matrices whose states have a low rank, and which states."""

    optim: Optim
    rank: int
    update_proj_gap: int
    target_modules: tuple[str, ...] | None
    """Regular expressions found in the names of modules; None for all matrices of layers."""


class OptimArgs(Section):
    """Arguments of `galore_adamw` and `apollo_adamw`, by their transformers names."""

    rank: Annotated[int, Field(gt=0)] = 128
    """Rank of the states. Matrices whose smaller side is at most this rank have AdamW states."""

    update_proj_gap: Annotated[int, Field(gt=0)] = 200
    """Steps between updates of the projections."""

    scale: Annotated[float, Field(gt=0)] | None = None
    """Scale of GaLore's updates; APOLLO's are scaled by its square root. Default: 0.25 for galore_adamw, 1 for
    apollo_adamw."""

    scale_type: Literal["channel", "tensor"] = "channel"
    """Granularity at which apollo_adamw scales gradients: per channel, or per matrix (APOLLO-Mini, with `rank: 1` and
    `scale: 128`)."""


class QatSection(Section):
    """Quantization-aware training (QAT): linear layers compute with rounded weights, whose gradients pass unrounded."""

    weight_dtype: Literal["int4", "int8"] = "int4"
    """Type that weights are rounded to."""

    activation_dtype: Literal["int8"] | None = None
    """Type that the inputs of linear layers are rounded to, each token with its own scale. Default: unrounded."""

    group_size: Annotated[int, Field(gt=0)] | None = 32
    """Inputs of an output whose weights share a scale. null: all inputs."""

    @property
    def words(self) -> str:
        """Types and groups as a plan states them."""
        groups = "per output" if self.group_size is None else f"in groups of {self.group_size}"
        inputs = f", {self.activation_dtype} inputs" if self.activation_dtype else ""
        return f"{self.weight_dtype} weights {groups}{inputs}"


class TrainSection(Section):
    """Optimization: duration, batch size, learning rate, checkpoints."""

    num_epochs: Annotated[float, Field(gt=0)] | None = None
    """Number of epochs; 1 if neither this nor `max_steps` is set."""

    max_steps: Annotated[int, Field(gt=0)] | None = None
    """Number of optimizer steps, instead of `num_epochs`."""

    global_batch_size: Annotated[int, Field(gt=0)] = 16
    """Sequences per optimizer step, over all devices and micro-batches: rows for sft, pairs for preference methods,
    answers for kto and for methods that generate."""

    micro_batch_size: Annotated[int, Field(gt=0)] | None = None
    """Sequences per forward pass on one device. Default: the plan uses the largest that fits."""

    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate. Default by method, for full fine-tuning: 2e-5 for sft, gkd and gold, 1e-5 for reward, prm and
    classification, 5e-6 for orpo, 1e-6 for cpo, grpo, rloo, gmpo, ebft, distillation and sdft, 5e-7 for dpo, online_dpo
    and kto; ten times that for lora and qlora. The plan names the source."""

    learning_rates: Annotated[dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1)] | None = None
    """Peak learning rates by regular expressions found in parameter names, such as `{embed_tokens: 1e-5}`; the first
    match counts, and all other parameters have `learning_rate`. The schedule scales all of them."""

    layerwise_lr_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Factor on the learning rate per layer, from the top down: the last layer, norm and head have `learning_rate`, the
    embedding has the lowest. Default: none."""

    lr_scheduler_type: LrSchedulerType = "cosine"
    """Learning-rate schedule by its transformers name."""

    warmup_steps: Annotated[float, Field(ge=0)] = 0.03
    """Linear warm-up steps; below 1, a fraction of all steps."""

    optim: Optim | None = None
    """Optimizer by its transformers name, or `tunekit_adamw`, `tunekit_adamw_8bit` and `tunekit_adamw_4bit`: AdamW that
    rounds bfloat16 weights stochastically, with states in the type of the weights, in 8 bits or in the 4 bits of
    torchao's `AdamW4bit` (arXiv 2309.01507); or `muon`: Muon for matrices of layers
    and adapters, AdamW for embeddings, head and vectors, at AdamW's learning rate (arXiv 2502.16982). `galore_adamw`
    (arXiv 2403.03507) and `apollo_adamw` (arXiv 2412.05270) keep low-rank states, for full fine-tuning. `adam_mini`
    keeps one second moment for each head, row or vector (arXiv 2406.16793), for full fine-tuning. `schedule_free_adamw`
    averages weights instead of a schedule (arXiv 2405.15682): evaluations, checkpoints and the result use the average;
    it needs `lr_scheduler_type: constant`, and has its own warm-up. Default: `adamw_torch_fused`, or `tunekit_adamw`
    with `pure_bf16`."""

    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the trained weights, updated at each step, such as 0.999: evaluations,
    checkpoints and the result use the average. Default: none."""

    optim_args: OptimArgs | None = None
    """Arguments of `galore_adamw` and `apollo_adamw`. Default: those of transformers."""

    optim_target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Matrices with low-rank states for `galore_adamw` and `apollo_adamw`, by regular expressions found in their names;
    AdamW updates all other parameters. Default: all in decoder layers."""

    pure_bf16: bool = False
    """Keep trained weights, gradients and optimizer states in bfloat16 instead of float32: half the memory. For full
    fine-tuning, with the stochastic rounding of `tunekit_adamw`, or an optimizer named in `optim`."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""

    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum gradient norm for clipping."""

    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass to save memory. `auto`: only if they would not fit."""

    activation_offloading: Literal["auto"] | bool = "auto"
    """Keep the inputs of recomputed layers in pinned host memory until the backward pass, copied while other layers
    compute (TRL's, on one CUDA device). `auto`: only if long rows would not fit otherwise."""

    tiled_mlp: Literal["auto"] | bool = "auto"
    """Compute MLPs in tiles of tokens, and recompute them in the backward pass (arXiv 2506.13996). For sft of dense
    models on one device. `auto`: only if long rows would not fit otherwise."""

    torch_compile: Literal["auto"] | bool = "auto"
    """Compile each decoder layer with torch.compile. `auto`: if it is known to pay off, on CUDA for packed rows without
    fused kernels; the plan explains otherwise."""

    fp8: bool = False
    """Compute linear layers in 8-bit floating point (torchao). For full fine-tuning on Hopper or newer; refused
    elsewhere."""

    callbacks: Annotated[list[_OwnFunction], Field(min_length=1)] | None = None
    """Custom functions or classes, `module:name`, that return a `transformers.TrainerCallback` when called without
    arguments. Every process calls its events. Default: none."""

    qat: QatSection | None = None
    """Train for an export in few bits (torchao's QAT): sft with full fine-tuning, or LoRA on rounded weights; `tunekit
    export --quantized` writes the quantized model. Default: none."""

    seed: Annotated[int, Field(ge=0)] = 42
    """Random seed of adapter initialization, data order and dropout."""

    logging_steps: Annotated[int, Field(gt=0)] = 1
    """Steps between logged losses."""

    eval_steps: Annotated[int, Field(gt=0)] | None = None
    """Steps between evaluations. Default: four evaluations per run. With evaluation rows, a run always evaluates before
    the first and after the last step."""

    save_steps: Annotated[int, Field(gt=0)] | None = None
    """Steps between checkpoints. Default: four checkpoints per run."""

    save_total_limit: Annotated[int, Field(ge=2)] = 2
    """Number of checkpoints to keep: the newest, plus the best. At least two, in case one is damaged."""

    metric_for_best_model: Annotated[str, Field(pattern=METRIC_PATTERN)] | None = None
    """Evaluation metric that selects the best checkpoint, by its TRL name. Default: `eval_loss`; `eval_reward` for
    methods that learn from rewards; `eval_ebft/cfm_loss` for ebft."""

    greater_is_better: bool | None = None
    """True if a higher metric is better. Default: true, unless its name ends in `loss`."""

    early_stopping_patience: Annotated[int, Field(gt=0)] | None = None
    """Stop after this number of consecutive evaluations without improvement of `metric_for_best_model`. The result is
    the last step; the best checkpoint is kept too. Default: train to the end."""

    early_stopping_threshold: Annotated[float, Field(ge=0)] = 0.0
    """Difference from the best evaluation so far that an improvement must exceed, for `early_stopping_patience`."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """Action on a NaN or infinite loss or gradient, detected before weights change. `stop`: stop the run and name the
    rows. `skip`: skip the step. `rollback`: resume from the last checkpoint and skip the step when it comes again."""

    max_non_finite: Annotated[int, Field(gt=0)] = 3
    """Maximum number of steps to skip or roll back before the run stops."""

    retry_out_of_memory: bool = False
    """When memory runs out, restart once from the last checkpoint with half the micro-batch and the same global batch.
    Refused if the planned micro-batch is 1."""

    @property
    def optimizer(self) -> Optim:
        """The optimizer: the one given, or the default for the type of the trained weights."""
        return self.optim or ("tunekit_adamw" if self.pure_bf16 else "adamw_torch_fused")

    @property
    def averages(self) -> bool:
        """True if evaluations, checkpoints and the result are of an average of the trained weights."""
        return self.optimizer == "schedule_free_adamw" or self.ema_decay is not None

    @property
    def low_rank(self) -> LowRank | None:
        """Matrices whose states have a low rank; None with an optimizer that has none."""
        if self.optimizer not in LOW_RANK_OPTIMS:
            return None
        args, modules = self.optim_args or OptimArgs(), self.optim_target_modules
        return LowRank(self.optimizer, args.rank, args.update_proj_gap, None if modules is None else tuple(modules))

    @property
    def trained_dtype(self) -> Literal["float32", "bfloat16"]:
        """Data type of trained weights and their gradients."""
        return "bfloat16" if self.pure_bf16 else "float32"

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield settings without those that they belong to, and patterns that are no regular expressions."""
        for pattern in self.learning_rates or ():
            if (problem := regex_problem(pattern)) is not None:
                yield Conflict(("learning_rates", pattern), problem, ESCAPE)
        yield from self._conflicts_of_low_rank()
        if self.optimizer == "schedule_free_adamw":
            if self.lr_scheduler_type != "constant":
                what = (
                    f"{self.lr_scheduler_type} is unsupported with schedule_free_adamw, which averages weights instead"
                )
                yield Conflict(("lr_scheduler_type",), what, "set it to constant; warmup_steps still apply")
            if self.pure_bf16:
                what = (
                    "schedule_free_adamw switches between weights and their average, and bfloat16 rounds them each time"
                )
                yield Conflict(("pure_bf16",), what, "unset it, or use another optim")
        if self.ema_decay is not None:
            if self.optimizer == "schedule_free_adamw":
                yield Conflict(("ema_decay",), "schedule_free_adamw averages weights already", "unset one of them")
            if self.pure_bf16:
                what = "bfloat16 rounds off the update of an average"
                yield Conflict(("ema_decay",), what, "unset one of them")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            yield Conflict(
                ("early_stopping_threshold",), "requires early_stopping_patience", "set that too, or unset it"
            )
        if self.activation_offloading is True and self.gradient_checkpointing is False:
            what = "requires gradient_checkpointing: without it, more activations are kept than can be copied in time"
            yield Conflict(("activation_offloading",), what, "unset one of them")

    def _conflicts_of_low_rank(self) -> Iterator[Conflict]:
        """Yield settings of optimizers whose states have a low rank beside another one."""
        args, modules = self.optim_args, self.optim_target_modules
        for at, pattern in enumerate(modules or ()):
            if (problem := regex_problem(pattern)) is not None:
                yield Conflict(("optim_target_modules", at), problem, ESCAPE)
        if self.optimizer not in LOW_RANK_OPTIMS:
            for name, value in (("optim_args", args), ("optim_target_modules", modules)):
                if value is not None:
                    what = f"has no effect with {self.optimizer}"
                    yield Conflict((name,), what, "unset it, or set optim to galore_adamw or apollo_adamw")
        elif self.optimizer == "galore_adamw" and args is not None and args.scale_type != "channel":
            yield Conflict(("optim_args", "scale_type"), "has no effect with galore_adamw", "unset it")

    @model_validator(mode="after")
    def _one_length(self) -> "TrainSection":
        if self.num_epochs is not None and self.max_steps is not None:
            raise ValueError("num_epochs and max_steps are mutually exclusive; keep one of them")
        return self

    @model_validator(mode="after")
    def _something_to_halve(self) -> "TrainSection":
        if self.retry_out_of_memory and 1 in (self.micro_batch_size, self.global_batch_size):
            raise ValueError("retry_out_of_memory: a micro-batch of 1 cannot be halved; unset it")
        return self


Strategy = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
"""How devices work together: one alone, torch's DistributedDataParallel, its `fully_shard`, DeepSpeed's ZeRO by
its stage."""

Engine = Literal["accelerate", "automodel"]
"""Library that divides a model and runs its steps: Accelerate, or NeMo Automodel."""

OffloadDevice = Literal["none", "cpu", "nvme"]
"""Where something lies while the device does not need it: it stays, in main memory, or on a disk."""


class ParallelSection(Section):
    """Parallelism across devices; everything defaults to the plan's choice. Sizes have Accelerate's names."""

    engine: Engine = "accelerate"
    """`accelerate`, or `automodel` (NeMo Automodel: fsdp2 with pipeline and expert parallel; full fine-tuning by
    `method.type=sft`)."""

    strategy: Literal["auto"] | Strategy = "auto"
    """`single` (one device), `ddp`, `fsdp2`, or DeepSpeed's `zero1`, `zero2`, `zero3`. `auto`: the cheapest that fits;
    the plan explains why others were rejected."""

    num_processes: Annotated[int, Field(gt=0)] | None = None
    """Total number of processes, one per device. Without accelerators they share the CPU. Default: one per accelerator,
    or one."""

    dp_shard_size: Annotated[int, Field(gt=0)] | None = None
    """Devices that shard weights, gradients and optimizer states; groups of them replicate (hybrid shard). Default:
    chosen by the plan."""

    tp_size: Annotated[int, Field(gt=0)] | None = None
    """Tensor-parallel size: devices that split each layer. Default: chosen by the plan."""

    ep_size: Annotated[int, Field(gt=0)] | None = None
    """Expert-parallel size (fsdp2; full fine-tuning, or LoRA on all but experts): devices that each keep whole experts
    of a mixture and exchange tokens instead of gathering all experts. Default: chosen by the plan."""

    pp_size: Annotated[int, Field(gt=0)] | None = None
    """Pipeline-parallel size (`engine=automodel`): groups of devices that each hold some of the layers and pass
    micro-batches on. Default: chosen by the plan."""

    cp_size: Annotated[int, Field(gt=0)] | None = None
    """Context-parallel size: devices that split each sequence, in a ring. Default: chosen by the plan."""

    sp_size: Annotated[int, Field(gt=0)] | None = None
    """Sequence-parallel size: devices that split each sequence by heads (DeepSpeed Ulysses). Default: chosen by the
    plan."""

    reshard_after_forward: Literal["auto"] | bool = "auto"
    """fsdp2: free a layer's weights after its forward pass and gather them again for the backward pass. `auto`: only if
    they would not fit otherwise."""

    offload_param_device: Literal["auto"] | OffloadDevice = "auto"
    """Offload target of weights: `none`, `cpu`, or `nvme` (zero3). `auto`: `none` if they fit, else where they do."""

    offload_optimizer_device: Literal["auto"] | OffloadDevice = "auto"
    """Offload target of gradients and optimizer states; the CPU then runs the optimizer."""

    nvme_path: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """Folder on a fast local disk for `nvme` offloading. Required for it."""

    max_restarts: Annotated[int, Field(ge=0)] = 0
    """Number of automatic restarts after a process fails, each from the last checkpoint."""

    timeout_seconds: Annotated[int, Field(gt=0)] | None = None
    """Seconds that a process may wait for others, or make no progress, before the run counts as hung and stops.
    Default: the time to read or write the model on slow storage, at least ten minutes."""

    grace_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Seconds between SIGTERM and the scheduler's kill: a checkpoint is saved if there is time."""


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of a run's name: it becomes a folder's name on every system."""

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Experiment trackers: TensorBoard, Weights & Biases, MLflow or trackio."""


class OutputSection(Section):
    """Run folder, samples and trackers."""

    dir: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """Run folder, new or empty. Default: `runs/<name>-<time>`."""

    name: Annotated[str | None, Field(pattern=NAME_PATTERN, max_length=100)] = None
    """Name of the run and its folder. Default: the name of the recipe file."""

    sample_prompts: list[str] | None = None
    """Prompts to answer before and after training. Default: the first three prompts of the evaluation or training rows,
    with their images. An empty list: none."""

    report_to: Annotated[
        list[Tracker], BeforeValidator(alone_in_list, json_schema_input_type=Tracker | list[Tracker])
    ] = []
    """Experiment trackers that receive metrics and the recipe; one name or a list. Install with `pip install
    'tunekit[tracking]'`. The project comes from the tracker's own variable (`WANDB_PROJECT`, `MLFLOW_EXPERIMENT_NAME`,
    `TRACKIO_PROJECT`), else `tunekit`. Without a server (`MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`; wandb has one
    unless `WANDB_MODE=offline`), everything stays in the `trackers` folder of the run. A failing tracker neither stops
    nor delays a run: the run folder is the record."""
