"""Inputs and TRL arguments of every method, and the reference that some compare with.

Inputs from which every method builds its trainer, and the arguments of its TRL config.

The reference of preference and reinforcement methods: without the adapter, with a copy of it, or a second model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.estimates.memory.states import Reference
from tunekit.planner.decisions.backends import head_kind
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.methods.spec import HeadKind
from tunekit.recipe.sections.data import DataSection
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import OUR_OPTIMS, TrainSection

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

    from tunekit.methods.run_trainer import RunTrainer


@dataclass(frozen=True)
class Parts:
    """Inputs from which every method builds its trainer.

    Attributes:
        train: The optimization.
        data: The longest sequence, and whether rows are shuffled.
        plan: Precision, micro-batch and memory choices.
        schedule: Steps.
        model: The model with its adapter.
        tokenizer: For the rows, and saved with each checkpoint.
        processor: For rows with pictures; None where there are none.
        train_dataset: Rows, with the columns that the method wants.
        eval_dataset: The same for evaluation.
        checkpoints: Folder of the checkpoints.
        callbacks: What watches the training.
        engine: Arguments of TRL's config that choose how the run is spread.
        load_reference: Load the model as it was before training, whole on each device.
        load_teacher: Load a teacher, whole on each device.
    """

    train: TrainSection
    data: DataSection
    plan: Plan
    schedule: Schedule
    model: "Module"
    tokenizer: "PreTrainedTokenizerBase"
    train_dataset: "Dataset | IterableDataset"
    eval_dataset: "Dataset | None"
    checkpoints: Path
    callbacks: "list[TrainerCallback]"
    engine: dict[str, Any]
    load_reference: "Callable[[], PreTrainedModel]"
    load_teacher: "Callable[[ModelSection], PreTrainedModel]"
    processor: "ProcessorMixin | None" = None

    @property
    def head(self) -> HeadKind:
        """Kind of head that scores tokens, for a method whose trainer has TRL's head."""
        return head_kind("tiles", self.plan.recipe.method, self.plan.kernels, self.plan.layout)

    def reference(self) -> "PreTrainedModel | None":
        """The model before training, where it is a second one.

        Without, it is the model without its adapter, or its log-probabilities are computed beforehand.
        """
        return self.load_reference() if self.plan.reference == "second model" else None

    def trainer(
        self,
        base: type,
        *,
        fills_last_step: bool = False,
        processing_class: "ProcessorMixin | None" = None,
        **given: Any,
    ) -> "RunTrainer":
        """A trainer of TRL's with the overrides of a run, and without its own printing of logs.

        Args:
            base: TRL's class, or one of ours on top of it.
            fills_last_step: Whether the last step of an epoch is filled with its first rows; see `fill_last_step`.
            processing_class: Processor that TRL reads prompts with; the tokenizer otherwise.
            given: Arguments besides those of every trainer.
        """
        from transformers import PrinterCallback

        from tunekit.methods.averaging import save_averages
        from tunekit.methods.run_trainer import fill_last_step, give_optimizer, run_trainer

        trainer: RunTrainer = run_trainer(base)(
            **given,
            model=self.model,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            processing_class=self.tokenizer if processing_class is None else processing_class,
            callbacks=self.callbacks,
        )
        if self.train.optimizer in OUR_OPTIMS:
            give_optimizer(trainer, self.train)
        if self.train.averages:
            save_averages(trainer, self.train.ema_decay)
        if fills_last_step:
            fill_last_step(trainer, self.train.global_batch_size, shuffle=self.data.shuffle, seed=self.train.seed)
        trainer.remove_callback(PrinterCallback)
        return trainer

    def arguments(self, *, mean_over_rows: bool = False) -> dict[str, Any]:
        """Arguments of every config of TRL's: steps, optimizer, precision, logging, saving and how it is spread.

        Args:
            mean_over_rows: Whether the loss is one, so that each process has to evaluate as many rows at once.
        """
        eval_size = self.plan.micro_batch_size
        if mean_over_rows and self.eval_dataset is not None:
            eval_size = even_size(eval_size, len(self.eval_dataset), num_batches=self.plan.layout.num_batches)
        return {
            "output_dir": str(self.checkpoints),
            "per_device_train_batch_size": self.plan.micro_batch_size,
            "per_device_eval_batch_size": eval_size,
            "gradient_accumulation_steps": self.plan.gradient_accumulation_steps,
            "max_steps": self.schedule.num_steps,
            "learning_rate": self.plan.learning_rate,
            **self._balance(),
            "lr_scheduler_type": self.train.lr_scheduler_type,
            "warmup_steps": self.schedule.warmup_steps,
            # TRL's config knows names of transformers alone; `trainer` gives it ours.
            "optim": "adamw_torch" if self.train.optimizer in OUR_OPTIMS else self.train.optimizer,
            "weight_decay": self.train.weight_decay,
            "max_grad_norm": self.train.max_grad_norm,
            "seed": self.train.seed,
            "use_cpu": self.plan.device.kind == "cpu",
            "bf16": self.plan.autocast and self.plan.dtype == "bfloat16",
            "fp16": self.plan.autocast and self.plan.dtype == "float16",
            "gradient_checkpointing": self.plan.gradient_checkpointing,
            # A field of some methods' configs only.
            **({"activation_offloading": True} if self.plan.activation_offloading else {}),
            "dataloader_num_workers": self.plan.dataloader_num_workers,
            "dataloader_pin_memory": self.plan.device.kind != "cpu",
            "logging_steps": self.train.logging_steps,
            # A NaN must be seen, not shown as 0.
            "logging_nan_inf_filter": False,
            "eval_strategy": "no" if self.eval_dataset is None else "steps",
            "eval_steps": self.schedule.eval_steps,
            "eval_on_start": self.eval_dataset is not None,
            "save_strategy": "steps",
            "save_steps": self.schedule.save_steps,
            # Which checkpoints are kept, `tunekit.training.checkpointing.save` says.
            "save_total_limit": None,
            # `tunekit.tracking.process` runs transformers' callbacks for trackers, in a process of its own.
            "report_to": "none",
            "disable_tqdm": True,
            **self.engine,
        }

    def _balance(self) -> dict[str, float]:
        """The coefficient of the routers' loss by the plan, where a method of the recipe has not given it itself."""
        coefficient = self.plan.router_aux_loss_coef
        is_set = "router_aux_loss_coef" in self.plan.recipe.method.trainer_args
        return {} if is_set or coefficient is None else {"router_aux_loss_coef": coefficient}


