"""Rules that most tools share: the batch, the schedule, and the arguments of transformers' Trainer.

TRL, LLaMA-Factory and ms-swift pass these on under their own names.
"""

import re
from typing import Any

from tunekit.migration import trackers
from tunekit.migration.draft import (
    Draft,
    Rule,
    Rules,
    UnfitError,
    carried,
    decided,
    each,
    flag,
    is_off,
    number,
    refused,
    silent,
    text,
    to,
    truth,
    whole,
)
from tunekit.migration.original import Entry
from tunekit.migration.report import Assumed, Fate

DEVICES = "the plan does this for the devices at hand; parallel asks for another way"
PRECISION = "model.dtype auto computes in bfloat16 where the device can; trained weights are float32"
ATTENTION = "model.attn_implementation auto takes the fastest that is correct on the device"
KERNELS = "model.kernels auto takes tunekit's own kernels where they are right for the model"
CHECKPOINTING = "train.gradient_checkpointing auto recomputes only where activations would not fit"
TEMPLATE = "the model's own chat template writes the rows; model.chat_template names another file"
OTHER_TEMPLATE = (
    "the recipe has the model's own chat template, which may write rows otherwise; model.chat_template names a file"
)
CUT = "here they are cut at their end; a larger data.max_length keeps them whole"
LOADING = "rows are read, tokenised and cached by tunekit"
MODEL_CLASS = "found from the model's own configuration"
FOLDER = "a run gets a folder of its own, runs/<name>-<time>; output.dir names another"
HUB = "tunekit does not upload while it trains"
EVALUATIONS = "rows to evaluate on are evaluated four times a run; train.eval_steps sets it"
CHECKPOINTS = "four checkpoints a run; train.save_steps sets it"
REMOTE_CODE = (
    "left out, as most models need no code of their own; where one does, read it, and set model.trust_remote_code "
    "with the commit in model.revision"
)
MULTIMODAL = "tunekit trains on text"
EXACT_RESUME = "checkpoints hold all that a run needs to go on"

OPTIMIZERS = {
    "adamw_hf": "adamw_torch",
    "adamw": "adamw_torch",
    "adam": "adamw_torch",
    "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "adamw_bnb": "adamw_bnb_8bit",
    "lion": "lion_32bit",
}
"""Names of optimizers that are others in transformers now."""


def set_batch(
    draft: Draft, micro: str, accumulation: str, *, default_micro: int = 1, default_accumulation: int = 1
) -> None:
    """Let the recipe say the batch of a step: what a device takes at once, times accumulation, times devices."""
    try:
        of_device = whole(draft.get(micro, default_micro))
        times = whole(draft.get(accumulation, default_accumulation))
    except UnfitError:
        return
    devices = draft.num_devices or 1
    draft.put("train.global_batch_size", of_device * times * devices, micro, accumulation)
    words = f"was {micro} {of_device} x {accumulation} {times}"
    words += f" x {devices} devices" if draft.num_devices else ", for one device"
    draft.comments["train.global_batch_size"] = words
    if draft.num_devices is None:
        what = (
            f"how many devices it ran on is not in the file: train.global_batch_size {of_device * times} is that of one"
        )
        draft.suspect(micro, f"{what}; --num-devices 8 multiplies it")


def batch(draft: Draft, entry: Entry) -> Fate:
    """A key that is a factor of the batch of a step."""
    whole(entry.value)
    words = draft.comments.get("train.global_batch_size", "")
    total = draft.values.get("train.global_batch_size")
    return Fate("carried", f"train.global_batch_size: {total}  ({words})")


def accumulation(draft: Draft, entry: Entry) -> Fate:
    """The accumulation: a factor of the batch, whose split is the plan's."""
    if not isinstance(entry.value, str):
        whole(entry.value)
    total = draft.values.get("train.global_batch_size")
    return Fate("decided", f"the plan splits train.global_batch_size {total} into micro-batches that fit")


def optimizer(draft: Draft, entry: Entry) -> Fate:
    """An optimizer by transformers' name, or by an older one."""
    name = text(entry.value).lower()
    name = OPTIMIZERS.get(name, name)
    draft.put("train.optim", name, entry.key)
    return carried("train.optim", name)


