"""Many prompts answered: from a file of rows to a file of the same rows, each with what the model answers; or from a
list to a list.

What is answered is written at once, in the order in which it is there, to `OUT.part`; nothing of it is lost if this
ends early. Once all of it is there it becomes `OUT`, in the order of the prompts.
"""

import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

from tunekit.data.formats.row_formats import Row, counted
from tunekit.data.media.expand import MediaTokens
from tunekit.errors import DataError, DiskError, RunError
from tunekit.inference import inference_model
from tunekit.inference.conversations import media_prompt
from tunekit.inference.prompts import Asked, Prompt, held_prompts, prompt_ids, read_prompts, told
from tunekit.inference.vllm import Backend, VllmModel, takes_vllm
from tunekit.process.log_capture import library_words_to, send_nothing_at_all
from tunekit.runs.events import Event
from tunekit.runs.run import Run

BESIDE = ("num_tokens", "finish_reason")
"""Columns that are written beside the answer."""


@dataclass(frozen=True)
class Generated:
    """Generated answers.

    Attributes:
        name: What answered.
        out: The file of answers.
        num_prompts: Prompts.
        num_answers: Answers to them.
        num_tokens: Tokens of the answers.
        num_cut: Answers that reached the longest one without an end.
        seconds: How long the answers took, without the loading.
        device: Where the model was.
        dtype: Type of its weights.
        backend: What generated: `transformers` or `vllm`.
    """

    name: str
    out: str
    num_prompts: int
    num_answers: int
    num_tokens: int
    num_cut: int
    seconds: float
    device: str
    dtype: str
    backend: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)


@overload
def generate(
    run: Run | str | Path,
    prompts: str | Path | Iterable[Asked],
    out: None = None,
    *,
    checkpoint: str | None = ...,
    system: str | None = ...,
    temperature: float = ...,
    top_p: float = ...,
    max_new_tokens: int = ...,
    num_samples: int = ...,
    seed: int | None = ...,
    batch_size: int = ...,
    column: str | None = ...,
    device: inference_model.Device = ...,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = ...,
    backend: Backend = ...,
    on_event: Callable[[Event], None] | None = ...,
) -> list[inference_model.Answer]: ...


@overload
def generate(
    run: Run | str | Path,
    prompts: str | Path | Iterable[Asked],
    out: str | Path,
    *,
    checkpoint: str | None = ...,
    system: str | None = ...,
    temperature: float = ...,
    top_p: float = ...,
    max_new_tokens: int = ...,
    num_samples: int = ...,
    seed: int | None = ...,
    batch_size: int = ...,
    column: str | None = ...,
    device: inference_model.Device = ...,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = ...,
    backend: Backend = ...,
    on_event: Callable[[Event], None] | None = ...,
) -> Generated: ...


