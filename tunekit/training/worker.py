"""Worker process of a run: reads the folder, loads, trains and saves. It decides nothing: the plan did.

The libraries' own words go to the run's log; what matters goes to the events. One of several processes is started as
`python -m tunekit.training.worker FOLDER`, by tunekit or by another launcher, and finds its place in its environment.
"""

import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from tunekit.data.tokenization.alignment import read_rows
from tunekit.data.tokenization.chat import template_in_time
from tunekit.errors import DataWorkerError, ExchangeError, MemoryShortError, RunError, Stopped, TunekitError
from tunekit.methods.arguments import give_weights, settle_reference
from tunekit.planner.decisions.isolation import VARLEN
from tunekit.planner.plan import Plan, Schedule
from tunekit.probe.model import probe_model
from tunekit.process.collectives import DATA_WORKER_HINT, data_worker_problem, exchange_problem
from tunekit.process.log_capture import library_words_to, send_nothing_at_all
from tunekit.process.processes import follow_supervisor, is_supervised, open_store
from tunekit.process.signals import Ending, Wishes
from tunekit.process.watchdog import Heart, Watchdog, gone_words
from tunekit.recipe.methods import has_teacher
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import FullAdapter
from tunekit.recipe.sections.section import Optim
from tunekit.redact import Redacting
from tunekit.runs.checkpoints.complete import publish_result
from tunekit.runs.events import Listener, first_and_last
from tunekit.runs.fingerprints import check_run_code
from tunekit.runs.prepared_data import FILES
from tunekit.runs.record import FULL, Record, disk_full, first_error_of, give_room, hold_room
from tunekit.runs.requests import forget_request
from tunekit.runs.run import Run
from tunekit.runs.small_files import Place, place_of
from tunekit.tracking.trackers import Reporting
from tunekit.training.build_trainer import (
    build_trainer,
    check_upstream,
    continued_folder,
    fuse_as_planned,
    load_adapted,
    load_policy,
    loads_bare_reference,
)
from tunekit.training.check_head import check_head
from tunekit.training.check_reference import check_isolation, check_reference, prove_attention
from tunekit.training.check_saved import check_saved
from tunekit.training.checkpointing.restore import Carried, start_of
from tunekit.training.model_card import write_card
from tunekit.training.progress import follow, follow_layers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer

    from tunekit.training.callbacks import Watch
    from tunekit.training.checkpointing.save import Saver

RESERVE_BYTES = 16 * 2**20
"""Address space that is held back for saying that memory ran out; it is not written, and takes no memory."""

DATA_WORKER_SECONDS = 5
"""Time between a broken connection to a data worker and the signal of its end, at most, in seconds."""

SAMPLE_TOKENS = 64
"""Longest answer to a sample prompt, in tokens."""


def work(run: Run, listener: Listener | None = None, place: Place | None = None, *, supervised: bool = False) -> None:
    """Train as the run folder says, in this process, from its newest complete checkpoint if it has one.

    Args:
        run: The run.
        listener: Called with every event.
        place: Which of its processes this is; its only one where left out.
        supervised: Whether another process says how the run ended. Otherwise the status does, whatever happens.

    Raises:
        TunekitError: Something that the user can mend went wrong.
        Stopped: It was asked to end before it was done, and no supervisor says so.
    """
    send_nothing_at_all()
    place = place or Place()
    record = Record(run, place, listener)
    log = run.path / log_name(place)
    with Ending(record, supervised=supervised) as ending, Reporting(record, run.recipe.output.report_to):
        try:
            with log.open("a", encoding="utf-8") as stream, library_words_to(stream), Heart(run, place) as heart:
                has_stopped = _train(run, record, heart, ending.wishes, supervised=supervised)
        except BaseException as error:
            interrupted = ending.is_due_to_a_wish(error)
            if not interrupted:
                record.write_error(error)
            if not interrupted and (isinstance(error, ExchangeError) or not isinstance(error, TunekitError)):
                with log.open("a", encoding="utf-8") as stream:
                    traceback.print_exc(file=Redacting(stream))
            if interrupted:
                raise ending.stopped(at_a_boundary=False) from error
            if not supervised:
                record.end("failed", _why(run, error))
            raise

        if has_stopped:
            stopped = ending.stopped(at_a_boundary=True)
            if not supervised:
                raise stopped