def scheduler(draft: Draft, entry: Entry) -> Fate:
    """A schedule by transformers' name."""
    name = text(entry.value).lower()
    draft.put("train.lr_scheduler_type", name, entry.key)
    return carried("train.lr_scheduler_type", name)


def warmup_steps(draft: Draft, entry: Entry) -> Fate:
    """Steps of warm-up, which go before a share."""
    steps = number(entry.value)
    ratio = draft.get("warmup_ratio")
    if ratio:
        if not steps:
            return Fate("silent", "0, and warmup_ratio says the share")
        draft.suspect(entry.key, f"warmup_steps {steps} and warmup_ratio {ratio} are both given; the steps count")
    draft.put("train.warmup_steps", steps, entry.key)
    return carried("train.warmup_steps", steps)


def warmup_ratio(draft: Draft, entry: Entry) -> Fate:
    """A share of all steps for warm-up."""
    ratio = number(entry.value)
    if draft.get("warmup_steps"):
        return Fate("silent", "warmup_steps goes before it")
    if ratio >= 1:
        raise UnfitError(f"{ratio} is no share of the steps; warmup_steps counts them")
    draft.put("train.warmup_steps", ratio, entry.key)
    return carried("train.warmup_steps", ratio)


def max_steps(draft: Draft, entry: Entry) -> Fate:
    """Steps instead of epochs; below 1 they are not counted."""
    steps = whole(entry.value)
    if steps < 1:
        return Fate("silent", "epochs count")
    draft.put("train.max_steps", steps, entry.key)
    return carried("train.max_steps", steps)


def epochs(draft: Draft, entry: Entry) -> Fate:
    """Epochs, unless steps are given."""
    num_epochs = number(entry.value)
    if _steps(draft) > 0:
        return Fate("silent", "max_steps goes before it")
    draft.put("train.num_epochs", num_epochs, entry.key)
    return carried("train.num_epochs", num_epochs)


def _steps(draft: Draft) -> float:
    max_steps = draft.get("max_steps", 0)
    return max_steps if isinstance(max_steps, int | float) else 0


def some_steps(target: str, why: str) -> Rule:
    """Steps between two evaluations or checkpoints; a share of all is left to the plan."""

    def rule(draft: Draft, entry: Entry) -> Fate:
        steps = number(entry.value)
        if 0 < steps < 1:
            return Fate("decided", f"{steps:g} of all steps: {why}")
        if steps <= 0:
            return Fate("silent", "is off")
        strategy = "save_strategy" if target == "train.save_steps" else "eval_strategy"
        value = draft.get(strategy, draft.get("evaluation_strategy") if strategy == "eval_strategy" else None)
        if value is not None and str(value) not in ("steps", "best"):
            return Fate("silent", f"{strategy} {value} goes before it")
        draft.put(target, whole(steps), entry.key)
        return carried(target, whole(steps))

    return rule


def save_total_limit(draft: Draft, entry: Entry) -> Fate:
    """Checkpoints that are kept; two at least."""
    limit = whole(entry.value)
    if limit < 1:
        return Fate("silent", "is off")
    draft.put("train.save_total_limit", max(2, limit), entry.key)
    words = "  (two at least: one may turn out damaged)" if limit == 1 else ""
    return Fate("carried", f"train.save_total_limit: {max(2, limit)}{words}")


def metric(draft: Draft, entry: Entry) -> Fate:
    """The measure of the best checkpoint, by its full name."""
    name = text(entry.value)
    name = name if name.startswith("eval_") else f"eval_{name}"
    draft.put("train.metric_for_best_model", name, entry.key)
    return carried("train.metric_for_best_model", name)


def trainer_arg(name: str | None = None) -> Rule:
    """Something that TRL's trainer takes by this name, and that is off where it is nothing."""

    def rule(draft: Draft, entry: Entry) -> Fate:
        root = entry.key.partition(".")[0]
        is_inside = root != entry.key and name in (None, root)
        value = draft.get(root) if is_inside else entry.value
        if is_off(value):
            return Fate("silent", "is off")
        target = f"method.trainer_args.{name or root}"
        draft.put(target, value, entry.key)
        return carried(target, value)

    return rule


