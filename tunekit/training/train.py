"""Training of a run in one of its processes: load what the folder names, train, and save the result."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tunekit.errors import ModelError, RunError
from tunekit.estimates.learning_rates import has_groups, plain_name, rate_of, unmatched
from tunekit.methods.arguments import give_weights, settle_reference
from tunekit.methods.run_trainer import RunTrainer, set_learning_rates
from tunekit.models import load
from tunekit.models.base_parts import load_plain, save_plain
from tunekit.models.documents import run_by_document, run_decoder_by_document
from tunekit.models.fusion.tiling import tile_mlps
from tunekit.models.load import (
    compile_layers,
    keep_trained,
    load_tokenizer,
    num_trained,
    read_adapter,
    to_float8,
    unrounded,
)
from tunekit.planner.plan import VARLEN, Plan, Schedule
from tunekit.process.garbage import collected_seldom, set_aside
from tunekit.process.signals import Wishes
from tunekit.recipe.methods import has_teacher
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import AdaloraAdapter, FullAdapter, LoraAdapter, PromptTuningAdapter
from tunekit.recipe.sections.section import OUR_OPTIMS, Optim
from tunekit.runs.checkpoints.complete import publish_result
from tunekit.runs.events import first_and_last
from tunekit.runs.fingerprints import check_run_code
from tunekit.runs.record import Record, give_room
from tunekit.training import build_trainer
from tunekit.training.callbacks import Boundary, EvaluationLeft, Watch, evaluation_is_due, follow, follow_layers, rates
from tunekit.training.check_head import check_head
from tunekit.training.check_media import check_kinds, check_mixed_rows, check_packed_rows
from tunekit.training.check_reference import check_isolation, check_new_layers, check_reference, prove_attention
from tunekit.training.check_saved import check_saved
from tunekit.training.checkpointing.restore import Carried, Start, start_of
from tunekit.training.checkpointing.safe_load import check_states
from tunekit.training.checkpointing.save import Saver, result_saved
from tunekit.training.engines import engine
from tunekit.training.model_card import write_card
from tunekit.training.rank_allocation import RankAllocation
from tunekit.training.restarts import Restarts
from tunekit.training.samples import Sampler, sample_prompts


@dataclass(frozen=True)
class Ready:
    """A trainer that is ready for its first step, with what watches it.

    Attributes:
        trainer: The trainer. Its `train` proves what the plan promises before the first step.
        tokenizer: Its tokenizer.
        start: Start of the training, with the checkpoint that it resumes from.
        saver: Saver of its checkpoints.
        boundary: What stops it after a step.
        sample: Answers prompts, and records the answers.
        vocabulary: Number of tokens that the tokenizer knows.
    """

    trainer: RunTrainer
    tokenizer: PreTrainedTokenizerBase
    start: Start
    saver: Saver
    boundary: Boundary
    sample: Sampler
    vocabulary: int


def make_ready(watch: Watch, wishes: Wishes) -> Ready:
    """Load what the folder of a run names, and build the trainer with all that watches and proves it.

    Raises:
        RunError: The plan has no schedule.
    """
    record, plan = watch.record, watch.plan
    run, recipe, place, schedule = record.run, plan.recipe, record.place, plan.schedule
    if schedule is None:
        raise RunError(f"{run.path}: the plan has no schedule", hint="plan again with tokenized data")
    watch.enter("loading")
    start = start_of(run, place)
    source = start.newest.path or start.weights
    trainer, tokenizer = build(watch, schedule, source)
    sample = Sampler(watch, tokenizer, is_chat=plan.data.is_chat)
    start.tell(record)
    if source is not None:
        check_states(source)
    start.before_training(trainer, plan, place)
    carried = Carried(trainer, plan, place, start.newest.path)
    if start.newest.path is not None:
        trainer.args.eval_on_start = evaluation_is_due(run, schedule, start.newest, place)

    def look() -> None:
        wishes.check()
        load.keep_positions(trainer.model, trainer.model.config)
        start.once_placed(trainer, plan)
        engine.after_wrapping(trainer, plan)
        # A few small passes are no shapes to compile for.
        with torch.compiler.set_stance("force_eager"):
            prove(trainer, plan, record, vocabulary=len(tokenizer), start=start)
            if not start.goes_on:
                sample("before", sample_prompts(run, recipe))
        engine.before_steps(trainer, plan, goes_on=start.goes_on)
        carried.restore()
        watch.go_on(carried.num_tokens)

    watch.before_training = look
    saver = Saver(record, plan, watch.heart, start)
    saver.attach(trainer)
    boundary = Boundary(plan, wishes, saver)
    boundary.attach(trainer)
    return Ready(trainer, tokenizer, start, saver, boundary, sample, len(tokenizer))


def prove(trainer: RunTrainer, plan: Plan, record: Record, *, vocabulary: int, start: Start) -> None:
    """Prove on the loaded model what the plan promises: isolation, attention, head, media, reference, new layers.

    Raises:
        TunekitError: A check fails.
    """
    recipe = plan.recipe
    packs_media = plan.padding_free and plan.data.media
    if plan.padding_free and not packs_media:
        key = "data.packing" if recipe.data.packing else "data.padding_free"
        models = [(recipe.model.path, trainer.model)]
        if has_teacher(recipe.method):
            models.append((recipe.method.teacher.path, trainer.teacher_model))
        for path, model in models:
            check_isolation(trainer, model, vocabulary=vocabulary, path=path, asked=key)
    if plan.attn_implementation == VARLEN:
        error_bound = prove_attention(trainer, vocabulary=vocabulary, flash=plan.flash_attention)
        record.write("attention", message=error_bound)
    if plan.data.media:
        check_kinds(trainer, plan)
    check_head(trainer, plan, record, vocabulary=vocabulary)
    engine.between_checks(trainer, plan)
    if plan.data.media:
        (check_packed_rows if packs_media else check_mixed_rows)(trainer, plan)
        engine.between_checks(trainer, plan)
    if plan.reference != "none":
        check_reference(trainer, plan, record, vocabulary=vocabulary, goes_on=start.goes_on)
        engine.between_checks(trainer, plan)
    if not start.goes_on and isinstance(recipe.adapter, FullAdapter) and recipe.adapter.new_layers is not None:
        check_new_layers(trainer, recipe.adapter, vocabulary=vocabulary)


def load_train_save(watch: Watch, wishes: Wishes) -> bool:
    """Load, train and save, and return whether the run was stopped before its end.

    Raises:
        RunError: The plan has no schedule, or a check fails.
    """
    record, plan = watch.record, watch.plan
    run, recipe, place = record.run, plan.recipe, record.place
    began = time.time()
    with collected_seldom():
        ready = make_ready(watch, wishes)
    trainer, saver, boundary = ready.trainer, ready.saver, ready.boundary
    newest, prompts = ready.start.newest.path, sample_prompts(run, recipe)
    try:
        with saver, set_aside():
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        if boundary.has_ended():
            return True
        if (
            plan.schedule is not None
            and plan.schedule.eval_steps is not None
            and watch.evaluated_step != trainer.state.global_step
        ):
            trainer.evaluate()
    except EvaluationLeft:
        return True
    if recipe.train.averages:
        # The result is the average, as in checkpoints.
        trainer.optimizer.eval()
    if trainer.rank_allocation is not None:
        trainer.rank_allocation.finish()
    watch.enter("saving")
    draft = run.path / ".saving-model"
    with result_saved(record, draft):
        engine.save_model(trainer, plan, draft)
        watch.on_result_saved()
        engine.between_checks(trainer, plan)
        with torch.compiler.set_stance("force_eager"):
            check_saved(trainer, plan, record, draft, vocabulary=ready.vocabulary)
        engine.between_checks(trainer, plan)
        for prompt in prompts:
            if boundary.has_ended():
                return True
            with torch.compiler.set_stance("force_eager"):
                ready.sample("after", [prompt])
        if place.is_main:
            publish(watch, saver, ready.tokenizer, draft, time.time() - began)
    record.update_status(phase="finished", exit_reason=saver.stopping.words or "trained to the end")
    record.write("phase", phase="finished")
    return False


def publish(watch: Watch, saver: Saver, tokenizer: PreTrainedTokenizerBase, draft: Path, seconds: float) -> None:
    """Add tokenizer and card to a saved model or adapter, and make it the result of the run, in the main process.

    Args:
        watch: Watch of the run.
        saver: Saver of its checkpoints.
        tokenizer: Tokenizer of the model.
        draft: Folder of the saved model or adapter.
        seconds: How long the run took, since it was last started.
    """
    run, plan = watch.record.run, watch.plan
    load.save_processor(plan.recipe.model, tokenizer, draft)
    if plan.base.rope_scaling is not None and not isinstance(plan.recipe.adapter, FullAdapter):
        # PEFT saves an adapter without the configuration that its base was changed to.
        load.read_config(plan.base).save_pretrained(draft)
    result = _summary(watch, saver, seconds)
    write_card(run, result, draft)
    publish_result(draft, run.model_path)
    watch.record.write("result", **result)
    give_room(run)


def build(
    watch: Watch, schedule: Schedule, checkpoint: Path | None = None
) -> tuple[RunTrainer, PreTrainedTokenizerBase]:
    """Load what the folder names, and build the trainer around it, which is to get the weights of a checkpoint."""
    record, plan = watch.record, watch.plan
    recipe = plan.recipe
    check_run_code(record.run)
    build_trainer.check_upstream(recipe.method.type)
    forget_overrides(recipe.train.optimizer)
    tokenizer = load_tokenizer(recipe.model)
    with engine.loading(plan):
        device = engine.weights_device(plan, record.place)
        model = build_trainer.load_adapted(plan, device=device, run=record.run, checkpoint=checkpoint)
    engine.after_loading(model, plan)
    if plan.by_document:
        run_by_document(model)
    if plan.decoder_by_document:
        run_decoder_by_document(model)
    fused = build_trainer.fuse_as_planned(model, plan)
    if fused is not None:
        record.write("fused", message=fused.words(), **fused.to_dict())
    if plan.mlp_tile_tokens is not None:
        tile_mlps(model, plan.mlp_tile_tokens)
    if plan.fp8:
        to_float8(model)
    if plan.torch_compile:
        compile_layers(model)
    # What tells of a layer would split what is compiled.
    layers = [] if plan.torch_compile else follow_layers(model, watch.heart)
    with unrounded(model):
        trainer = build_trainer.build_trainer(
            record.run, plan, schedule, model=model, tokenizer=tokenizer, callbacks=[watch], place=record.place
        )
    watch.tool_hosts = trainer.tool_hosts
    if build_trainer.loads_bare_reference(plan):
        give_weights(trainer.ref_model, build_trainer.load_policy(plan, device="cpu"))
    keep_trained(trainer.model, plan.trained_dtype)
    settle_reference(trainer.model, plan.reference, build_trainer.continued_folder(plan, device))
    engine.before_wrapping(trainer, plan)
    if isinstance(recipe.adapter, LoraAdapter) and recipe.adapter.moves_base:
        save_and_load_plain(trainer, recipe.adapter)
    if isinstance(recipe.adapter, LoraAdapter) and recipe.adapter.relora is not None:
        Restarts(trainer, recipe.adapter, recipe.train.seed)
    if isinstance(recipe.adapter, PromptTuningAdapter):
        # PEFT loads no virtual tokens to be trained further.
        trainer.wrap("load_weights", lambda load, folder, model=None: read_adapter(trainer.model, Path(folder)))
    if isinstance(recipe.adapter, AdaloraAdapter):
        trainer.rank_allocation = RankAllocation(trainer, recipe.adapter, schedule.num_steps)
    if has_groups(recipe):
        give_learning_rates(trainer, recipe)
    follow(trainer, watch.heart, layers)
    watch.trainer = trainer
    if watch.tool_hosts:
        trainer.wrap("calculate_rewards", watch.tell_lost)
    compare_trained(trainer, plan, record)
    return trainer, tokenizer


def give_learning_rates(trainer: RunTrainer, recipe: Recipe) -> None:
    """Give the parameters of a trainer the learning rates of a recipe that has several.

    Raises:
        RunError: A pattern matches no parameter of the loaded model.
    """
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    if patterns := unmatched(recipe, map(plain_name, trained)):
        raise RunError(
            f"train.learning_rates: {patterns[0]!r} matches no parameter of the loaded model, whose names "
            "differ from those in its files",
            hint=f"write a pattern that matches both; names are such as {plain_name(trained[0])}",
        )
    num_layers = trainer.model.config.get_text_config(decoder=True).num_hidden_layers
    set_learning_rates(
        trainer,
        lambda name, parameter: rate_of(recipe, plain_name(name), parameter.dim(), num_layers),
        recipe.learning_rate,
    )


def compare_trained(trainer: RunTrainer, plan: Plan, record: Record) -> None:
    """Compare the number of trained parameters with the planned one, and warn where only the estimate is off.

    Raises:
        ModelError: The recipe chooses modules by names that differ between the model and its files.
        RunError: It chooses parameters by such names.
    """
    recipe, num = plan.recipe, num_trained(trainer.model)
    is_bound = isinstance(recipe.adapter, LoraAdapter) and recipe.adapter.distributes_ranks
    if num == plan.num_trainable_params or (is_bound and num < plan.num_trainable_params):
        return
    if isinstance(recipe.adapter, LoraAdapter) and recipe.adapter.chooses_by_name:
        problem = f"adapter: the model has {num:,} parameters in the selected modules, "
        problem += f"but {plan.num_trainable_params:,} are planned: names differ between its files and its modules"
        raise ModelError(problem, hint="select modules by the last parts of their names")
    if isinstance(recipe.adapter, FullAdapter) and recipe.adapter.is_partial:
        raise RunError(
            f"adapter.unfrozen_parameters: {num:,} parameters match in the loaded model, "
            f"but {plan.num_trainable_params:,} in its files, whose names transformers changes",
            hint="write patterns that match both, such as the ends of names",
        )
    record.write(
        "warning",
        message=f"{num:,} trainable parameters, but {plan.num_trainable_params:,} planned: "
        "the memory estimate is off by the difference",
    )


def save_and_load_plain(trainer: RunTrainer, adapter: LoraAdapter) -> None:
    """Have a trainer's checkpoints hold an adapter that applies to the base weights as they were."""

    def save(save_weights: Any, folder: str, *args: Any, **kwargs: Any) -> None:
        save_weights(folder, *args, **kwargs)
        # The other processes are called too, and write nothing.
        if trainer.args.should_save:
            save_plain(trainer.model, adapter, Path(folder))

    trainer.wrap("save_weights", save)
    trainer.wrap("load_weights", lambda load, folder, model=None: load_plain(trainer.model, Path(folder)))


