"""What a process does in a run: read the folder, load, train, save. It decides nothing: the plan did.

The libraries' own words go to the run's log; what matters goes to the events. One of several processes is started as
`python -m tunekit.run.worker FOLDER`, by tunekit or by another launcher, and finds its place in its environment.
"""

import os
import sys
import time
import traceback
from threading import Event
from typing import TYPE_CHECKING, Any

from tunekit.data.alignment import read_rows
from tunekit.errors import DataWorkerError, ExchangeError, RunError, TunekitError
from tunekit.methods.reference import give_weights, settle_reference
from tunekit.planner.plan import Plan, Schedule
from tunekit.probe.model import probe_model
from tunekit.recipe.adapters import FullAdapter
from tunekit.recipe.methods import DistillationMethod
from tunekit.recipe.schema import Recipe
from tunekit.recipe.train import Optim
from tunekit.run.card import write_card
from tunekit.run.check_reference import check_reference
from tunekit.run.checkpoint import newest_complete
from tunekit.run.events import Listener
from tunekit.run.exchange import DATA_WORKER_HINT, data_worker_problem, exchange_problem, same_everywhere
from tunekit.run.group import follow_supervisor, is_supervised, open_store
from tunekit.run.heart import Heart
from tunekit.run.interrupt import remembered_interrupts
from tunekit.run.isolation import check_isolation
from tunekit.run.measures import first_and_last
from tunekit.run.place import Place, place_of
from tunekit.run.position import follow, follow_layers
from tunekit.run.prepare import FILES
from tunekit.run.quiet import library_words_to
from tunekit.run.record import INTERRUPTED, Record, errors_of, first_error_of
from tunekit.run.run import Run
from tunekit.run.trainer import build_trainer, continued_folder, load_adapted, load_policy, loads_bare_reference
from tunekit.run.watchdog import Watchdog, gone_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer

    from tunekit.run.callback import Watch

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
    """
    place = place or Place()
    record = Record(run, place, listener)
    log = run.path / log_name(place)
    with remembered_interrupts(sigterm=not supervised) as asked_to_stop:
        try:
            with log.open("a", encoding="utf-8") as stream, library_words_to(stream), Heart(run, place) as heart:
                _train(run, record, heart, asked_to_stop, supervised=supervised)
        except BaseException as error:
            # Where all are interrupted, some end before others, who then see that and not their own interrupt.
            interrupted = asked_to_stop.is_set() or isinstance(error, KeyboardInterrupt)
            if not interrupted:
                record.write_error(error)
            if not interrupted and (isinstance(error, ExchangeError) or not isinstance(error, TunekitError)):
                with log.open("a", encoding="utf-8") as stream:
                    traceback.print_exc(file=stream)
            if not supervised:
                record.end(*_how_it_ended(run, None if interrupted else error))
            if interrupted and not isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise


def _how_it_ended(run: Run, error: BaseException | None) -> tuple[str, str]:
    """The last phase of a run and why, as its main process knows it; without an error it was interrupted."""
    if isinstance(error, ExchangeError):
        first = first_error_of(run)
        if first["kind"] != ExchangeError.__name__:
            return "failed", f"rank {first['rank']}: {first['problem']}"
    if isinstance(error, TunekitError):
        return "failed", str(error)
    if error is not None:
        return "failed", f"{type(error).__name__}: {error}"
    # A launcher ends the others with the same signals where one of them has failed.
    told = errors_of(run)
    return ("failed", f"rank {told[0]['rank']}: {told[0]['problem']}") if told else ("interrupted", INTERRUPTED)


def log_name(place: Place) -> str:
    """Name of the file that the libraries' words go to."""
    return "log.txt" if place.is_main else f"log-{place.rank}.txt"


def _train(run: Run, record: Record, heart: Heart, asked_to_stop: Event, *, supervised: bool) -> None:
    recipe, plan = run.recipe, run.plan
    with Watchdog(record, heart, plan, supervised=supervised):
        _work(run, record, heart, asked_to_stop, recipe, plan)


def _work(run: Run, record: Record, heart: Heart, asked_to_stop: Event, recipe: Recipe, plan: Plan) -> None:
    os.environ.update(plan.environment)
    from tunekit.run.callback import Watch
    from tunekit.run.engine import join, leave
    from tunekit.run.memory import is_out_of_memory

    watch = Watch(record, heart, asked_to_stop, full=isinstance(recipe.adapter, FullAdapter))
    try:
        join(plan, record.place)
        _load_train_save(run, record, watch, recipe, plan)
        leave()
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise _memory_error(run, plan, watch, error) from error
        lost = data_worker_problem(error, record.place)
        if lost is not None:
            raise DataWorkerError(f"{_where(run, watch, 'after')}: {lost}", hint=DATA_WORKER_HINT) from error
        problem = exchange_problem(error, record.place) if isinstance(error, RuntimeError) else None
        if problem is None:
            raise
        hint = f"what the others did last stands in {run.path / 'log*.txt'}"
        raise ExchangeError(f"{_where(run, watch, 'after')}: {problem}{gone_words(run)}", hint=hint) from error


