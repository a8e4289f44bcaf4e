"""The one trainer of ours, and the order of rows that it takes.

The one trainer of ours: all that a run changes of TRL's trainers, by overrides with `super()`.

`run_trainer(GRPOTrainer)` is TRL's class with these overrides. By themselves they change nothing: the parts of a run
(the heartbeat, the clocks, the guard against non-finite steps, checkpoints, the end at a boundary) stand around a
method with `trainer.wrap`, and are handed the call that they stand around. Other modules know the private names of
transformers and TRL by the words of this class; `tunekit.training.build_trainer` checks them before a run starts.

Rows of each optimizer step: the same ones for any number of processes.

Processes that compute side by side take as many micro-batches each. Where an epoch's rows do not fill the last ones,
Accelerate repeats rows of its beginning, so that the step is another one than in one process. Here rows without a
trained token fill them instead: a loss that is a mean over tokens does not see them. A mean over pairs would, so there
the last step is filled with pairs of the epoch's beginning, in one process too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

from tunekit.data.media.collate import MEDIA, TEXT
from tunekit.data.tokenization.teacher_tokens import TEACHER_IDS, TEACHER_LABELS
from tunekit.estimates.learning_rates import plain_name
from tunekit.estimates.memory.states import has_low_rank, rows_per_block, uses_muon
from tunekit.estimates.models.model_config import head_dim_of
from tunekit.recipe.sections.section import Optim, OptimArgs

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch import Tensor
    from transformers import Trainer as Base
    from transformers import TrainerState, TrainingArguments

    from tunekit.methods.environments.episodes import Host
    from tunekit.recipe.sections.section import TrainSection
else:
    Base = object

Wrapped = Literal[
    "await_rollouts",
    "backward",
    "batches_of_step",
    "begin_training",
    "calculate_rewards",
    "checkpoint_folder",
    "compute_loss_of_answers",
    "create_optimizer",
    "create_scheduler",
    "evaluate",
    "finish_step",
    "generate",
    "grad_norm",
    "load_optimizer",
    "load_random_state",
    "load_weights",
    "prediction_step",
    "save_checkpoint",
    "save_optimizer",
    "save_random_state",
    "save_weights",
    "score_answers",
    "tool_calls",
    "train_sampler",
    "training_step",
]
"""Methods of the trainer that a part of the run may stand around."""


def _attribute(*names: str) -> Any:
    """Give an attribute of the trainers below a public name; `names` are those that it has in them, tried in order."""

    def name_in(trainer: Any) -> str:
        return next((name for name in names if name in vars(trainer)), names[-1])

    return property(
        lambda trainer: getattr(trainer, name_in(trainer)),
        lambda trainer, value: setattr(trainer, name_in(trainer), value),
    )


class RunTrainer(Base):  # type: ignore[misc]
    """Mixin over a trainer of TRL's: each method calls what stands around it, and that calls TRL's."""

    _around: Mapping[str, tuple[Callable[..., Any], ...]] = MappingProxyType({})
    rank_allocation: Any = None
    """Distribution of ranks, of an adapter that has it."""
    tool_hosts: "Sequence[Host]" = ()
    """Processes of tools and environments."""
    replayed_groups: "Sequence[Mapping[str, Tensor]] | None" = None
    """Completions of earlier steps, a group each, of a method that replays some."""
    rollouts_ahead: Sequence[Mapping[str, Any]] | None = None
    """Completions of the next steps that are there, of a method that generates ahead."""
    prompt_order: "GroupOrder"
    """Order of the prompts, of a method that generates."""
    lost_reasons: Sequence[str] = ()
    """Why episodes or calls of the last batch were lost."""
    stored_buffers: Sequence[str] = ()
    """Names of buffers of the model that checkpoints hold, where FSDP2 divides it."""

    def wrap(self, name: Wrapped, around: Callable[..., Any]) -> None:
        """Have a part of the run stand around a method; the last one is the outermost.

        Args:
            name: The method.
            around: Called as `around(call, *args, **kwargs)`, where `call` is the method with what stands around it so
                far.
        """
        assert name in get_args(Wrapped), name
        self._around = {**self._around, name: (*self._around.get(name, ()), around)}

    def _run(self, name: Wrapped, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for around in self._around.get(name, ()):
            call = partial(around, call)
        return call(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, whose backward pass is a part of a step too."""
        super().create_accelerator_and_postprocess()
        # Accelerate has no class of its own to choose here (transformers 5.23).
        self.accelerator.backward = partial(self._run, "backward", self.accelerator.backward)

    def create_optimizer(self, *args: Any) -> Any:
        """Create the optimizer: the place of parameter groups, and of optimizers that torch does not have."""
        return self._run("create_optimizer", super().create_optimizer, *args)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the schedule of learning rates: the place of what changes it."""
        return self._run("create_scheduler", super().create_scheduler, *args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: TRL's would be written beside each checkpoint, before them all."""

    def get_batch_samples(self, *args: Any) -> Any:
        """Take the micro-batches of a step."""
        return self._run("batches_of_step", super().get_batch_samples, *args)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss and the gradients of a micro-batch."""
        return self._run("training_step", super().training_step, *args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a micro-batch."""
        return self._run("prediction_step", super().prediction_step, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate all rows."""
        return self._run("evaluate", super().evaluate, *args, **kwargs)

    def save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint of the step that was taken."""
        self._save_checkpoint(model, trial)

    def load_random_state(self, checkpoint: str) -> None:
        """Restore the random numbers of a checkpoint."""
        self._load_rng_state(checkpoint)

    def load_weights(self, checkpoint: str, model: Any) -> None:
        """Load the weights of a checkpoint."""
        self._load_from_checkpoint(checkpoint, model)

    def generate_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generate a turn of answers, as TRL's trainer does."""
        return self._generate_single_turn(*args, **kwargs)

    def await_rollouts(self) -> None:
        """Wait for completions that are generated ahead."""
        self._run("await_rollouts", lambda: None)

    def prompt_tokens(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Return the token ids of prompts, texts or messages, as TRL's trainer generates from them."""
        tokens: list[list[int]] = self._tokenize_prompts(prompts)[0]
        return tokens

    def score_answers(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Generate an answer to each row and score it, as TRL's trainer does before it learns from them."""
        return super()._generate_and_score_completions(rows)

    def token_scores(self, *args: Any, **kwargs: Any) -> Any:
        """Return the log-probability of each token of answers, `(batch, seq)`, and more, as TRL's trainer has it."""
        return self._get_per_token_logps_and_entropies(*args, **kwargs)

    metrics = _attribute("_stored_metrics", "_metrics")
    """Metrics measured since the last log, by mode and name."""

    answer_logs = _attribute("_logs")
    """Prompts, answers and rewards of the last step, of a method that generates."""

    episodes = _attribute("environments")
    """Environments of the answers of this process's last batch; None without."""

    buffered_answers = _attribute("_buffered_inputs")
    """Answers that further steps learn from, a micro-batch each."""

    micro_step = _attribute("_step")
    """Micro-batches since the beginning, by which a method that generates knows when new answers are due."""

    summed_loss = _attribute("_tr_loss")
    """Sum of the losses since the last log, of this process, a scalar tensor."""

    logged_step = _attribute("_globalstep_last_logged")
    """The step of the last log."""

    num_trained_tokens = _attribute("_total_train_tokens", "_num_tokens")
    """Tokens that were trained on so far by all processes."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self._run("train_sampler", super()._get_train_sampler, train_dataset)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("begin_training", super()._init_training_state, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._run("finish_step", super()._maybe_log_save_evaluate, *args, **kwargs)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("grad_norm", super()._get_grad_norm, *args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("generate", super()._generate_single_turn, *args, **kwargs)

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("tool_calls", super()._tool_call_loop, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("calculate_rewards", super()._calculate_rewards, *args, **kwargs)

    def _generate_and_score_completions(self, rows: Any) -> Any:
        return self._run("score_answers", super()._generate_and_score_completions, rows)

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("compute_loss_of_answers", super()._compute_loss, *args, **kwargs)

    def _get_output_dir(self, trial: Any) -> Any:
        return self._run("checkpoint_folder", super()._get_output_dir, trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._run("save_checkpoint", super()._save_checkpoint, model, trial)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        self._run("save_weights", super()._save, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._run("save_optimizer", super()._save_optimizer_and_scheduler, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        self._run("save_random_state", super()._save_rng_state, output_dir)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._run("load_weights", super()._load_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        self._run("load_optimizer", super()._load_optimizer_and_scheduler, checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        self._run("load_random_state", super()._load_rng_state, checkpoint)


@cache
def run_trainer(trainer: type) -> Any:
    """Return a trainer class of TRL's with the overrides of a run.

    Args:
        trainer: TRL's class, or one of ours on top of it.
    """
    return type(trainer.__name__, (RunTrainer, trainer), {"__module__": trainer.__module__})


def set_learning_rates(trainer: "RunTrainer", rate_of: Callable[[str, torch.nn.Parameter], float], base: float) -> None:
    """Give the parameters of a trainer learning rates of their own, in groups of the optimizer.

    The groups with the recipe's own rate come first, which is what the trainer logs.

    Args:
        trainer: The trainer, before its model is wrapped.
        rate_of: Gives the rate of a parameter, by its name and itself.
        base: The recipe's rate.
    """
    _divide_groups(trainer, "lr", rate_of, base)


def _divide_groups(
    trainer: "RunTrainer", key: str, value_of: Callable[[str, torch.nn.Parameter], Any], first: Any
) -> None:
    """Divide each group of the optimizer by a value of its parameters, and keep all else of it.

    Args:
        trainer: The trainer, before its model is wrapped.
        key: Name of the value in the groups.
        value_of: Gives the value of a parameter, by its name and itself.
        first: The value of the groups that come first.
    """

    def create(create_optimizer: Callable[..., Any], *args: Any) -> Any:
        optimizer = create_optimizer(*args)
        names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            by_value: dict[Any, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                by_value.setdefault(value_of(names[id(parameter)], parameter), []).append(parameter)
            groups += [{**group, "params": parameters, key: value} for value, parameters in by_value.items()]
        optimizer.param_groups[:] = sorted(groups, key=lambda group: group[key] != first)
        return optimizer

    trainer.wrap("create_optimizer", create)


class Order(Sampler[int], TrainerCallback):  # type: ignore[misc]
    """The order of the rows in each epoch, from the seed and the number of the epoch alone.

    It is that of Accelerate's `SeedableRandomSampler`. It is told the epoch by the trainer's events, because what
    Accelerate tells samplers does not arrive where several processes resume within an epoch (accelerate 1.15).

    Args:
        num_rows: Rows to be ordered.
        num_more: How many come behind them at the end of every epoch: rows that stand behind them in the dataset.
        repeats: Whether the epoch's first rows come there again instead.
        shuffle: Whether rows are shuffled.
        seed: Seed of the order.
    """

    def __init__(self, num_rows: int, num_more: int, *, repeats: bool, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.num_more = num_more
        self.repeats = repeats
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_rows + self.num_more

    def __iter__(self) -> Iterator[int]:
        return self.of_epoch(self.epoch)

    def of_epoch(self, epoch: int) -> Iterator[int]:
        """The order of an epoch, whichever it is at."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        rows = torch.randperm(self.num_rows, generator=generator) if self.shuffle else torch.arange(self.num_rows)
        yield from rows.tolist()
        for more in range(self.num_more):
            yield int(rows[more % self.num_rows]) if self.repeats else self.num_rows + more

    def on_epoch_begin(self, args: object, state: "TrainerState", *_: object, **__: object) -> None:
        """Take the order of the epoch that begins or is resumed."""
        self.epoch = int(state.epoch or 0)


def give_optimizer(trainer: "RunTrainer", train: "TrainSection") -> None:
    """Have a trainer make an optimizer of tunekit of its parameter groups, with the arguments that torch's AdamW would
    have.
    """
    from tunekit.kernels.adam_mini import AdamMini
    from tunekit.kernels.adamw import AdamW, States
    from tunekit.kernels.low_rank import ApolloAdamW, GaLoreAdamW
    from tunekit.kernels.muon import Muon

    args = trainer.args
    kwargs = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if train.optimizer == "muon":
        trainer.optimizer_cls_and_kwargs = (Muon, kwargs)
        _divide_groups(trainer, "use_muon", lambda name, weight: uses_muon(plain_name(name), weight.shape), True)
        return
    if train.optimizer == "adam_mini":
        head_dim = head_dim_of(trainer.model.config.get_text_config().to_dict())
        trainer.optimizer_cls_and_kwargs = (AdamMini, kwargs)
        _divide_groups(
            trainer,
            "rows_per_block",
            lambda name, weight: rows_per_block(plain_name(name), weight.shape, head_dim),
            1,
        )
        return
    if train.low_rank is not None:
        low_rank = train.low_rank
        options: OptimArgs = train.optim_args or OptimArgs()
        kwargs |= {"rank": options.rank, "update_proj_gap": options.update_proj_gap}
        if train.optimizer == "galore_adamw":
            trainer.optimizer_cls_and_kwargs = (GaLoreAdamW, {**kwargs, "scale": options.scale or 0.25})
        else:
            more = {"scale": options.scale or 1.0, "scale_type": options.scale_type, "seed": train.seed}
            trainer.optimizer_cls_and_kwargs = (ApolloAdamW, {**kwargs, **more})
        _divide_groups(
            trainer, "low_rank", lambda name, weight: has_low_rank(plain_name(name), weight.shape, low_rank), True
        )
        return
    of_bits: dict[Optim, States] = {"tunekit_adamw_8bit": "8bit", "tunekit_adamw_4bit": "4bit"}
    states = of_bits.get(train.optimizer, train.trained_dtype)
    trainer.optimizer_cls_and_kwargs = (AdamW, {**kwargs, "states": states, "seed": train.seed})


def keep_order(trainer: "RunTrainer", order: Order) -> None:
    """Make a trainer take its training rows in an order of ours."""
    trainer.wrap("train_sampler", lambda make, rows: order)
    trainer.add_callback(order)


def fill_last_step(trainer: "RunTrainer", global_batch_size: int, *, shuffle: bool, seed: int) -> None:
    """Make a trainer whose loss is a mean over rows fill the last step of an epoch with its first rows."""
    num_rows = len(trainer.train_dataset)
    order = Order(num_rows, num_missing(num_rows, global_batch_size), repeats=True, shuffle=shuffle, seed=seed)
    trainer.train_dataset = filled_with_first(trainer.train_dataset, global_batch_size)
    keep_order(trainer, order)


class GroupOrder(TrainerCallback):  # type: ignore[misc]
    """The order of the prompts that answers are generated for, in each epoch from the seed and its number alone.

    TRL's `RepeatSampler` draws it from where the last epoch left its generator, and a resumed run begins with the first
    epoch's, whichever it is in; it also takes the next micro-batch for the first on new answers (trl 1.16).

    Args:
        trainer: A trainer of TRL's that generates answers.
        seed: Seed of the order.
    """

    def __init__(self, trainer: "RunTrainer", seed: int) -> None:
        self.trainer = trainer
        self.seed = seed
        trainer.wrap("train_sampler", self._keep_sampler)
        trainer.add_callback(self)

    def _keep_sampler(self, make: Callable[..., Any], rows: Any) -> Any:
        self._sampler = make(rows)
        return self._sampler

    def of_batch(self, number: int) -> list[int]:
        """Return the places of the prompts of a generated batch of all processes, each once.

        Args:
            number: Batches before it since the beginning of training.
        """
        sampler = self._sampler
        epoch, place = divmod(number, sampler.num_samples // sampler.batch_size)
        places = torch.arange(sampler.num_samples)
        if sampler.shuffle:
            places = torch.randperm(sampler.num_samples, generator=torch.Generator().manual_seed(self.seed + epoch))
        batch: list[int] = places[place * sampler.batch_size : (place + 1) * sampler.batch_size].tolist()
        return batch

    def on_train_begin(self, args: "TrainingArguments", state: "TrainerState", *_: object, **__: object) -> None:
        """Count the micro-batches of the steps that were taken before."""
        self.trainer.micro_step = state.global_step * args.gradient_accumulation_steps

    def on_epoch_begin(self, args: object, state: "TrainerState", *_: object, **__: object) -> None:
        """Take the order of the epoch that begins or is resumed."""
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self.seed + int(state.epoch or 0))


def num_missing(num_rows: int, multiple: int) -> int:
    """Rows that are missing from a multiple."""
    return -num_rows % multiple


def filled(rows: "Dataset", multiple: int, pad_token_id: int, no_labels: Any = (-100,)) -> "Dataset":
    """Rows, and behind them as many without a trained token as fill a multiple.

    Args:
        rows: Columns `input_ids` and `labels`, with `seq_lengths` where packed.
        multiple: Rows that are computed at the same time.
        pad_token_id: The one token of an empty row.
        no_labels: Its labels.
    """
    from datasets import Dataset, concatenate_datasets

    missing = num_missing(len(rows), multiple)
    if missing == 0:
        return rows
    columns = {name: [value] * missing for name, value in _empty(rows.column_names, pad_token_id, no_labels).items()}
    return concatenate_datasets([rows, Dataset.from_dict(columns, features=rows.features)])


def filled_with_first(rows: "Dataset", multiple: int) -> "Dataset":
    """Rows, and behind them the first ones again until they fill a multiple.

    An order that repeats draws none of these. They are there because Accelerate takes what is in the last micro-batches
    for repeated, and leaves it out of what is logged, by the number of rows of the dataset.
    """
    missing = num_missing(len(rows), multiple)
    return rows.select([row % len(rows) for row in range(len(rows) + missing)]) if missing else rows


def filled_stream(rows: "IterableDataset", multiple: int, pad_token_id: int) -> "IterableDataset":
    """The same for a stream, whose end is not known before it comes.

    The multiple is a whole step: at the end of a stream the trainer carries gradients of micro-batches that fill no
    step into the next epoch's first one (transformers 5.23).
    """

    def fill(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        missing = num_missing(len(batch["input_ids"]), multiple)
        empty = _empty(list(batch), pad_token_id)
        return {name: values + [empty[name]] * missing for name, values in batch.items()}

    return rows.map(fill, batched=True, batch_size=multiple, features=rows.features)


def _empty(columns: list[str], pad_token_id: int, no_labels: Any = (-100,)) -> dict[str, Any]:
    """A row of one token that is not trained on."""
    row: dict[str, Any] = {"input_ids": [pad_token_id], "labels": no_labels, "seq_lengths": [1]}
    # Any token of another vocabulary is one that is not trained on.
    row |= {TEACHER_IDS: [0], TEACHER_LABELS: [-100]}
    row |= {TEXT: [None], MEDIA: [[]]} if "seq_lengths" in columns else {TEXT: None, MEDIA: []}
    return {name: row[name] for name in columns}