def run_name(draft: Draft, entry: Entry) -> Fate:
    """The name of a run, in letters that a folder may have."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text(entry.value)).strip("-._")[:100]
    if not name:
        raise UnfitError("has no letters that a run's name may have")
    draft.put("output.name", name, entry.key)
    return carried("output.name", name)


def half(draft: Draft, entry: Entry) -> Fate:
    """16-bit floats of the older kind, where they are asked for."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    other = draft.get("bf16", draft.get("bfloat16"))
    if other is not None and not is_off(other) and other != "auto":
        draft.suspect(entry.key, "bf16 and fp16 are both on; bfloat16 is taken")
        return Fate("decided", PRECISION)
    draft.put("model.dtype", "float16", entry.key)
    return carried("model.dtype", "float16")


def dtype(draft: Draft, entry: Entry) -> Fate:
    """The type of the weights; bfloat16 is what tunekit takes anyway."""
    name = text(entry.value).removeprefix("torch.")
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)
    if name in ("auto", "bfloat16"):
        return Fate("decided", PRECISION)
    draft.put("model.dtype", name, entry.key)
    return carried("model.dtype", name)


def attention(draft: Draft, entry: Entry) -> Fate:
    """The attention; only the plain one is asked for on purpose."""
    if entry.value == "eager":
        draft.put("model.attn_implementation", "eager", entry.key)
        return carried("model.attn_implementation", "eager")
    return Fate("decided", ATTENTION)


def holdout(draft: Draft, entry: Entry) -> Fate:
    """A share of the rows to evaluate on."""
    size = number(entry.value)
    if size == 0:
        return Fate("silent", "is off")
    if draft.values.get("data.eval") is not None:
        return Fate("silent", "rows to evaluate on are named")
    if size >= 1:
        return Fate("unsupported", f"{size} rows: tunekit holds out a share; set data.eval_size")
    draft.put("data.eval_size", size, entry.key)
    return carried("data.eval_size", size)