def forget_overrides(optim: Optim) -> None:
    """Make bitsandbytes forget what it was told of the tensors of an earlier run in this process.

    It keeps states of embeddings in 32 bits because transformers asks for it, and remembers them by their place in the
    optimizer, where another run has another tensor (bitsandbytes 0.50, `GlobalOptimManager.index2config`).
    """
    if optim.endswith("8bit") and optim not in OUR_OPTIMS:
        from bitsandbytes.optim import GlobalOptimManager

        GlobalOptimManager.get_instance().initialize()


def _summary(watch: Watch, saver: Saver, seconds: float) -> dict[str, Any]:
    """Return the summary of a run for the user and for later plans."""
    run, plan = watch.record.run, watch.plan
    events = run.events()
    losses = [event["loss"] for event in events if event["event"] == "log"]
    evals = [event["eval_loss"] for event in events if event["event"] == "eval"]
    ranks, timing = watch.ranks.reports, watch.timing
    step_seconds = max(rank["step_seconds"] for rank in ranks)
    most = max(ranks, key=lambda rank: rank["peak_memory_bytes"])
    return {
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "first_eval_loss": evals[0] if evals else None,
        "eval_loss": evals[-1] if evals else None,
        "num_tokens": watch.num_tokens,
        **rates(plan, watch.num_tokens - watch.num_tokens_before, step_seconds),
        "step_seconds": step_seconds,
        "optimizer_seconds": timing.optimizer_seconds,
        "data_seconds": timing.data_seconds,
        "generation_seconds": timing.generation_seconds if timing.generates else None,
        "evaluation_seconds": timing.evaluation_seconds,
        "saving_seconds": timing.saving_seconds,
        "checkpoints": saver.summary(),
        "stopped_early": saver.stopping.words,
        "seconds": seconds,
        **{name: value for name, value in most.items() if name.startswith("peak_")},
        "ranks": ranks,
        "measures": first_and_last(events),
        "held_bytes": watch.held,
        "planned_memory_bytes": plan.memory.total_bytes,
        "model": str(run.model_path),
        "comes_from": None if plan.origin is None else plan.origin.chain,
    }
