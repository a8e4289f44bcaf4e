"""What a process does in a run: read the folder, load, train, save. It decides nothing: the plan did.

The libraries' own words go to the run's log; what matters goes to the events. One of several processes is started as
`python -m tunekit.run.worker FOLDER` by torchrun, and finds its place in its environment.
"""

import os
import sys
import time
import traceback
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, TypedDict

from tunekit.data.alignment import read_rows
from tunekit.data.prepare import read_dataset
from tunekit.data.stream import stream
from tunekit.errors import RunError, TunekitError
from tunekit.planner.plan import Plan, Schedule
from tunekit.probe.model import probe_model
from tunekit.recipe.schema import DPOMethod, FullAdapter, GRPOMethod, Optim, QloraAdapter, Recipe, SFTMethod
from tunekit.run.card import write_card
from tunekit.run.events import Listener
from tunekit.run.interrupt import remembered_interrupts
from tunekit.run.isolation import check_isolation
from tunekit.run.place import Place, place_of
from tunekit.run.prepare import FILES, STREAM_SKIPPED
from tunekit.run.quiet import library_words_to
from tunekit.run.record import Record
from tunekit.run.run import Run

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

    from tunekit.run.callback import Watch

SAMPLE_TOKENS = 64
"""Longest answer to a sample prompt, in tokens."""

MEASURES = {"dpo": ("rewards/accuracies", "rewards/margins"), "grpo": ("reward", "completions/mean_length")}
"""What tells whether a method works besides its loss, by TRL's names."""


def work(run: Run, listener: Listener | None = None, place: Place | None = None) -> None:
    """Train as the run folder says, in this process. The status says how it ended, whatever happens.

    Args:
        run: The run.
        listener: Called with every event.
        place: Which of its processes this is; its only one where left out.

    Raises:
        TunekitError: Something that the user can mend went wrong.
    """
    place = place or Place()
    record = Record(run, place, listener)
    log = run.path / log_name(place)
    try:
        with (
            log.open("a", encoding="utf-8") as stream,
            library_words_to(stream),
            remembered_interrupts() as asked_to_stop,
        ):
            _train(run, record, asked_to_stop)
    except KeyboardInterrupt:
        record.end("interrupted", "interrupted by the user")
        raise
    except TunekitError as error:
        record.write_error(error)
        record.end("failed", str(error))
        raise
    except BaseException as error:
        record.write_error(error)
        with log.open("a", encoding="utf-8") as stream:
            traceback.print_exc(file=stream)
        record.end("failed", f"{type(error).__name__}: {error}")
        raise


def log_name(place: Place) -> str:
    """Name of the file that the libraries' words go to."""
    return "log.txt" if place.is_main else f"log-{place.rank}.txt"


def _train(run: Run, record: Record, asked_to_stop: Event) -> None:
    recipe, plan = run.recipe, run.plan
    os.environ.update(plan.environment)
    from tunekit.run.callback import Watch
    from tunekit.run.engine import join, leave
    from tunekit.run.memory import is_out_of_memory

    watch = Watch(record, asked_to_stop, full=isinstance(recipe.adapter, FullAdapter))
    try:
        join(plan, record.place)
        _load_train_save(run, record, watch, recipe, plan)
        leave()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _memory_error(run, plan, watch, error) from error


def _load_train_save(run: Run, record: Record, watch: "Watch", recipe: Recipe, plan: Plan) -> None:
    schedule = plan.schedule
    if schedule is None:
        raise RunError(f"{run.path}: the plan has no schedule", hint="plan again with tokenised data")
    from tunekit.run.engine import after_wrapping, before_steps
    from tunekit.run.save import save_model

    began = time.time()
    record.enter("loading")
    trainer, tokenizer = _build(run, record, watch, recipe, plan, schedule)
    prompts = recipe.output.sample_prompts or []
    chat = _is_chat(run, plan)

    def look() -> None:
        after_wrapping(trainer, plan)
        if plan.padding_free:
            asked = "data.packing" if recipe.data.packing else "data.padding_free"
            check_isolation(trainer, vocabulary=len(tokenizer), path=recipe.model.path, asked=asked)
        _sample(record, "before", trainer, tokenizer, prompts, chat=chat)
        before_steps(trainer, plan)

    watch.before_training = look
    trainer.train()
    if schedule.eval_steps is not None and watch.evaluated_step != schedule.num_steps:
        trainer.evaluate()
    record.enter("saving")
    save_model(trainer, plan, run.model_path)
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

    found, status = shortage(plan, watch.held, watch.context_bytes, error), run.status()
    where = status["phase"]
    if where == "training":
        step = status["step"]
        where = f"step {step + 1}" if watch.is_in_step else f"evaluation after step {step}"
    words = found.words()
    change = change_that_fits(plan, probe_model(plan.recipe.model), found.limit_bytes)
    return RunError(
        f"{where}: {plan.device.name} is out of memory{': ' * bool(words)}{words}", hint=f"{change}\n{found.table()}"
    )


def _build(
    run: Run, record: Record, watch: "Watch", recipe: Recipe, plan: Plan, schedule: Schedule
) -> "tuple[Trainer, PreTrainedTokenizerBase]":
    """Load what the folder names, and build the trainer around it."""
    forget_overrides(recipe.train.optim)
    from tunekit.model.adapters import attach_adapter, keep_trained_in_float32, num_trained
    from tunekit.model.load import load_tokenizer
    from tunekit.run.engine import before_wrapping, loading, weights_device

    tokenizer = load_tokenizer(recipe.model)
    with loading(plan):
        model = _load_model(recipe, plan, device=weights_device(plan, record.place))
        model = attach_adapter(model, recipe.adapter, seed=recipe.train.seed)
    trainer = _build_trainer(run, watch, recipe, plan, schedule, model=model, tokenizer=tokenizer)
    keep_trained_in_float32(trainer.model)
    before_wrapping(trainer, plan)
    watch.trainer = trainer
    if num_trained(trainer.model) != plan.num_trainable_params:
        record.write(
            "warning",
            message=f"{num_trained(trainer.model):,} parameters are trained, "
            f"{plan.num_trainable_params:,} were planned: the memory estimate is off by as much",
        )
    return trainer, tokenizer


