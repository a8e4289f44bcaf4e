"""Classify edits of a recipe on resume: applied, ignored or refused, field by field, from the recipe alone.

A checkpoint holds the weights, the optimizer and its learning rates, the schedule's position, the random numbers and
how many rows were seen. An edit that these know nothing of takes effect. One that they hold themselves would be
overruled by them, and takes effect only where they begin afresh. What the weights or the prepared rows would not fit
is another run.

In what recipes differ, by dotted key.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from tunekit.recipe.reading.parse import dotted, to_inline_yaml
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.section import Section
from tunekit.recipe.sections.train import Strategy

Effect = Literal["takes effect", "saved state", "refused"]
"""What becomes of an edit: it holds from here on; the saved state holds the earlier value, so that it takes effect only
where that state is left; or it cannot be had in this run."""


class Ruling(NamedTuple):
    """Effect of an edit of a field, or of any field of a section."""

    effect: Effect
    why: str = ""
    """Why it does not take effect."""
    replans: bool = False
    """Whether it takes effect by a new plan for this machine, rather than by another schedule at most."""


class Edit(NamedTuple):
    """A field that differs between two recipes."""

    key: tuple[str, ...]
    before: Any
    now: Any

    @property
    def name(self) -> str:
        """Its dotted key."""
        return dotted(self.key)

    @property
    def words(self) -> str:
        """The edit in words: `train.max_steps 100 -> 200`."""
        return f"{self.name} {self.shown_before} -> {self.shown_now}"

    @property
    def shown_before(self) -> str:
        """The value that it had, on a line of YAML that may be cut."""
        return _shown(self.before)

    @property
    def shown_now(self) -> str:
        """The same of the value that it has now."""
        return _shown(self.now)

    @property
    def override(self) -> str:
        """The edit as it is given to a command: `train.max_steps=200`."""
        return f"{self.name}={to_inline_yaml(_plain(self.now))}"


_TAKES_EFFECT = Ruling("takes effect")
_REPLANS = Ruling("takes effect", replans=True)
_MODEL = Ruling("refused", "the weights of the checkpoint are those of another model")
_ADAPTER = Ruling("refused", "the tensors of the checkpoint are those of another adapter")
_ROWS = Ruling("refused", "the rows were prepared when the run was made, and the checkpoint has seen some of them")
_ORDER = Ruling("saved state", "the checkpoint counts the rows that it has seen by it")
_STATE = Ruling("saved state", "the optimizer of the checkpoint has its own and would overrule it")

RULINGS: Mapping[str, Ruling] = {
    "model": _MODEL,
    "model.dtype": _REPLANS,
    "model.attn_implementation": _REPLANS,
    "model.kernels": _REPLANS,
    "train.torch_compile": _REPLANS,
    "train.fp8": _REPLANS,
    "data": _ROWS,
    "data.padding_free": _REPLANS,
    "data.shuffle": _ORDER,
    "method.type": Ruling("refused", "another method learns from other rows and to another end"),
    "method.trainer_args": Ruling("refused", "which of TRL's arguments a checkpoint holds itself is not known"),
    "method.loss_type": _REPLANS,
    "method.loss_weights": _TAKES_EFFECT,
    "method.label_smoothing": _TAKES_EFFECT,
    "method.beta": _REPLANS,
    "method.precompute_ref_log_probs": Ruling("refused", "the rows were measured by the reference before training"),
    "method.desirable_weight": _TAKES_EFFECT,
    "method.undesirable_weight": _TAKES_EFFECT,
    "method.cpo_alpha": _TAKES_EFFECT,
    "method.simpo_gamma": _TAKES_EFFECT,
    "method.center_rewards_coefficient": _TAKES_EFFECT,
    "method.rewards": Ruling("refused", "what is learned would change in the middle, and rows are checked for it"),
    "method.num_generations": _ORDER,
    "method.num_iterations": _ORDER,
    "method.max_completion_length": Ruling("refused", "the prompts were chosen by the room that it leaves"),
    "method.importance_sampling_level": _TAKES_EFFECT,
    "method.scale_rewards": _TAKES_EFFECT,
    "method.normalize_advantages": _TAKES_EFFECT,
    "method.epsilon": _TAKES_EFFECT,
    "method.epsilon_high": _TAKES_EFFECT,
    "method.mask_truncated_completions": _TAKES_EFFECT,
    "method.generation": _REPLANS,
    "method.teacher": Ruling("refused", "what is learned would change in the middle"),
    "adapter": _ADAPTER,
    "adapter.dropout": _REPLANS,
    "train.num_epochs": _TAKES_EFFECT,
    "train.max_steps": _TAKES_EFFECT,
    "train.global_batch_size": _ORDER,
    "train.micro_batch_size": _REPLANS,
    "train.learning_rate": Ruling("saved state", "the schedule of the checkpoint has its own and would overrule it"),
    "train.lr_scheduler_type": _TAKES_EFFECT,
    "train.warmup_steps": _TAKES_EFFECT,
    "train.optim": Ruling("saved state", "the checkpoint has the state of another optimizer"),
    "train.weight_decay": _STATE,
    "train.max_grad_norm": _TAKES_EFFECT,
    "train.gradient_checkpointing": _REPLANS,
    "train.seed": Ruling("saved state", "the order of the rows and the random numbers come from it"),
    "train.logging_steps": _TAKES_EFFECT,
    "train.eval_steps": _TAKES_EFFECT,
    "train.save_steps": _TAKES_EFFECT,
    "train.save_total_limit": _TAKES_EFFECT,
    "train.metric_for_best_model": _TAKES_EFFECT,
    "train.greater_is_better": _TAKES_EFFECT,
    "train.non_finite": _TAKES_EFFECT,
    "train.max_non_finite": _TAKES_EFFECT,
    "train.retry_out_of_memory": _TAKES_EFFECT,
    "parallel.strategy": _REPLANS,
    "parallel.num_processes": _REPLANS,
    "parallel.dp_shard_size": _REPLANS,
    "parallel.tp_size": _REPLANS,
    "parallel.cp_size": _REPLANS,
    "parallel.sp_size": _REPLANS,
    "parallel.reshard_after_forward": _REPLANS,
    "parallel.offload_param_device": _REPLANS,
    "parallel.offload_optimizer_device": _REPLANS,
    "parallel.nvme_path": _REPLANS,
    "parallel.max_restarts": _TAKES_EFFECT,
    "parallel.timeout_seconds": _REPLANS,
    "parallel.grace_seconds": _TAKES_EFFECT,
    "output.dir": Ruling("refused", "a run stays in its folder"),
    "output.name": Ruling("refused", "the folder of the run was named by it"),
    "output.sample_prompts": _TAKES_EFFECT,
    "output.report_to": _TAKES_EFFECT,
}
"""What becomes of edits, by dotted key; a section's holds for what is below it and not named itself."""


