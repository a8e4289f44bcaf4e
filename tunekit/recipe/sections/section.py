"""Base of a recipe's sections, and the sections on training, devices and output.

Every section is closed, frozen, strictly typed, and described by the strings under its fields. Three stand here:
how a model is trained (how long, how fast, in which steps, and what is kept), how a run is spread over devices and what
is done when one of them fails, and where a run is written and which trackers get its figures.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NewType, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tunekit.recipe.reading.parse import Key, dotted

TAG = "type"
"""The key by which the variants of a section are told apart."""

EXPANDS_ENV = {"expands_env": True}
"""Marks the string fields in which `${NAME}` stands for an environment variable, and a leading `~` for the home
folder. Elsewhere `${NAME}` is refused."""

FUNCTION_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
"""What the path of a function looks like: `my_package.my_module:my_function`."""

FunctionPath = NewType("FunctionPath", str)
"""A function of the user's own, `module:function`. It is looked up when the recipe is loaded."""


class Conflict(NamedTuple):
    """A field that does not go together with others."""

    key: Key
    """The field, below the section that says so."""

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
    """The key that a lone string in the section's place stands for: `model: pico` means `model: {path: pico}`."""

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


def alone_in_list(value: Any) -> Any:
    """A list of which the only item is given by itself, written out."""
    return [value] if isinstance(value, str) else value


def type_alone(value: Any) -> Any:
    """A variant given by its name alone, written out."""
    return {"type": value} if isinstance(value, str) else value


METRIC_PATTERN = r"^eval_[\w/.-]+$"
"""What the name of an evaluation's measure looks like."""

Optim = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
    "ademamix",
    "ademamix_8bit",
    "adamw_8bit",
    "adamw_bnb_8bit",
    "lion_32bit",
    "lion_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop_bnb",
    "rmsprop_bnb_32bit",
    "rmsprop_bnb_8bit",
]

LrSchedulerType = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]

ONE_LENGTH = ("num_epochs", "max_steps")
"""The two ways to say how long to train: a recipe gives at most one of them."""


class TrainSection(Section):
    """The optimisation: how long, how fast, in which steps."""

    num_epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows; 1 if neither this nor `max_steps` is given."""

    max_steps: Annotated[int, Field(gt=0)] | None = None
    """Optimizer steps, instead of `num_epochs`."""

    global_batch_size: Annotated[int, Field(gt=0)] = 16
    """Sequences per optimizer step, over all devices and micro-batches: rows for sft, pairs for methods that learn from
    pairs, answers for kto and for methods that let the model answer."""

    micro_batch_size: Annotated[int, Field(gt=0)] | None = None
    """The same per forward pass on one device. Left out, the plan takes the most that fits."""

    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate. Left out, it goes by the method: for all weights 2e-5 for sft, 1e-5 for reward, 5e-6 for
    orpo, 1e-6 for cpo, grpo, rloo, gmpo and distillation, 5e-7 for dpo and kto; ten times that for lora and qlora. The
    plan says where it is from."""

    lr_scheduler_type: LrSchedulerType = "cosine"
    """Learning-rate schedule by its transformers name."""

    warmup_steps: Annotated[float, Field(ge=0)] = 0.03
    """Steps of linear warm-up; below 1, a share of all steps."""

    optim: Optim = "adamw_torch_fused"
    """Optimizer by its transformers name."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""

    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""

    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass to save memory. `auto`: only where they would not fit."""

    torch_compile: Literal["auto"] | bool = "auto"
    """Compile each decoder layer with torch.compile. `auto`: where it is known to pay, which is on CUDA for packed rows
    that no other kernels are used for; the plan says why not elsewhere."""

    fp8: bool = False
    """Compute the products of linear layers with factors of 8 bits (torchao). For training all weights on Hopper and
    later; it is refused elsewhere."""

    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of adapter initialisation, row order and dropout."""

    logging_steps: Annotated[int, Field(gt=0)] = 1
    """Steps between two logged losses."""

    eval_steps: Annotated[int, Field(gt=0)] | None = None
    """Steps between two evaluations. Left out: four evaluations a run. With rows to evaluate on, the run always
    evaluates before the first and after the last step."""

    save_steps: Annotated[int, Field(gt=0)] | None = None
    """Steps between two checkpoints. Left out: four checkpoints a run."""

    save_total_limit: Annotated[int, Field(ge=2)] = 2
    """Checkpoints that are kept: the newest ones, and the best besides. Two at least: one may turn out damaged."""

    metric_for_best_model: Annotated[str, Field(pattern=METRIC_PATTERN)] | None = None
    """Measure of the evaluations by which the best checkpoint is told, as TRL names it. Left out: `eval_loss`, or
    `eval_reward` for methods that learn from rewards."""

    greater_is_better: bool | None = None
    """Whether the best is the one with the greatest such measure. Left out: yes, but for one whose name ends in
    `loss`."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """What is done when a loss or a gradient is not a number or infinite. It is seen before the weights are changed.
    `stop`: the run ends and names the rows. `skip`: the step changes nothing. `rollback`: the run goes back to the last
    checkpoint, and the step changes nothing when it comes again."""

    max_non_finite: Annotated[int, Field(gt=0)] = 3
    """Steps that are skipped or rolled back so, before the run ends after all."""

    retry_out_of_memory: bool = False
    """Start again from the last checkpoint where memory runs out, once, with half the micro-batch and the same global
    batch. A plan whose micro-batch is 1 is refused."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainSection":
        if self.num_epochs is not None and self.max_steps is not None:
            raise ValueError("num_epochs and max_steps are both given; keep one of them")
        return self

    @model_validator(mode="after")
    def _something_to_halve(self) -> "TrainSection":
        if self.retry_out_of_memory and 1 in (self.micro_batch_size, self.global_batch_size):
            raise ValueError("retry_out_of_memory: a micro-batch of 1 cannot be halved; leave it out")
        return self