def _why(run: Run, error: BaseException) -> str:
    """Return why a run failed, as known to a process that has an error of its own."""
    if isinstance(error, ExchangeError):
        first = first_error_of(run)
        if first["kind"] != ExchangeError.__name__:
            return f"rank {first['rank']}: {first['problem']}"
    return str(error) if isinstance(error, TunekitError) else f"{type(error).__name__}: {error}"


def log_name(place: Place) -> str:
    """Name of the file that the libraries' words go to."""
    return "log.txt" if place.is_main else f"log-{place.rank}.txt"


def _train(run: Run, record: Record, heart: Heart, wishes: Wishes, *, supervised: bool) -> bool:
    from tunekit.training.verify import set_allocator

    recipe, plan = run.recipe, run.plan
    os.environ.update(plan.environment)
    set_allocator(plan.environment)
    from tunekit.training.callbacks import Watch

    watch = Watch(record, heart, full=isinstance(recipe.adapter, FullAdapter))
    try:
        with Watchdog(record, heart, plan, supervised=supervised):
            return _work(run, record, watch, wishes, recipe, plan)
    except RuntimeError as error:
        # torch raises it wherever the signal of the child reaches this process, also while another error is told.
        lost = data_worker_problem(error, record.place)
        if lost is None:
            raise
        raise DataWorkerError(f"{_where(run, watch, 'after')}: {lost}", hint=DATA_WORKER_HINT) from error


def _work(run: Run, record: Record, watch: "Watch", wishes: Wishes, recipe: Recipe, plan: Plan) -> bool:
    from tunekit.training.engines.engine import join, leave
    from tunekit.training.verify import is_out_of_memory

    reserve = bytearray(RESERVE_BYTES)
    try:
        if record.place.is_main:
            hold_room(run)
        join(plan, record.place)
        has_stopped = _load_train_save(run, record, watch, wishes, recipe, plan)
        leave()
        return has_stopped
    except (ConnectionError, EOFError):
        # A data worker's connection breaks before the system has announced its end, at which torch raises.
        time.sleep(DATA_WORKER_SECONDS)
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise disk_full(run, _where(run, watch, "after"), error) from error
    except (RuntimeError, MemoryError) as error:
        del reserve
        if is_out_of_memory(error):
            raise _memory_error(run, plan, watch, error) from error
        problem = exchange_problem(error, record.place) if isinstance(error, RuntimeError) else None
        if problem is None or data_worker_problem(error, record.place) is not None:
            raise
        hint = f"what the others did last stands in {run.path / 'log*.txt'}"
        raise ExchangeError(f"{_where(run, watch, 'after')}: {problem}{gone_words(run)}", hint=hint) from error


