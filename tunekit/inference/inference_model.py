"""A model that answers in this process: the result of a run, one of its checkpoints, or a model that no run made.

`find_trained` reads small files only; `load_trained` and `load` load weights. `answer` takes prompts of like length
together, padded on their left, the longest first: if memory runs out, it does so at once, and the batch is halved.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from tunekit.data.media.expand import features_of
from tunekit.data.media.kinds import Medium
from tunekit.errors import MemoryShortError, ModelError, RunError, TunekitError, loading_errors
from tunekit.estimates.memory.states import Dtype
from tunekit.files import SHIPPED_MODELS, is_name
from tunekit.planner.plan import Plan
from tunekit.probe.chat_template import take_texts
from tunekit.probe.model import model_folder
from tunekit.probe.model_files import check_settings
from tunekit.probe.new_tokens import add_new_tokens
from tunekit.probe.origin import ADAPTER_WEIGHTS, in_folder, origin_of
from tunekit.probe.tokenizers import stored_tokenizer
from tunekit.recipe.load import reload_recipe
from tunekit.recipe.methods.spec import ScoreHead
from tunekit.recipe.sections.adapters import (
    AnyPeftAdapter,
    FullAdapter,
    PromptTuningAdapter,
    QloraAdapter,
    num_virtual_tokens,
)
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import QatSection
from tunekit.runs.available_actions import check_readable, prospects
from tunekit.runs.checkpoints.complete import whole_in
from tunekit.runs.checkpoints.listing import named
from tunekit.runs.fingerprints import check_run_code
from tunekit.runs.run import Run, find_run
from tunekit.runs.small_files import read_plan
from tunekit.training.measured_memory import is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


@dataclass(frozen=True)
class Trained:
    """A model that can be loaded.

    Attributes:
        name: What it is called.
        base: What transformers loads: the model below the adapter, or the model itself.
        adapter: How its adapter was trained; None where it has none.
        folder: Where the adapter is, or the model, and the tokenizer that belongs to it.
        run: The run that made it; None where none did.
        step: The step of the checkpoint; None where it is no checkpoint.
        before: The model from which all weights were trained; None where an adapter can be switched off, or no run
            made it.
    """

    name: str
    base: ModelSection
    adapter: AnyPeftAdapter | None
    folder: str
    run: Run | None = None
    step: int | None = None
    before: "Trained | None" = None

    @property
    def qat(self) -> QatSection | None:
        """Rounding of its linear layers in training; None without, and where no run made it."""
        return None if self.run is None else self.run.recipe.train.qat

    @property
    def score_head(self) -> ScoreHead | None:
        """Head by which it scores; None if it generates."""
        return None if self.run is None else self.run.recipe.method.score_head

    @property
    def judges(self) -> bool:
        """True if it scores texts or steps and generates none."""
        return self.score_head is not None

    @property
    def is_chat(self) -> bool:
        """True if it was trained on conversations, as far as a run tells; without a run the tokenizer decides."""
        return self.run is None or self.run.plan.data.is_chat

    @property
    def can_compare(self) -> bool:
        """True if there is another model to compare it with."""
        return self.adapter is not None or self.before is not None


def find_trained(name: str | Path | Run, checkpoint: str | None = None) -> Trained:
    """The model that is meant by a run, its name or folder, or by a model's name or folder.

    Args:
        name: Which.
        checkpoint: Checkpoint step of a run, instead of the result.

    Raises:
        TunekitError: There is none, the run has not finished, or the checkpoint is damaged.
    """
    run = name if isinstance(name, Run) else _run_named(str(name))
    if run is None:
        if checkpoint is not None:
            raise RunError(f"{name} is a model, not a run, and has no checkpoints", hint="remove the checkpoint")
        return _model(str(name))
    check_readable(run)
    check_run_code(run)
    return _result(run) if checkpoint is None else _checkpoint(run, checkpoint)


def _run_named(name: str) -> Run | None:
    """The run that is meant by a name or a folder; None where a model is.

    Raises:
        RunError: It is neither.
    """
    if not is_name(name):
        raise RunError(f"invalid run name {name!r}", hint="`tunekit runs` lists them; you can also pass a run folder")
    if name in SHIPPED_MODELS:
        return None
    if not (Path(name).is_dir() and not (Path(name) / "status.json").is_file()):
        try:
            return find_run(name)
        except RunError:
            if "/" not in name or not _is_model_name(name):
                raise
    folder = Path(name).resolve()
    if folder.name == "model" and (folder.parent / "status.json").is_file():
        return Run(folder.parent)
    return None


def _is_model_name(name: str) -> bool:
    """Return whether a text may be a model's name on the hub: `owner/name`."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~", "runs/")) and not name.endswith("/")


def _model(name: str) -> Trained:
    section = ModelSection(path=name)
    origin = origin_of(section)
    if origin is None:
        folder = Path(model_folder(section))
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise ModelError(f"{name} has no config.json: not a model folder", hint="pass a model folder or a run")
        check_settings(folder, name)
        return Trained(name=name, base=section, adapter=None, folder=model_folder(section))
    return Trained(name=origin.name, base=origin.base, adapter=origin.adapter, folder=origin.folder)


def _result(run: Run) -> Trained:
    state = run.state
    if state != "finished" or not run.model_path.is_dir():
        status = run.status()
        where = f"{run.name} is {state}, after step {status['step']} of {status['num_steps']}: no model yet"
        steps, hint = checkpoints_of(run), prospects(run) or "wait until it finishes"
        if state == "finished":
            where = f"{run.name} is finished, but {run.model_path} is missing"
            hint = f"restore it, or recreate it with `tunekit rerun {run.path}`"
        if steps:
            hint = f"pass one of its checkpoints, such as --checkpoint {steps[-1]}; or {hint}"
        raise RunError(where, hint=hint)
    return _of_run(run, run.model_path, run.plan, None)


def _checkpoint(run: Run, name: str) -> Trained:
    try:
        checkpoint = named(run, name, weights_only=True)
    except RunError as error:
        raise RunError(error.problem.replace("--from", "checkpoint", 1), hint=error.hint) from error
    recipe = run.recipe
    if (checkpoint.path / "recipe.yaml").is_file():
        recipe = reload_recipe(checkpoint.path / "recipe.yaml")
    text = run.path if not (checkpoint.path / "plan.yaml").is_file() else checkpoint.path
    plan = read_plan(text / "plan.yaml", recipe)
    if not any(checkpoint.path.glob("*.safetensors")):
        problem = f"{checkpoint.path.name} of {run.name} has weights sharded by {plan.layout.name}"
        raise RunError(problem, hint="resume the run until it finishes: its result has full weights")
    return _of_run(run, checkpoint.path, plan, checkpoint.step)


def _of_run(run: Run, folder: Path, plan: Plan, step: int | None) -> Trained:
    """The result of a run, or a checkpoint of it."""
    check_settings(folder, str(folder))
    name = run.name if step is None else f"{run.name}, step {step}"
    where, adapter = str(folder.resolve()), plan.recipe.adapter
    if not isinstance(adapter, FullAdapter):
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise ModelError(f"{folder} has no {ADAPTER_WEIGHTS}", hint="pass another checkpoint, or train again")
        return Trained(name, plan.base, in_folder(adapter, folder), where, run, step)
    trust = plan.base.trust_remote_code
    own = ModelSection(path=where, trust_remote_code=trust)
    origin = plan.origin
    before = Trained(plan.base.path, plan.base, None, model_folder(plan.base))
    if origin is not None:
        before = Trained(origin.name, origin.base, origin.adapter, origin.folder)
    return Trained(name, own, None, where, run, step, before)


def checkpoints_of(run: Run) -> list[int]:
    """Steps of the checkpoints of a run that are there in full, by the sizes of their files."""
    return sorted(step for step, _ in whole_in(run.path))


def load_trained(
    found: Trained, *, dtype: Dtype | Literal["auto"], device: str, as_trained: bool = True
) -> "PreTrainedModel":
    """A model on a device, in evaluation mode; its adapter beside its weights, in float32.

    Args:
        found: Which.
        dtype: Type of its weights; `auto`: as they are stored.
        device: Where they go.
        as_trained: Whether weights are rounded as in training: the base of a QLoRA adapter is quantized, and linear
            layers of quantization-aware training round theirs.

    Raises:
        ModelError: It cannot be loaded.
    """
    from tunekit.models.load import load_model, peft_config, read_adapter, task_of, with_trained_values
    from tunekit.models.virtual_tokens import hide_virtual_tokens

    adapter = found.adapter
    model = load_model(
        found.base,
        dtype=stored_dtype(found) if dtype == "auto" else dtype,
        device=device,
        quantization=adapter if as_trained and isinstance(adapter, QloraAdapter) else None,
        score_head=found.score_head,
    )
    if as_trained and found.qat is not None:
        from tunekit.models.fake_quantization import to_fake_quantized

        to_fake_quantized(model, found.qat)
    if adapter is not None:
        from peft import get_peft_model

        folder = Path(found.folder)
        adapted = get_peft_model(model, peft_config(adapter, model, task=task_of(found.score_head), trained=folder))
        read_adapter(adapted, folder)
        if isinstance(adapter, PromptTuningAdapter):
            hide_virtual_tokens(adapted)
        if not as_trained:
            with_trained_values(adapted, adapter)
        model = cast("PreTrainedModel", adapted)
    return cast("PreTrainedModel", model.eval())


def tokenizer_of(found: Trained, folder: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model, or of another folder that is to have the same.

    Raises:
        ModelError: It cannot be loaded.
    """
    where, revision = (folder or found.folder), None if found.run is not None else found.base.revision
    try:
        tokenizer = stored_tokenizer(where, revision=revision, trust_remote_code=found.base.trust_remote_code)
    except loading_errors() as error:
        if Path(where).is_dir() and not any(Path(where).glob("tokenizer*")):
            raise ModelError(f"{where} has no tokenizer", hint="restore its tokenizer.json") from error
        first = str(error).partition("\n")[0]
        raise ModelError(f"the tokenizer in {where} cannot be loaded: {first}", hint="it may be damaged") from error
    if found.run is None:
        # The model that a run started from: what the run saved has them already.
        add_new_tokens(tokenizer, found.base)
    take_texts(tokenizer)
    return cast("PreTrainedTokenizerBase", tokenizer)


def config_of(found: Trained) -> "PretrainedConfig":
    """The configuration of a model, or of the one below its adapter.

    Raises:
        ModelError: It cannot be read.
    """
    from tunekit.models.load import read_config

    where = model_folder(found.base)
    try:
        return read_config(found.base)
    except loading_errors() as error:
        if Path(where).is_dir() and not (Path(where) / "config.json").is_file():
            raise ModelError(f"{where} has no config.json", hint="restore it from a copy") from error
        first = str(error).partition("\n")[0]
        raise ModelError(f"{where}: config.json cannot be read: {first}", hint="it may be damaged") from error


def stored_dtype(found: Trained) -> Dtype:
    """The type in which the weights of a model, or of the one below its adapter, are stored.

    Raises:
        TunekitError: They are stored in a type that is none of a model's own.
    """
    config = config_of(found)
    text = config.get_text_config()
    name = str(config.dtype or text.dtype or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        problem = f"{model_folder(found.base)}: unsupported weight dtype {name}"
        raise TunekitError(problem, hint="set another one with --dtype")
    return cast(Dtype, name)


Device = Literal["auto", "cpu", "cuda"]

BATCH_SIZE = 16
"""Sequences that are answered at once, unless another number is asked for."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: Sampling temperature; 0: greedy decoding.
        top_p: Nucleus sampling: probability mass to sample from.
        max_new_tokens: Maximum new tokens.
        num_samples: Answers to each prompt.
        seed: Random seed. Default: a new one each time.

    Raises:
        RunError: There is no such way.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    num_samples: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1 or self.num_samples < 1:
            raise RunError(
                f"invalid sampling: temperature {self.temperature:g}, top_p {self.top_p:g}, "
                f"{self.max_new_tokens} tokens, {self.num_samples} samples",
                hint="use temperature >= 0, 0 < top_p <= 1, and at least 1 token and 1 sample",
            )
        if self.num_samples > 1 and self.temperature == 0:
            problem = f"{self.num_samples} answers per prompt would be identical"
            raise RunError(problem, hint="set a temperature above 0")

    @property
    def draws(self) -> dict[str, Any]:
        """The same for transformers."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclass(frozen=True)
class Answer:
    """An answer of a model.

    Attributes:
        text: Without special tokens.
        ids: Token ids, with its end token.
        reason: `end`: the model was done; `length`: it reached the longest answer.
    """

    text: str
    ids: tuple[int, ...]
    reason: Literal["end", "length"]

    @property
    def num_tokens(self) -> int:
        """Tokens, with its end token."""
        return len(self.ids)


@dataclass(frozen=True)
class Loaded:
    """A model that is loaded, with its tokenizer.

    Attributes:
        found: Which.
        model: On its device, in evaluation mode.
        tokenizer: Its own.
        device: `cpu` or `cuda`.
        dtype: Type of its weights.
    """

    found: Trained
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    device: str
    dtype: Dtype

    @cached_property
    def processor(self) -> "ProcessorMixin":
        """The processor of a model of media."""
        return processor_of(self.found, self.tokenizer)


def load(found: Trained, *, device: Device = "auto", dtype: Dtype | Literal["auto"] = "auto") -> Loaded:
    """Load a model to answer.

    Args:
        found: Which.
        device: Device of the model; `auto`: an accelerator if available.
        dtype: Data type of the weights; `auto`: as trained, or as stored.

    Raises:
        TunekitError: It is a reward model, it cannot be loaded, or it does not fit in free memory.
    """
    refuse_judges(found)
    return load_any(found, device=device, dtype=dtype)


def load_any(found: Trained, *, device: Device = "auto", dtype: Dtype | Literal["auto"] = "auto") -> Loaded:
    """Load a model as `load` does, a reward model too."""
    where = device_for(device)
    chosen = dtype_on(found, where) if dtype == "auto" else dtype
    tokenizer = tokenizer_of(found)
    try:
        model = load_trained(found, dtype=chosen, device=where)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = f"{found.name} does not fit in free memory"
        raise MemoryShortError(problem, hint="free some, use a smaller model, or pass --device cpu") from error
    return Loaded(found, model, tokenizer, where, chosen)


def generates_nothing(found: Trained) -> str:
    """Return the words for a model that scores and gives no answers."""
    is_classifier = found.score_head is not None and found.score_head.scores == "classes"
    return f"{found.name} is a {'classifier' if is_classifier else 'reward model'} and generates no text"


def refuse_judges(found: Trained) -> None:
    """Refuse a model that gives no answers.

    Raises:
        RunError: It is one.
    """
    if found.judges:
        raise RunError(generates_nothing(found), hint="pass a run of another method")


def device_for(device: Device) -> str:
    """Return the device for a model: `cpu` or `cuda`.

    Raises:
        RunError: An accelerator is asked for, and there is none.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise RunError("no accelerator on this machine", hint="pass --device cpu")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def dtype_on(found: Trained, device: str) -> Dtype:
    """The type that a model answers in: that of its training; a processor without a type of 16 bits takes float32."""
    if found.run is not None and found.run.plan.device.kind == device:
        return found.run.plan.dtype
    stored = stored_dtype(found)
    return "float32" if device == "cpu" and stored == "float16" else stored


def longest_of(found: Trained) -> int | None:
    """Tokens that a model takes, its answer with them and without virtual ones; None where its configuration does not
    say.

    Raises:
        ModelError: There is no configuration.
    """
    longest: int | None = config_of(found).get_text_config().to_dict().get("max_position_embeddings")
    virtual = 0 if found.adapter is None else num_virtual_tokens(found.adapter)
    return None if longest is None else longest - virtual


def end_tokens(model: Any, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokens that end an answer: those of the model, and the one of the tokenizer, with which it may have been trained.

    A base model's own end token is often another one than that of the chat template which an adapter was trained with.
    """
    own = model.generation_config.eos_token_id
    ends = own if isinstance(own, list) else [own]
    return list(dict.fromkeys(end for end in (*ends, tokenizer.eos_token_id) if end is not None))


def processor_of(found: Trained, tokenizer: "PreTrainedTokenizerBase") -> "ProcessorMixin":
    """Return the processor of a model of media, with its tokenizer.

    Raises:
        ModelError: It has none, or lacks a package.
    """
    from tunekit.models.load import PROCESSOR_FILES, PROCESSORS, load_processor

    section = found.base
    if any((Path(found.folder) / name).is_file() for name in PROCESSOR_FILES):
        section = section.model_copy(update={"path": found.folder, **dict.fromkeys(PROCESSORS)})
    return load_processor(section, tokenizer)


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with media, for a processor.

    Attributes:
        text: Its text, in which each medium is the one token that the processor replaces.
        media: The media, in their order.
    """

    text: str
    media: tuple[Medium, ...]


def answer(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    batch_size: int = BATCH_SIZE,
    with_media: Mapping[int, MediaPrompt] = MappingProxyType({}),
) -> Iterator[tuple[int, tuple[Answer, ...]]]:
    """The answers to prompts as they are there: the number of a prompt with its answers, the longest prompts first.

    Args:
        loaded: The model.
        prompts: Token ids of each, no longer than the model takes.
        sampling: How to draw.
        batch_size: Answers that are given at once, at most.
        with_media: Prompts with media, by their numbers. They are answered apart from those without.

    Raises:
        MemoryShortError: There is too little memory for a single one.
    """
    import torch
    from transformers import set_seed

    longest = longest_of(loaded.found)
    order = sorted(range(len(prompts)), key=lambda index: (index in with_media, len(prompts[index])), reverse=True)
    waiting = [index for index in order for _ in range(sampling.num_samples)]
    results: dict[int, list[Answer]] = {}
    if sampling.seed is None:
        torch.seed()
    else:
        set_seed(sampling.seed)
    start = 0
    while start < len(waiting):
        numbers = waiting[start : start + batch_size]
        numbers = [index for index in numbers if (index in with_media) == (numbers[0] in with_media)]
        first = with_media.get(numbers[0])
        if first is not None and any(medium.kind == "audio" for medium in first.media):
            # Some models do not leave the padding of clips beside longer ones out.
            numbers = numbers[:1]
        batch = _alike([prompts[index] for index in numbers], sampling, longest)
        if isinstance(loaded.found.adapter, PromptTuningAdapter):
            # Layers with a state would carry virtual tokens through the padding before a prompt.
            batch = [prompt for prompt in batch if len(prompt) == len(batch[0])]
        inputs = [with_media[index] for index in numbers[: len(batch)] if index in with_media]
        batch_answers = _answers(loaded, batch, inputs, sampling, longest)
        if batch_answers is None and len(batch) == 1:
            hint = "lower --max-new-tokens, remove long prompts, or free memory"
            raise MemoryShortError(f"out of memory while answering a prompt of {len(batch[0]):,} tokens", hint=hint)
        if batch_answers is None:
            batch_size = len(batch) // 2
            continue
        for index, reply in zip(waiting[start:], batch_answers, strict=False):
            results.setdefault(index, []).append(reply)
            if len(results[index]) == sampling.num_samples:
                yield index, tuple(results.pop(index))
        start += len(batch)


def _alike(batch: list[Sequence[int]], sampling: Sampling, longest: int | None) -> list[Sequence[int]]:
    """The first prompts of a batch that leave as much room for an answer as the first one does."""
    rooms = [room_of(len(ids), sampling, longest) for ids in batch]
    return batch[: next((at for at, room in enumerate(rooms) if room != rooms[0]), len(batch))]


def room_of(num_tokens: int, sampling: Sampling, longest: int | None) -> int:
    """Tokens that an answer may have."""
    return sampling.max_new_tokens if longest is None else min(sampling.max_new_tokens, longest - num_tokens)


def _answers(
    loaded: Loaded, batch: list[Sequence[int]], with_media: list[MediaPrompt], sampling: Sampling, longest: int | None
) -> list[Answer] | None:
    """The answers to a batch; None where memory ran out.

    Args:
        loaded: The model.
        batch: Token ids of each prompt.
        with_media: The prompts for the processor, where they have media.
        sampling: How to draw.
        longest: Tokens that the model takes.
    """
    import torch

    tokenizer, width = loaded.tokenizer, max(map(len, batch))
    ends = end_tokens(loaded.model, tokenizer)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
    model: Any = loaded.model
    if with_media:
        inputs = media_inputs(loaded, with_media)
        width = inputs["input_ids"].shape[1]
    else:
        ids = [[padding] * (width - len(prompt)) + list(prompt) for prompt in batch]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch]
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        inputs = {name: tensor.to(loaded.device) for name, tensor in inputs.items()}
    try:
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                max_new_tokens=room_of(width, sampling, longest),
                pad_token_id=padding,
                eos_token_id=ends or None,
                **sampling.draws,
            )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        output = None
    if output is None:
        # What the failed batch held is given back only now that its error is gone.
        if loaded.device == "cuda":
            torch.cuda.empty_cache()
        return None
    return [_ended(row, ends, tokenizer) for row in output[:, width:].tolist()]


def media_inputs(loaded: Loaded, prompts: Sequence[MediaPrompt]) -> "dict[str, Tensor]":
    """Inputs of a batch of prompts with media, padded on their left, by the model's processor."""
    texts, media = [prompt.text for prompt in prompts], [prompt.media for prompt in prompts]
    features = features_of(loaded.processor, texts, media, padding_side="left")
    return dict(features.to(device=loaded.device, dtype=loaded.model.dtype))


def _ended(row: list[int], ends: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> Answer:
    """A row of what was generated as an answer: up to its end token."""
    last = next((at for at, token in enumerate(row) if token in ends), None)
    ids = row if last is None else row[: last + 1]
    return Answer(tokenizer.decode(ids, skip_special_tokens=True), tuple(ids), "length" if last is None else "end")