Strategy = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
"""How devices work together: one alone, torch's DistributedDataParallel, its `fully_shard`, DeepSpeed's ZeRO by
its stage."""

OffloadDevice = Literal["none", "cpu", "nvme"]
"""Where something lies while the device does not need it: it stays, in main memory, or on a disk."""


class ParallelSection(Section):
    """How the run is spread over devices, where the plan is not to choose by itself. Sizes have Accelerate's names."""

    strategy: Literal["auto"] | Strategy = "auto"
    """`single` (one device), `ddp`, `fsdp2`, or DeepSpeed's `zero1`, `zero2`, `zero3`. `auto`: the first that fits, in
    the order of their cost; the plan says what ruled the others out."""

    num_processes: Annotated[int, Field(gt=0)] | None = None
    """Processes in all, one for each device. On a machine without accelerators they share the processor. Left out: as
    many as there are accelerators for, and one without any."""

    dp_shard_size: Annotated[int, Field(gt=0)] | None = None
    """Devices that divide weights, gradients and optimizer states among them; groups of them hold a copy each (hybrid
    shard). Left out: the plan chooses."""

    tp_size: Annotated[int, Field(gt=0)] | None = None
    """Devices that divide the products of each layer (tensor parallel). Left out: the plan chooses."""

    cp_size: Annotated[int, Field(gt=0)] | None = None
    """Devices that divide each sequence, in a ring (context parallel). Left out: the plan chooses."""

    sp_size: Annotated[int, Field(gt=0)] | None = None
    """Devices that divide each sequence, by heads (DeepSpeed's Ulysses). Left out: the plan chooses."""

    reshard_after_forward: Literal["auto"] | bool = "auto"
    """fsdp2: free a layer's weights after its forward pass, and gather them again for the backward pass. `auto`: where
    they would not fit otherwise."""

    offload_param_device: Literal["auto"] | OffloadDevice = "auto"
    """Where the weights lie while they are not needed: `none` (on the device), `cpu` (in main memory) or `nvme` (zero3:
    on a disk). `auto`: on the device, or else where they fit."""

    offload_optimizer_device: Literal["auto"] | OffloadDevice = "auto"
    """The same for gradients and optimizer states, which the processor then updates."""

    nvme_path: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """Folder on a fast local disk, for what is offloaded to `nvme`. Without it nothing is."""

    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How often the processes are started again after one of them failed, each time from the last checkpoint."""

    timeout_seconds: Annotated[int, Field(gt=0)] | None = None
    """How long a process may wait for the others, or stand still itself, before the run is taken for hung and ends.
    Left out: as long as reading or writing the model may take on slow storage, ten minutes at least."""

    grace_seconds: Annotated[float, Field(gt=0)] = 30.0
    """How long a run has that is told to end by SIGTERM, until the scheduler kills it: it saves a checkpoint if
    there is time for one."""


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What a run's name may look like: it becomes a folder's name on every system."""

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""What shows figures of many runs: TensorBoard, Weights & Biases, MLflow or trackio."""


class OutputSection(Section):
    """What is written, and where."""

    dir: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """Run folder, new or empty. Left out: `runs/<name>-<time>`."""

    name: Annotated[str | None, Field(pattern=NAME_PATTERN, max_length=100)] = None
    """Name of the run, used for its folder. Left out: the name of the recipe file."""

    sample_prompts: list[str] | None = None
    """Prompts answered before and after training. Left out: the first three prompts of the evaluation rows, or of
    the training rows. An empty list: none."""

    report_to: Annotated[
        list[Tracker],
        BeforeValidator(alone_in_list, json_schema_input_type=Tracker | list[Tracker]),
    ] = []
    """Trackers that the run's figures are handed to as it goes, with the recipe as their configuration; one name or a
    list. They come with `pip install 'tunekit[tracking]'`. The run has its own name there. The project is what the
    tracker's own variable says (`WANDB_PROJECT`, `MLFLOW_EXPERIMENT_NAME`, `TRACKIO_PROJECT`), else `tunekit`. Where
    nothing names a server (`MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`; wandb has one unless `WANDB_MODE=offline`), all
    stays in the folder `trackers` of the run. A tracker that fails while the run trains neither ends it nor delays it:
    the run folder is the record."""