def generate(
    run: Run | str | Path,
    prompts: str | Path | Iterable[Asked],
    out: str | Path | None = None,
    *,
    checkpoint: str | None = None,
    system: str | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    max_new_tokens: int = 256,
    num_samples: int = 1,
    seed: int | None = None,
    batch_size: int = inference_model.BATCH_SIZE,
    column: str | None = None,
    device: inference_model.Device = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    backend: Backend = "auto",
    on_event: Callable[[Event], None] | None = None,
) -> Generated | list[inference_model.Answer]:
    """Answer prompts, those of a file or of a list, and return the answers or write them to a file.

    Example:
        >>> answers = tunekit.generate("pico", ["What is 2 plus 2?", "Hello"], max_new_tokens=8)
        >>> [type(answer.text).__name__ for answer in answers]
        ['str', 'str']

    Args:
        run: A run, its folder or its name; or a model's folder or name.
        prompts: A list of texts, of conversations (lists of messages) or of rows; or a file of rows that have
            `messages`, `prompt`, `instruction`, `conversations` or `text`. An answer at the end of a conversation is
            left out.
        out: The file to write, a line of JSON for each row: the row, its `answer` (`answers` where there are several),
            `num_tokens` and `finish_reason` (`end` or `length`). It must not be there yet. Default: the answers are
            returned.
        checkpoint: Checkpoint step of a run, instead of the result.
        system: System prompt for conversations without one.
        temperature: Sampling temperature; 0: greedy decoding.
        top_p: Nucleus sampling: probability mass to sample from.
        max_new_tokens: Maximum new tokens.
        num_samples: Answers to each prompt.
        seed: Random seed. The same seed, prompts and `batch_size` give the same answers on the same machine.
        batch_size: Answers per batch; halved when memory runs out.
        column: Name of the output column. Default: `answer` or `answers`.
        device: Device of the model; `auto`: an accelerator if available.
        dtype: Data type of the weights; `auto`: as trained, or as stored.
        backend: Generation backend; `auto`: vLLM if it is installed and supports the model.
        on_event: Called with events `generate` with `phase`: `loading`, `ready`, `answers` (with `done` and `total`).

    Returns:
        Without `out`, the answers in the order of the prompts, those to one prompt together: their `text`, `ids`,
        `num_tokens` and `reason`. With it, a summary.

    Raises:
        TunekitError: There is no such model, it does not generate, prompts are invalid or too long, or the file cannot
            be written.
    """
    tell = on_event or (lambda event: None)
    sampling = inference_model.Sampling(temperature, top_p, max_new_tokens, num_samples, seed)
    if batch_size < 1:
        raise RunError(f"invalid batch size: {batch_size}", hint="set --batch-size to at least 1")
    trained = inference_model.find_trained(run, checkpoint)
    inference_model.refuse_judges(trained)
    name = column or ("answer" if num_samples == 1 else "answers")
    with_vllm = takes_vllm(backend, trained, device)
    taken = (name, *BESIDE) if out is not None else ()
    if isinstance(prompts, str | Path):
        all_prompts, rows = read_prompts(prompts, system=system, taken=taken)
    else:
        all_prompts, rows = held_prompts(prompts, system=system, taken=taken)
    send_nothing_at_all()
    with ExitStack() as stack:
        answers = None
        if out is not None:
            answers = stack.enter_context(_Answers(Path(out), name, rows, several=num_samples > 1))
        stack.enter_context(library_words_to(StringIO()))
        if with_vllm and any(prompt.media for prompt in all_prompts):
            raise RunError("images are unsupported with vLLM", hint="pass --backend transformers")
        ids, with_media = _encoded(trained, all_prompts)
        tell({"event": "generate", "phase": "loading", "name": trained.name})
        where = inference_model.device_for(device)
        chosen = inference_model.dtype_on(trained, where) if dtype == "auto" else dtype
        making: Callable[..., Iterator[tuple[int, tuple[inference_model.Answer, ...]]]]
        if with_vllm:
            making = VllmModel(trained, chosen).answer
        else:
            loaded = inference_model.load(trained, device=device, dtype=chosen)
            making = partial(inference_model.answer, loaded, batch_size=batch_size, with_media=with_media)
        tell({"event": "generate", "phase": "ready", "name": trained.name, "device": where})
        began = time.perf_counter()
        replies: dict[int, tuple[inference_model.Answer, ...]] = {}
        for done, (index, reply) in enumerate(making(ids, sampling), start=1):
            if answers is None:
                replies[index] = reply
            else:
                answers.write(index, reply)
            tell({"event": "generate", "phase": "answers", "done": done, "total": len(ids)})
        if answers is None:
            return [one for index in range(len(ids)) for one in replies[index]]
        answers.order()
    return Generated(
        name=trained.name,
        out=str(out),
        num_prompts=len(ids),
        num_answers=answers.num_answers,
        num_tokens=answers.num_tokens,
        num_cut=answers.num_cut,
        seconds=time.perf_counter() - began,
        device=where,
        dtype=chosen,
        backend="vllm" if with_vllm else "transformers",
    )