def best_at_end(draft: Draft, entry: Entry) -> Fate:
    """The wish to end with the best state rather than with the last."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    return Fate("unsupported", "a run ends with its last state; its best checkpoint is kept beside")


def precision_bf16(draft: Draft, entry: Entry) -> Fate:
    """The usual 16-bit floats."""
    if entry.value != "auto" and not truth(entry.value):
        half_asked = draft.get("fp16", draft.get("float16"))
        if half_asked is None or is_off(half_asked):
            draft.suspect(entry.key, f"{entry.key} is off, and so is fp16: all was computed in float32")
            draft.put("model.dtype", "float32", entry.key)
            return carried("model.dtype", "float32")
    return Fate("decided", PRECISION)


def shuffle(draft: Draft, entry: Entry) -> Fate:
    """Migrate whether rows are shuffled."""
    if truth(entry.value):
        return Fate("silent", "data.shuffle is on by default")
    draft.put("data.shuffle", False, entry.key)
    return carried("data.shuffle", False)


def not_shuffled(draft: Draft, entry: Entry) -> Fate:
    """The same, the other way round."""
    if not truth(entry.value):
        return Fate("silent", "data.shuffle is on by default")
    draft.put("data.shuffle", False, entry.key)
    return carried("data.shuffle", False)


def resume_from(draft: Draft, entry: Entry) -> Fate:
    """A checkpoint of the other tool to go on from."""
    if is_off(entry.value):
        return Fate("silent", "is off")
    return Fate(
        "unsupported", "a checkpoint of another tool cannot be gone on with; `tunekit resume` goes on with runs"
    )


def clipping(draft: Draft, entry: Entry) -> Fate:
    """The norm that gradients are clipped to."""
    norm = number(entry.value)
    if norm <= 0:
        return Fate(
            "unsupported", "0 clips nothing: tunekit clips at 1.0; a large train.max_grad_norm comes to the same"
        )
    draft.put("train.max_grad_norm", norm, entry.key)
    return carried("train.max_grad_norm", norm)


def logging(draft: Draft, entry: Entry) -> Fate:
    """Steps between two logged losses; a share of all steps is left out."""
    steps = number(entry.value)
    if steps < 1:
        return Fate("decided", "every step is logged; train.logging_steps sets it")
    draft.put("train.logging_steps", whole(steps), entry.key)
    return carried("train.logging_steps", whole(steps))


def seed(draft: Draft, entry: Entry) -> Fate:
    """The seed."""
    value = whole(entry.value)
    draft.put("train.seed", value, entry.key)
    return carried("train.seed", value)


HF_RULES: Rules = {
    "num_train_epochs": epochs,
    "max_steps": max_steps,
    "per_device_train_batch_size": batch,
    "gradient_accumulation_steps": accumulation,
    "per_device_eval_batch_size": decided("evaluation takes the micro-batch of training"),
    "auto_find_batch_size": decided("the plan takes the largest micro-batch that fits"),
    "learning_rate": to("train.learning_rate", number),
    "lr_scheduler_type": scheduler,
    "lr_scheduler_kwargs": trainer_arg("lr_scheduler_kwargs"),
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "optim": optimizer,
    "optim_args": trainer_arg(),
    "optim_target_modules": refused("GaLore and its kind are not there; adapter: lora saves the same memory"),
    "weight_decay": to("train.weight_decay", number),
    "max_grad_norm": clipping,
    **each(
        trainer_arg(),
        "adam_beta1 adam_beta2 adam_epsilon label_smoothing_factor",
    ),
    "neftune_noise_alpha": trainer_arg(),
    "seed": seed,
    "data_seed": decided("train.seed seeds the order of rows too"),
    "full_determinism": trainer_arg(),
    "logging_steps": logging,
    **each(
        silent("every loss is logged from the first step on"),
        "logging_strategy logging_first_step logging_dir log_level log_level_replica disable_tqdm "
        "logging_nan_inf_filter log_on_each_node include_num_input_tokens_seen include_tokens_per_second "
        "include_effective_tokens_per_second skip_memory_metrics plot_loss",
    ),
    "eval_strategy": decided(EVALUATIONS),
    "evaluation_strategy": decided(EVALUATIONS),
    "eval_steps": some_steps("train.eval_steps", EVALUATIONS),
    "do_eval": decided(EVALUATIONS),
    "eval_on_start": decided("a run evaluates before its first step"),
    **each(
        decided("the plan lays out evaluation as training"),
        "eval_accumulation_steps prediction_loss_only batch_eval_metrics eval_delay fp16_full_eval "
        "bf16_full_eval eval_do_concat_batches eval_packing",
    ),
    "save_strategy": decided(CHECKPOINTS),
    "save_steps": some_steps("train.save_steps", CHECKPOINTS),
    "save_total_limit": save_total_limit,
    "save_only_model": decided(EXACT_RESUME),
    "save_safetensors": silent("weights are always safetensors"),
    "save_on_each_node": decided("a run is saved once"),
    "load_best_model_at_end": best_at_end,
    "metric_for_best_model": metric,
    "greater_is_better": to("train.greater_is_better", truth),
    "resume_from_checkpoint": resume_from,
    "ignore_data_skip": decided(EXACT_RESUME),
    "bf16": precision_bf16,
    "fp16": half,
    "tf32": decided(PRECISION),
    **each(
        decided(PRECISION),
        "fp16_opt_level half_precision_backend fp16_backend",
    ),
    "gradient_checkpointing": decided(CHECKPOINTING),
    "gradient_checkpointing_kwargs": decided(CHECKPOINTING),
    "deepspeed": decided(DEVICES),
    "fsdp": decided(DEVICES),
    "fsdp_config": decided(DEVICES),
    "fsdp_transformer_layer_cls_to_wrap": decided(DEVICES),
    "fsdp_min_num_params": decided(DEVICES),
    "parallelism_config": decided(DEVICES),
    "accelerator_config": decided(DEVICES),
    "local_rank": decided(DEVICES),
    "use_cpu": decided(DEVICES),
    **each(
        decided(DEVICES),
        "ddp_timeout ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
    ),
    **each(
        decided("the plan says how many processes make batches"),
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
        "dataloader_persistent_workers dataloader_drop_last",
    ),
    "torch_compile": decided("train.torch_compile auto compiles where it is known to pay"),
    "torch_compile_backend": decided("train.torch_compile auto compiles where it is known to pay"),
    "torch_compile_mode": decided("train.torch_compile auto compiles where it is known to pay"),
    "torch_empty_cache_steps": decided("the plan keeps to the memory that is there"),
    "use_liger_kernel": decided(KERNELS),
    "liger_kernel_config": decided(KERNELS),
    "group_by_length": refused("rows are not grouped by length; data.packing or data.padding_free leave no padding"),
    "length_column_name": silent("rows are not grouped by length"),
    "remove_unused_columns": decided(LOADING),
    "output_dir": decided(FOLDER),
    "overwrite_output_dir": decided(FOLDER),
    "run_name": run_name,
    "project": trackers.variable("TRACKIO_PROJECT"),
    "trackio_space_id": trackers.variable("TRACKIO_SPACE_ID"),
    "report_to": trackers.report_to,
    "do_train": flag(silent("`tunekit train` trains"), refused("tunekit trains; it has no run without")),
    "do_predict": refused("a run trains; what its model says is another command's"),
    "push_to_hub": refused(HUB),
    **each(
        silent("nothing is uploaded"),
        "hub_model_id hub_strategy hub_token hub_private_repo hub_revision hub_always_push",
    ),
}
"""Arguments of transformers' Trainer."""