def _load_model(recipe: Recipe, plan: Plan, *, device: str | None) -> "PreTrainedModel":
    from tunekit.model.load import load_model
    from tunekit.run.tensor_parallel import distributed_config

    return load_model(
        recipe.model,
        dtype="float32" if isinstance(recipe.adapter, FullAdapter) else plan.dtype,
        attn_implementation=plan.attn_implementation,
        device=device,
        distributed=distributed_config(plan),
        quantization=recipe.adapter if isinstance(recipe.adapter, QloraAdapter) else None,
    )


class _Shared(TypedDict):
    """What every method builds its trainer from."""

    model: "Module"
    tokenizer: "PreTrainedTokenizerBase"
    checkpoints: Path
    callbacks: "list[TrainerCallback]"
    engine: dict[str, Any]


def _build_trainer(
    run: Run,
    watch: "Watch",
    recipe: Recipe,
    plan: Plan,
    schedule: Schedule,
    *,
    model: "Module",
    tokenizer: "PreTrainedTokenizerBase",
) -> "Trainer":
    """The trainer of the recipe's method, around a model with its adapter."""
    from tunekit.methods import dpo, grpo, rewards, sft
    from tunekit.run.engine import trainer_args

    folder, method = run.path / "data", recipe.method
    numbers = (recipe.train, recipe.data, plan, schedule)
    shared: _Shared = {
        "model": model,
        "tokenizer": tokenizer,
        "checkpoints": run.path / "checkpoints",
        "callbacks": [watch],
        "engine": trainer_args(plan),
    }
    read = read_dataset if isinstance(method, SFTMethod) else read_rows
    evaluated = read(folder / FILES["eval"]) if plan.data.num_eval else None
    match method:
        case SFTMethod():
            trained = _train_dataset(folder, recipe, tokenizer, watch.record.place)
            return sft.build(method, *numbers, train_dataset=trained, eval_dataset=evaluated, **shared)
        case DPOMethod():
            twice = isinstance(recipe.adapter, FullAdapter) and not method.precompute_ref_log_probs
            return dpo.build(
                method,
                *numbers,
                base=recipe.model,
                reference=_load_model(recipe, plan, device=plan.device.kind) if twice else None,
                train_dataset=read(folder / FILES["train"]),
                eval_dataset=evaluated,
                **shared,
            )
        case GRPOMethod():
            return grpo.build(
                method,
                *numbers,
                base=recipe.model,
                rewards=rewards.load_rewards(method.rewards),
                train_dataset=read(folder / FILES["train"]),
                eval_dataset=evaluated,
                **shared,
            )


def _is_chat(run: Run, plan: Plan) -> bool:
    """Whether a prompt is a user's turn of a conversation, rather than a text to go on with."""
    if plan.data.format in ("preference", "prompts"):
        return isinstance(read_rows(run.path / "data" / FILES["train"])[0]["prompt"], list)
    return plan.data.format == "messages"


def _train_dataset(
    folder: Path, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", place: Place
) -> "Dataset | IterableDataset":
    if not recipe.data.streaming:
        return read_dataset(folder / FILES["train"])
    from tunekit.methods import sft

    skipped = folder / STREAM_SKIPPED if place.is_main else Path(os.devnull)
    return stream(recipe.data, tokenizer, sft.LEARNER, seed=recipe.train.seed, skipped=skipped)


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
    from tunekit.run.memory import peaks

    events = run.events()
    losses = [event["loss"] for event in events if event["event"] == "log"]
    evals = [event["eval_loss"] for event in events if event["event"] == "eval"]
    return {
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "first_eval_loss": evals[0] if evals else None,
        "eval_loss": evals[-1] if evals else None,
        "num_tokens": int(watch.num_tokens),
        "tokens_per_second": watch.num_tokens / watch.seconds if watch.seconds else None,
        "step_seconds": watch.seconds,
        "optimizer_seconds": watch.optimizer_seconds,
        "data_seconds": watch.data_seconds,
        "seconds": seconds,
        **peaks(plan),
        "measures": _measures(plan, events),
        "held_bytes": watch.held,
        "planned_memory_bytes": plan.memory.total_bytes,
        "model": str(run.model_path),
    }


def _measures(plan: Plan, events: list[dict[str, Any]]) -> dict[str, list[float]]:
    """What tells whether the method works, by its name in the log: its first and its last value, held out if it can be.

    A method is judged by its own measures: the loss of GRPO says nothing, as it is near zero whatever is learned.
    """
    kind, prefix = ("eval", "eval_") if plan.data.num_eval else ("log", "")
    logged = [event for event in events if event["event"] == kind]
    found: dict[str, list[float]] = {}
    for name in MEASURES.get(plan.recipe.method.type, ()):
        values = [event[prefix + name] for event in logged if event.get(prefix + name) is not None]
        if values:
            found[name] = [values[0], values[-1]]
    return found


def main() -> None:
    """Work as one of the processes of the run whose folder is the only argument."""
    try:
        work(Run(sys.argv[1]), place=place_of())
    except TunekitError:
        # It stands in the run folder, for whoever started this.
        sys.exit(2)


if __name__ == "__main__":
    main()