def _encoded(
    found: inference_model.Trained, prompts: Sequence[Prompt]
) -> tuple[list[Sequence[int]], dict[int, inference_model.MediaPrompt]]:
    """Token ids of prompts, and those with media by their numbers.

    Raises:
        DataError: The template refuses one, or one leaves no room for an answer; the first of them are named.
    """
    longest, tokenizer = inference_model.longest_of(found), inference_model.tokenizer_of(found)
    encoded: list[Sequence[int]] = []
    faults: list[str] = []
    with_media: dict[int, inference_model.MediaPrompt] = {}
    tokens = None
    if any(prompt.media for prompt in prompts):
        tokens = MediaTokens(inference_model.processor_of(found, tokenizer))
    for number, prompt in enumerate(prompts):
        try:
            if prompt.media and tokens is not None and not isinstance(prompt.said, str):
                ids_of_it = media_prompt(
                    found, tokenizer, tokens, prompt.said, prompt.media, prompt.place, prompt.tools
                )
                ids, with_media[number] = array("I", ids_of_it[0]), ids_of_it[1]
            else:
                ids = array("I", prompt_ids(found, tokenizer, prompt.said, prompt.tools))
        except RunError as error:
            faults.append(f"{prompt.place}: {error.problem}")
            continue
        if not ids:
            faults.append(f"{prompt.place}: the prompt has no tokens")
        elif longest is not None and len(ids) >= longest:
            has = counted(len(ids), "token")
            accepts = f"{found.name} accepts {longest:,} including the answer"
            faults.append(f"{prompt.place}: the prompt has {has}; {accepts}")
        encoded.append(ids)
    if faults:
        raise DataError(told(faults, "such row"), hint="correct or remove these rows")
    return encoded, with_media


class _Answers(AbstractContextManager["_Answers"]):
    """The file of answers while it is written.

    Args:
        out: What it is to be.
        column: Name of the column of answers.
        rows: The rows of the prompts.
        several: Whether there are several answers to a prompt.

    Raises:
        RunError: It is there already, or cannot be written.
    """

    def __init__(self, out: Path, column: str, rows: Sequence[Row], *, several: bool) -> None:
        self._out, self._column, self._rows, self._several = out, column, rows, several
        self._part = out.with_name(out.name + ".part")
        self._places: dict[int, tuple[int, int]] = {}
        self._size = 0
        self.num_answers = self.num_tokens = self.num_cut = 0
        if out.exists():
            raise RunError(f"{out} already exists", hint="pass another file with --out, or delete it")
        try:
            self._file: BinaryIO = self._part.open("x+b")
        except FileExistsError as error:
            problem = f"{self._part} exists: answers of an interrupted generation"
            raise RunError(problem, hint="move or delete it") from error
        except OSError as error:
            problem = f"cannot write '{out}': {error.strerror}"
            raise RunError(problem, hint="pass a file in an existing folder") from error

    @property
    def num_prompts(self) -> int:
        """Prompts that are answered."""
        return len(self._places)

    def write(self, index: int, answers: Sequence[inference_model.Answer]) -> None:
        """Add the answers to a prompt.

        Raises:
            DiskError: There is no room for them.
        """
        columns = [(reply.text, reply.num_tokens, reply.reason) for reply in answers]
        values = tuple(map(list, zip(*columns, strict=True))) if self._several else columns[0]
        row = {**self._rows[index], **dict(zip((self._column, *BESIDE), values, strict=True))}
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise self._full(error) from error
        self._places[index] = (self._size, len(line))
        self._size += len(line)
        self.num_answers += len(answers)
        self.num_tokens += sum(reply.num_tokens for reply in answers)
        self.num_cut += sum(reply.reason == "length" for reply in answers)

    def order(self) -> None:
        """Write all of them in the order of the prompts, under the name that they are to have.

        Raises:
            DiskError: There is no room for them.
        """
        ordered = self._part.with_name(self._out.name + ".ordered")
        try:
            with ordered.open("wb") as file:
                for index in range(len(self._rows)):
                    start, length = self._places[index]
                    self._file.seek(start)
                    file.write(self._file.read(length))
            ordered.rename(self._out)
        except OSError as error:
            raise self._full(error) from error
        self._part.unlink()

    def _full(self, error: OSError) -> DiskError:
        return DiskError(f"cannot write '{self._part}': {error.strerror}", hint="answers so far are saved there")

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if not self._places:
            self._part.unlink(missing_ok=True)