def too_long(*same: str) -> Rule:
    """Return the rule for rows longer than the longest sequence, which are truncated at their end here.

    Args:
        same: Values that mean to cut at the end.
    """

    def rule(draft: Draft, entry: Entry) -> Fate:
        if entry.value in same:
            return Fate("silent", "rows longer than data.max_length are cut at their end here too")
        verb = {"drop": "dropped", "delete": "dropped", "raise": "an error"}.get(str(entry.value), f"'{entry.value}'")
        return Fate("different", f"rows longer than data.max_length are {verb} in {draft.tool}; {CUT}")

    return rule


def drops_too_long(draft: Draft, key: str, value: str) -> None:
    """Note that a tool drops rows that are too long, where the original does not say so."""
    if draft.get(key) is None and draft.values.get("method.type") != "grpo":
        draft.differ(key, value, f"{draft.tool} drops rows longer than data.max_length by itself; {CUT}")


def hf_defaults(draft: Draft, *, learning_rate: float) -> None:
    """Record the defaults of transformers' Trainer that differ from tunekit's."""
    own = f"{draft.tool}'s default, where the file says nothing"
    if "train.max_steps" not in draft.values:
        draft.assume("train.num_epochs", 3, own)
    draft.assume("train.learning_rate", learning_rate, own)
    draft.assume("train.lr_scheduler_type", "linear", own)
    draft.assume("train.warmup_steps", 0, own)


def source(path: str, **fields: Any) -> dict[str, Any]:
    """A source of rows without what it leaves out."""
    return {"path": path, **{name: value for name, value in fields.items() if value not in (None, {}, [])}}


def put_sources(draft: Draft, target: str, sources: list[dict[str, Any]], *keys: str) -> None:
    """Let the recipe name its rows; what a single source says of its rows stands in the data section."""
    if not sources:
        return
    if len(sources) > 1 or target != "data.train":
        for source_values in sources:
            if set(source_values) == {"path"} and len(sources) == 1:
                draft.put(target, source_values["path"], *keys)
                return
        draft.put(target, sources if len(sources) > 1 else sources[0], *keys)
        return
    (only,) = sources
    for name in ("format", "columns", "loss_on"):
        if name in only:
            draft.put(f"data.{name}", only.pop(name), *keys)
    only.pop("weight", None)
    draft.put(target, only["path"] if set(only) == {"path"} else only, *keys)


def room_for_answers(draft: Draft, *, prompt: int) -> None:
    """Let the longest sequence have room for a prompt and its answer, which tunekit counts together.

    Args:
        draft: What is made.
        prompt: Longest prompt, in tokens, where the tool counts it by itself; 0 where its length is that of both.
    """
    answer = draft.values.get("method.max_completion_length", 512)
    length = draft.values.get("data.max_length", 0)
    if not isinstance(answer, int) or not isinstance(length, int):
        return
    if prompt or length <= answer:
        together = (prompt or 512) + answer
        draft.values["data.max_length"] = together
        words = f"a prompt of {prompt or 512} tokens and an answer of {answer}, which data.max_length counts together"
        draft.assumed.append(Assumed("data.max_length", together, words))