def _load_train_save(run: Run, record: Record, watch: "Watch", recipe: Recipe, plan: Plan) -> None:
    schedule = plan.schedule
    if schedule is None:
        raise RunError(f"{run.path}: the plan has no schedule", hint="plan again with tokenised data")
    from tunekit.run.engine import after_wrapping, before_steps
    from tunekit.run.save import save_model
    from tunekit.run.stop import Stop

    began = time.time()
    record.enter("loading")
    watch.heart.mark("loading")
    trainer, tokenizer = _build(run, record, watch, recipe, plan, schedule)
    prompts = recipe.output.sample_prompts or []
    chat = _is_chat(run, plan)
    newest = same_everywhere(newest_complete(run.path), record.place)
    if newest.path is not None:
        record.write("resume", step=newest.step, path=str(newest.path), skipped=newest.skipped)

    def look() -> None:
        after_wrapping(trainer, plan)
        if plan.padding_free:
            asked = "data.packing" if recipe.data.packing else "data.padding_free"
            check_isolation(trainer, vocabulary=len(tokenizer), path=recipe.model.path, asked=asked)
        check_reference(trainer, plan, record, vocabulary=len(tokenizer), goes_on=newest.path is not None)
        if newest.path is None:
            _sample(record, "before", trainer, tokenizer, prompts, chat=chat)
        before_steps(trainer, plan)

    watch.before_training = look
    stop = Stop()
    if "SLURM_JOB_ID" in os.environ:
        trainer.add_callback(stop)
    trainer.train(resume_from_checkpoint=None if newest.path is None else str(newest.path))
    if stop.is_early:
        record.update_status(phase="queued", exit_reason="asked to make room")
        record.write("phase", phase="queued")
        return
    if schedule.eval_steps is not None and watch.evaluated_step != schedule.num_steps:
        trainer.evaluate()
    record.enter("saving")
    watch.heart.mark("saving")
    save_model(trainer, plan, run.model_path)
    watch.on_result_saved()
    _sample(record, "after", trainer, tokenizer, prompts, chat=chat)
    if record.place.is_main:
        tokenizer.save_pretrained(run.model_path)
        result = _summary(run, plan, watch, time.time() - began)
        record.write("result", **result)
        write_card(run, result)
    record.update_status(phase="finished", exit_reason="trained to the end")
    record.write("phase", phase="finished")


def _memory_error(run: Run, plan: Plan, watch: "Watch", error: BaseException) -> RunError:
    """What to say where memory ran out after all: what was planned, what there was, and what to change."""
    from tunekit.planner.shortage import change_that_fits
    from tunekit.run.memory import shortage

    found = shortage(plan, watch.held, watch.context_bytes, error)
    words = found.words()
    method = plan.recipe.method
    teacher = probe_model(method.teacher) if isinstance(method, DistillationMethod) else None
    change = change_that_fits(plan, probe_model(plan.recipe.model), found.limit_bytes, teacher)
    return RunError(
        f"{_where(run, watch, 'evaluation after')}: {plan.device.name} is out of memory{': ' * bool(words)}{words}",
        hint=f"{change}\n{found.table()}",
    )


def _where(run: Run, watch: "Watch", between: str) -> str:
    """How far a run is, in words; `between` is what precedes the step behind which it is."""
    status = run.status()
    if status["phase"] != "training":
        return str(status["phase"])
    step = status["step"]
    return f"step {step + 1}" if watch.is_in_step else f"{between} step {step}"


def _build(
    run: Run, record: Record, watch: "Watch", recipe: Recipe, plan: Plan, schedule: Schedule
) -> "tuple[Trainer, PreTrainedTokenizerBase]":
    """Load what the folder names, and build the trainer around it."""
    forget_overrides(recipe.train.optim)
    from tunekit.model.adapters import keep_trained_in_float32, num_trained
    from tunekit.model.load import load_tokenizer
    from tunekit.run.engine import before_wrapping, loading, weights_device

    tokenizer = load_tokenizer(recipe.model)
    with loading(plan):
        device = weights_device(plan, record.place)
        model = load_adapted(recipe, plan, device=device)
    layers = follow_layers(model, watch.heart)
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
    follow(trainer, recipe.method, watch.heart, layers)
    watch.trainer = trainer
    if num_trained(trainer.model) != plan.num_trainable_params:
        record.write(
            "warning",
            message=f"{num_trained(trainer.model):,} parameters are trained, "
            f"{plan.num_trainable_params:,} were planned: the memory estimate is off by as much",
        )
    return trainer, tokenizer


def _is_chat(run: Run, plan: Plan) -> bool:
    """Whether a prompt is a user's turn of a conversation, rather than a text to go on with."""
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


def _summary(run: Run, plan: Plan, watch: "Watch", seconds: float) -> dict[str, Any]:
    """What a user wants to know at the end, and what later plans learn from."""
    from tunekit.run.callback import rates
    from tunekit.run.memory import highest

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
        **rates(plan, watch.num_tokens, step_seconds),
        "step_seconds": step_seconds,
        "optimizer_seconds": timing.optimizer_seconds,
        "data_seconds": timing.data_seconds,
        "generation_seconds": timing.generation_seconds if timing.generates else None,
        "evaluation_seconds": timing.evaluation_seconds,
        "saving_seconds": timing.saving_seconds,
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
    supervised = is_supervised()
    if supervised:
        follow_supervisor()
    store = open_store()
    try:
        work(Run(sys.argv[1]), place=place_of(), supervised=supervised)
        del store  # It was the others' too, to the end.
    except TunekitError:
        # It stands in the run folder, for whoever started this.
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