def _load_train_save(run: Run, record: Record, watch: "Watch", wishes: Wishes, recipe: Recipe, plan: Plan) -> bool:
    """Do all of it, and return whether it was left before its end."""
    schedule = plan.schedule
    if schedule is None:
        raise RunError(f"{run.path}: the plan has no schedule", hint="plan again with tokenised data")
    import torch

    from tunekit.training.checkpointing.result import save_model
    from tunekit.training.checkpointing.safe_load import check_states
    from tunekit.training.checkpointing.save import Saver, result_saved
    from tunekit.training.engines.engine import after_wrapping, before_steps, between_checks
    from tunekit.training.stop_at_boundary import Boundary, EvaluationLeft, evaluation_is_due

    began = time.time()
    record.enter("loading")
    watch.heart.mark("loading")
    trainer, tokenizer = _build(run, record, watch, recipe, plan, schedule)
    prompts = recipe.output.sample_prompts or []
    chat = _is_chat(run, plan)
    start = start_of(run, record.place)
    start.tell(record)
    source = start.newest.path or start.weights
    if source is not None:
        check_states(source)
    start.before_training(trainer, plan, record.place)
    carried = Carried(trainer, plan, record.place, start.newest.path)
    if start.checkpoint is not None:
        trainer.args.eval_on_start = evaluation_is_due(run, start.newest.step, record.place)

    def look() -> None:
        wishes.check()
        start.once_placed(trainer, plan)
        after_wrapping(trainer, plan)
        # A few small passes are no shapes to compile for.
        with torch.compiler.set_stance("force_eager"):
            if plan.padding_free:
                key = "data.packing" if recipe.data.packing else "data.padding_free"
                check_isolation(trainer, vocabulary=len(tokenizer), path=recipe.model.path, asked=key)
            if plan.attn_implementation == VARLEN:
                error_bound = prove_attention(trainer, vocabulary=len(tokenizer), flash=plan.flash_attention)
                record.write("attention", message=error_bound)
            check_head(trainer, plan, record, vocabulary=len(tokenizer))
            between_checks(trainer, plan)
            check_reference(trainer, plan, record, vocabulary=len(tokenizer), goes_on=start.goes_on)
            between_checks(trainer, plan)
            if not start.goes_on:
                _sample(record, "before", trainer, tokenizer, prompts, chat=chat)
        before_steps(trainer, plan, goes_on=start.goes_on)
        carried.restore()
        watch.go_on(carried.num_tokens)

    watch.before_training = look
    saver = Saver(record, watch.heart, recipe.train, start.best(plan))
    saver.attach(trainer)
    boundary = Boundary(plan, wishes, saver)
    boundary.attach(trainer)
    try:
        with saver:
            trainer.train(resume_from_checkpoint=start.checkpoint)
        if boundary.has_ended():
            return True
        if schedule.eval_steps is not None and watch.evaluated_step != schedule.num_steps:
            trainer.evaluate()
    except EvaluationLeft:
        return True
    record.enter("saving")
    watch.heart.mark("saving")
    draft = run.path / ".saving-model"
    with result_saved(record, draft):
        save_model(trainer, plan, draft)
        watch.on_result_saved()
        between_checks(trainer, plan)
        with torch.compiler.set_stance("force_eager"):
            check_saved(trainer, plan, record, draft, vocabulary=len(tokenizer))
        between_checks(trainer, plan)
        for prompt in prompts:
            if boundary.has_ended():
                return True
            with torch.compiler.set_stance("force_eager"):
                _sample(record, "after", trainer, tokenizer, [prompt], chat=chat)
        if record.place.is_main:
            tokenizer.save_pretrained(draft)
            result = _summary(run, plan, watch, saver, time.time() - began)
            write_card(run, result, draft)
            publish_result(draft, run.model_path)
            record.write("result", **result)
            give_room(run)
    record.update_status(phase="finished", exit_reason="trained to the end")
    record.write("phase", phase="finished")
    return False


def _memory_error(run: Run, plan: Plan, watch: "Watch", error: BaseException) -> RunError:
    """Return the error for exhausted memory: the planned and the actual memory, and the change to make."""
    from tunekit.planner.decisions.shortage import change_that_fits
    from tunekit.training.verify import shortage

    shortage_found = shortage(plan, watch.held, watch.context_bytes, error)
    words = shortage_found.words()
    method = plan.recipe.method
    teacher = probe_model(method.teacher) if has_teacher(method) else None
    change = change_that_fits(plan, probe_model(plan.recipe.model), shortage_found.limit_bytes, teacher)
    return MemoryShortError(
        f"{_where(run, watch, 'evaluation after')}: {plan.device.name} is out of memory{': ' * bool(words)}{words}",
        hint=f"{change.words}\n{shortage_found.table()}",
        changes=change.changes,
    )


def _where(run: Run, watch: "Watch", between: str) -> str:
    """Describe the progress of a run; `between` is what precedes the step behind which it is."""
    status = run.status()
    if status["phase"] != "training":
        return str(status["phase"])
    step = status["step"]
    return f"step {step + 1}" if watch.is_in_step else f"{between} step {step}"


