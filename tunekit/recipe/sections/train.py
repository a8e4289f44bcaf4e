"""The section of a recipe that says how a model is trained: how long, how fast, in which steps, and what is kept."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunekit.recipe.sections.section import Section

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