def even_size(micro_batch_size: int, num_rows: int, *, num_batches: int) -> int:
    """Rows that each process evaluates at once, so that none has fewer: the mean over them is one over rows.

    One by one where they cannot be divided: then Accelerate leaves out again what it repeated.
    """
    sizes = range(micro_batch_size, 0, -1)
    return next((size for size in sizes if num_rows % (size * num_batches) == 0), 1)


COPY = "ref"
"""TRL's name for its copy of the adapter that it was given."""


def loading_arguments(plan: Plan) -> dict[str, Any]:
    """Return the arguments with which TRL loads a second model itself: from where the first came from, in its type."""
    base, where = plan.base, {"use_safetensors": True, "dtype": plan.trained_dtype}
    return {**where, "revision": base.revision, "trust_remote_code": base.trust_remote_code}


def settle_reference(model: "Module", reference: Reference, trained: Path | None) -> None:
    """See to it that TRL's copy of an adapter is the reference that the plan has, or gone, and that both are exact.

    TRL takes every adapter that it did not attach itself for one that is trained further, and copies it (trl 1.16,
    `DPOTrainer.__init__`). Where it finds no copy it disables the adapter. A copy that stays is read from where the
    adapter came from, so that it does not depend on what the trained one holds by now.

    Args:
        model: The trainer's model, which no engine has wrapped yet.
        reference: What training is held to.
        trained: Folder of the adapter that is trained further; None in processes that are given their weights.
    """
    from peft import PeftModel

    from tunekit.models.load import read_adapter

    if not isinstance(model, PeftModel):
        return
    if trained is not None:
        # TRL has rounded it to bfloat16 where the base is quantised.
        read_adapter(model, trained)
    if reference != "copied adapter":
        if COPY in model.peft_config:
            model.delete_adapter(COPY)
        return
    for name, parameter in model.named_parameters():
        if f".{COPY}." in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(False)
    if trained is not None:
        read_adapter(model, trained, name=COPY)


def give_weights(reference: "Module", model: "PreTrainedModel") -> None:
    """Give a second model that TRL has loaded, and perhaps wrapped, the weights of another.

    TRL loads it from where the first model's weights came from, which is not all that became part of them.
    """
    from accelerate.utils import extract_model_from_parallel

    extract_model_from_parallel(reference).load_state_dict(model.state_dict())