def ruling_of(key: tuple[str, ...]) -> Ruling | None:
    """Return the general effect of an edit of a field; None where no rule covers it."""
    names = (dotted(key[:length]) for length in range(len(key), 0, -1))
    return next((RULINGS[name] for name in names if name in RULINGS), None)


def ruling(edit: Edit, recipe: Recipe, strategy: Strategy) -> Ruling:
    """Return the effect of an edit in a run.

    Args:
        edit: The edit.
        recipe: The recipe as it was.
        strategy: How the checkpoint was spread.
    """
    name = edit.name
    if name == "train.max_grad_norm" and strategy in ("zero1", "zero2"):
        return Ruling("saved state", "DeepSpeed keeps it in the checkpoint")
    if name == "train.micro_batch_size" and recipe.method.couples_rows:
        return Ruling(
            "refused", f"{recipe.method.type} holds answers against others of their micro-batch, which would be others"
        )
    if name == "data.max_bad_rows" and recipe.data.streaming:
        return _TAKES_EFFECT
    if name == "train.learning_rate" and edit.now in (None, edit.before):
        return _TAKES_EFFECT
    effect = ruling_of(edit.key)
    assert effect is not None, f"{name}: nobody has said what becomes of an edit"
    return effect


def edits(before: Recipe, now: Recipe) -> list[Edit]:
    """The fields in which a recipe differs from what it was."""
    all_edits = list(_edits(before, now))
    default = before.method.default_learning_rate(before.adapter.type)
    # To leave it out is to ask for the default.
    return [
        edit
        for edit in all_edits
        if edit.name != "train.learning_rate" or (edit.before or default) != (edit.now or default)
    ]


def _edits(before: Section, now: Section, above: tuple[str, ...] = ()) -> Iterator[Edit]:
    if type(before) is not type(now):
        yield Edit((*above, "type"), dict(before)["type"], dict(now)["type"])
        return
    for name, value in before:
        other, key = dict(now)[name], (*above, name)
        if isinstance(value, Section) and isinstance(other, Section):
            yield from _edits(value, other, key)
        elif value != other:
            yield Edit(key, value, other)


def _shown(value: Any) -> str:
    if value is None:
        return "(left out)"
    text = to_inline_yaml(_plain(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value


def recipe_diff(*recipes: Recipe) -> dict[str, tuple[str | None, ...]]:
    """The fields in which recipes differ, each with its value in every one of them as YAML.

    None stands where a recipe has no such field, as where another method has one. Defaults count: what two recipes say
    in other words is no difference.
    """
    flat = [_flat(recipe.model_dump(mode="json")) for recipe in recipes]
    keys = dict.fromkeys(key for fields in flat for key in fields)
    differing = {key: tuple(to_inline_yaml(fields[key]) if key in fields else None for fields in flat) for key in keys}
    return {key: values for key, values in differing.items() if len(set(values)) > 1}


def _flat(fields: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat
