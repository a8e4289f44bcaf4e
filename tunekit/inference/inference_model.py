"""A model that is loaded to answer, in this process: where it is, in which type, and what it gives to many prompts.

Prompts of like length are answered together, padded on their left, the longest first: if memory runs out, it does so at
once, and the batch is halved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tunekit.errors import MemoryShortError, RunError
from tunekit.estimates.memory.states import Dtype
from tunekit.inference.find_model import Trained, config_of, load_trained, stored_dtype, tokenizer_of
from tunekit.training.measured_memory import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Device = Literal["auto", "cpu", "cuda"]

BATCH_SIZE = 16
"""Sequences that are answered at once, unless another number is asked for."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: How freely; 0: the likeliest token each time.
        top_p: Share of the probability from which tokens are drawn.
        max_new_tokens: Longest answer.
        num_samples: Answers to each prompt.
        seed: For the draws; another one each time where left out.

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
                f"an answer cannot have temperature {self.temperature:g}, top_p {self.top_p:g} and "
                f"{self.max_new_tokens} tokens, {self.num_samples} times",
                hint="temperature is 0 or more, top_p above 0 and at most 1, and the others at least 1",
            )
        if self.num_samples > 1 and self.temperature == 0:
            raise RunError(
                f"{self.num_samples} answers to each prompt would be the same", hint="give a temperature above 0"
            )

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


def load(found: Trained, *, device: Device = "auto", dtype: Dtype | Literal["auto"] = "auto") -> Loaded:
    """Load a model to answer.

    Args:
        found: Which.
        device: Where to; `auto`: on an accelerator, if there is one.
        dtype: Type of its weights; `auto`: as it was trained, or as it is stored.

    Raises:
        TunekitError: It judges and does not answer, it cannot be loaded, or does not fit the memory that is free.
    """
    refuse_judges(found)
    where = device_for(device)
    chosen = dtype_on(found, where) if dtype == "auto" else dtype
    tokenizer = tokenizer_of(found)
    try:
        model = load_trained(found, dtype=chosen, device=where)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryShortError(
            f"{found.name} does not fit the memory that is free",
            hint="free some of it, choose a smaller model, or take --device cpu",
        ) from error
    return Loaded(found, model, tokenizer, where, chosen)


def refuse_judges(found: Trained) -> None:
    """Refuse a model that gives no answers.

    Raises:
        RunError: It is one.
    """
    if found.judges:
        raise RunError(f"{found.name} judges answers and gives none", hint="name a run of another method")


def device_for(device: Device) -> str:
    """Return the device for a model: `cpu` or `cuda`.

    Raises:
        RunError: An accelerator is asked for, and there is none.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise RunError("there is no accelerator here", hint="take --device cpu")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def dtype_on(found: Trained, device: str) -> Dtype:
    """The type that a model answers in: that of its training; a processor without a type of 16 bits takes float32."""
    if found.run is not None and found.run.plan.device.kind == device:
        return found.run.plan.dtype
    stored = stored_dtype(found)
    return "float32" if device == "cpu" and stored == "float16" else stored


def longest_of(found: Trained) -> int | None:
    """Tokens that a model takes, its answer with them; None where its configuration does not say.

    Raises:
        ModelError: There is no configuration.
    """
    longest: int | None = config_of(found).get_text_config().to_dict().get("max_position_embeddings")
    return longest


def end_tokens(model: Any, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokens that end an answer: those of the model, and the one of the tokenizer, with which it may have been trained.

    A base model's own end token is often another one than that of the chat template which an adapter was trained with.
    """
    own = model.generation_config.eos_token_id
    ends = own if isinstance(own, list) else [own]
    return list(dict.fromkeys(end for end in (*ends, tokenizer.eos_token_id) if end is not None))


def answer(
    loaded: Loaded, prompts: Sequence[Sequence[int]], sampling: Sampling, *, batch_size: int = BATCH_SIZE
) -> Iterator[tuple[int, tuple[Answer, ...]]]:
    """The answers to prompts as they are there: the number of a prompt with its answers, the longest prompts first.

    Args:
        loaded: The model.
        prompts: Token ids of each, no longer than the model takes.
        sampling: How to draw.
        batch_size: Answers that are given at once, at most.

    Raises:
        MemoryShortError: There is too little memory for a single one.
    """
    import torch
    from transformers import set_seed

    longest = longest_of(loaded.found)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
    waiting = [index for index in order for _ in range(sampling.num_samples)]
    results: dict[int, list[Answer]] = {}
    if sampling.seed is None:
        torch.seed()
    else:
        set_seed(sampling.seed)
    start = 0
    while start < len(waiting):
        batch = _alike([prompts[index] for index in waiting[start : start + batch_size]], sampling, longest)
        batch_answers = _answers(loaded, batch, sampling, longest)
        if batch_answers is None and len(batch) == 1:
            raise MemoryShortError(
                f"memory ran out in the answer to a prompt of {len(batch[0]):,} tokens",
                hint="give fewer --max-new-tokens, leave long prompts out, or free some memory",
            )
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
    loaded: Loaded, batch: list[Sequence[int]], sampling: Sampling, longest: int | None
) -> list[Answer] | None:
    """The answers to a batch; None where memory ran out."""
    import torch

    tokenizer, width = loaded.tokenizer, max(map(len, batch))
    ends = end_tokens(loaded.model, tokenizer)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
    ids = torch.tensor([[padding] * (width - len(prompt)) + list(prompt) for prompt in batch], device=loaded.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=loaded.device)
    model: Any = loaded.model
    try:
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=mask,
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


def _ended(row: list[int], ends: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> Answer:
    """A row of what was generated as an answer: up to its end token."""
    last = next((at for at, token in enumerate(row) if token in ends), None)
    ids = row if last is None else row[: last + 1]
    return Answer(tokenizer.decode(ids, skip_special_tokens=True), tuple(ids), "length" if last is None else "end")