def _build(
    run: Run, record: Record, watch: "Watch", recipe: Recipe, plan: Plan, schedule: Schedule
) -> "tuple[Trainer, PreTrainedTokenizerBase]":
    """Load what the folder names, and build the trainer around it."""
    check_run_code(run)
    check_upstream(recipe.method.type)
    forget_overrides(recipe.train.optim)
    from tunekit.models.load import compile_layers, keep_trained_in_float32, load_tokenizer, num_trained, to_float8
    from tunekit.training.engines.engine import before_wrapping, loading, weights_device

    tokenizer = load_tokenizer(recipe.model)
    with loading(plan):
        device = weights_device(plan, record.place)
        model = load_adapted(recipe, plan, device=device)
    fused = fuse_as_planned(model, plan)
    if fused is not None:
        record.write("fused", message=fused.words(), **fused.to_dict())
    if plan.fp8:
        to_float8(model)
    if plan.torch_compile:
        compile_layers(model)
    # What tells of a layer would split what is compiled.
    layers = [] if plan.torch_compile else follow_layers(model, watch.heart)
    trainer = build_trainer(
        run,
        recipe,
        plan,
        schedule,
        model=model,
        tokenizer=tokenizer,
        callbacks=[watch],
        place=record.place,
    )
    if loads_bare_reference(plan):
        give_weights(trainer.ref_model, load_policy(recipe, plan, device="cpu"))
    keep_trained_in_float32(trainer.model)
    settle_reference(trainer.model, plan.reference, continued_folder(plan, device))
    before_wrapping(trainer, plan)
    follow(trainer, watch.heart, layers)
    watch.trainer = trainer
    if num_trained(trainer.model) != plan.num_trainable_params:
        record.write(
            "warning",
            message=f"{num_trained(trainer.model):,} parameters are trained, "
            f"{plan.num_trainable_params:,} were planned: the memory estimate is off by as much",
        )
    return trainer, tokenizer


def _is_chat(run: Run, plan: Plan) -> bool:
    """Return whether a prompt is a user's turn of a conversation, rather than a text to complete."""
    if plan.data.format in ("preference", "unpaired_preference", "prompts"):
        return isinstance(read_rows(run.path / "data" / FILES["train"])[0]["prompt"], list)
    return plan.data.format == "messages"


def forget_overrides(optim: Optim) -> None:
    """Make bitsandbytes forget what it was told of the tensors of an earlier run in this process.

    It keeps states of embeddings in 32 bits because transformers asks for it, and remembers them by their place in the
    optimizer, where another run has another tensor (bitsandbytes 0.50, `GlobalOptimManager.index2config`).
    """
    if optim.endswith("8bit"):
        from bitsandbytes.optim import GlobalOptimManager

        GlobalOptimManager.get_instance().initialize()


def _sample(
    record: Record,
    when: str,
    trainer: "Trainer",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[str],
    *,
    chat: bool,
) -> None:
    """Answer the prompts greedily."""
    import torch

    model = trainer.model
    was_training = model.training
    model.eval()
    for prompt in prompts:
        text = prompt
        if chat:
            turn = [{"role": "user", "content": prompt}]
            with template_in_time("output.sample_prompts"):
                text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not chat).to(model.device)
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=SAMPLE_TOKENS,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
            )
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        record.write("sample", when=when, prompt=prompt, answer=answer.strip())
    model.train(was_training)


def _summary(run: Run, plan: Plan, watch: "Watch", saver: "Saver", seconds: float) -> dict[str, Any]:
    """Return the summary of a run for the user and for later plans."""
    from tunekit.training.callbacks import rates
    from tunekit.training.verify import highest

    events = run.events()
    losses = [event["loss"] for event in events if event["event"] == "log"]
    evals = [event["eval_loss"] for event in events if event["event"] == "eval"]
    ranks, timing = watch.ranks.reports, watch.timing
    step_seconds = max(rank["step_seconds"] for rank in ranks)
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
        "seconds": seconds,
        **highest(ranks),
        "ranks": ranks,
        "measures": first_and_last(events),
        "held_bytes": watch.held,
        "planned_memory_bytes": plan.memory.total_bytes,
        "model": str(run.model_path),
        "comes_from": None if plan.origin is None else plan.origin.chain,
    }


def main() -> None:
    """Work as one of the processes of the run whose folder is the only argument."""
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)
    supervised = is_supervised()
    if supervised:
        follow_supervisor()
    store = open_store()
    run, place = Run(sys.argv[1]), place_of()
    if not supervised and place.is_main:
        # Nobody else says that the run starts, or goes on.
        forget_request(run)
        run.begin()
    try:
        work(run, place=place, supervised=supervised)
        del store  # It was the others' too, to the end.
    except TunekitError:
        # It stands in the run folder, for whoever started this.
        sys.exit(2)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()
