"""Talking with a model: a process of its own holds it, and is gone, with all of its memory, once the talk is closed.

This side starts that process and passes on what is said, a line of JSON each; it loads neither torch nor the model.
"""

import base64
import contextlib
import json
import mimetypes
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.data.formats.row_formats import BadRow
from tunekit.data.media.kinds import KINDS, find_medium
from tunekit.errors import RunError
from tunekit.inference.inference_model import Device, find_trained, generates_nothing
from tunekit.inference.vllm import Backend, missing
from tunekit.recipe.sections.data import MediaKind
from tunekit.runs.events import Event
from tunekit.runs.run import Run

END_SECONDS = 10
"""Seconds for the process to exit after it is told to, before it is killed."""


@dataclass(frozen=True)
class Said:
    """A finished answer.

    Attributes:
        num_tokens: Of the answer.
        seconds: How long it took.
        reason: `end`: the model was done; `length`: it reached the longest answer; `stopped`: it was asked to.
    """

    num_tokens: int
    seconds: float
    reason: str


class Talk(contextlib.AbstractContextManager["Talk"]):
    """A model that answers, in a process of its own.

        with tunekit.chat("my-run") as talk:
            for piece in talk.say([{"role": "user", "content": "Hello"}]):
                print(piece, end="")

    Args:
        run: A run, its folder or its name; or a model's folder or name.
        checkpoint: Checkpoint step of a run, instead of the result.
        compare: Whether the model before training answers too: `say(..., base=True)`.
        device: Device of the model; `auto`: an accelerator if available.
        backend: Generation backend; `auto`: vLLM if it is installed and supports the model. It gains little in
            one chat and uses most of the device memory, so transformers is the default.
        on_event: Called with events `chat` with `phase`: `loading` and `ready`.

    Raises:
        TunekitError: There is no such model, it does not generate, or it cannot be loaded.
    """

    def __init__(
        self,
        run: Run | str | Path,
        checkpoint: str | None = None,
        *,
        compare: bool = False,
        device: Device = "auto",
        backend: Backend = "transformers",
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        trained = find_trained(run, checkpoint)
        if trained.judges:
            raise RunError(generates_nothing(trained), hint="chat with a run of another method")
        if compare and not trained.can_compare:
            raise RunError(f"{trained.name} was not trained by a run: no model before training", hint="pass a run")
        if backend == "vllm" and (absent := missing()) is not None:
            raise absent
        self.name = trained.name
        self.last: Said | None = None
        """End of the last answer."""
        self._turn = threading.Lock()
        self._writing = threading.Lock()
        name = str(trained.run.path if trained.run is not None else run)
        at = None if trained.step is None else Path(trained.folder).name
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tunekit.inference.chat_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        try:
            self._tell({"name": name, "checkpoint": at, "compare": compare, "device": device, "backend": backend})
            if on_event is not None:
                on_event({"event": "chat", "phase": "loading", "name": self.name})
            self.facts = self._checked(self._read())
        except BaseException:
            self.close()
            raise
        if on_event is not None:
            on_event({"event": "chat", "phase": "ready", "name": self.name, **self.facts})

    @property
    def pid(self) -> int:
        """The process that holds the model."""
        return self._process.pid

    @property
    def is_open(self) -> bool:
        """True if the process is alive."""
        return self._process.poll() is None

    @property
    def memory_bytes(self) -> int:
        """Bytes that the model and its process held once it was loaded: of the accelerator, or of main memory."""
        return int(self.facts["memory_bytes"])

    @property
    def device(self) -> str:
        """Device of the model."""
        return str(self.facts["device"])

    @property
    def media(self) -> tuple[MediaKind, ...]:
        """Kinds of media that messages may have."""
        return tuple(self.facts["media"])

    @property
    def reads_pictures(self) -> bool:
        """True if messages may have pictures."""
        return "image" in self.media

    def say(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        base: bool = False,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_new_tokens: int = 256,
        seed: int | None = None,
    ) -> Iterator[str]:
        """Stream the answer to a conversation. Leaving the iterator early stops generation.

        Args:
            messages: The conversation, each with `role` (`system`, `user`, `assistant`) and `content`: a text, or parts
                `{type: text, text}` and `{type: image, image}` with the picture as a data URL (see `picture_part`).
            base: Whether the model before training answers.
            temperature: Sampling temperature; 0: greedy decoding.
            top_p: Nucleus sampling: probability mass to sample from.
            max_new_tokens: Maximum new tokens.
            seed: Random seed. Default: a new one each time.

        Raises:
            RunError: The conversation is too long or of another shape, or the process is gone.
        """
        if temperature < 0 or not 0 < top_p <= 1 or max_new_tokens < 1:
            problem = f"invalid sampling: temperature {temperature:g}, top_p {top_p:g}, {max_new_tokens} tokens"
            raise RunError(problem, hint="use temperature >= 0, 0 < top_p <= 1 and at least 1 token")
        options = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens, "seed": seed}
        with self._turn:
            self.last = None
            self._tell({"say": [dict(message) for message in messages], "base": base, **options})
            is_over = False
            try:
                while "piece" in (reply := self._read()):
                    yield reply["piece"]
                is_over = True
                self.last = Said(**self._checked(reply))
            finally:
                if not is_over and self.is_open:
                    self._leave()

    def stop(self) -> None:
        """Stop the current answer, from any thread."""
        if self.is_open:
            self._tell({"stop": True})

    def close(self) -> None:
        """End the process; its memory is free when this comes back."""
        process = self._process
        if process.stdin is not None:
            # It may have ended by itself.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._words.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leave(self) -> None:
        """Stop an answer and pass over what is left of it."""
        # It may fail instead, or the process end, which nobody waits to hear.
        with contextlib.suppress(RunError):
            self.stop()
            while "piece" in self._read():
                pass

    def _tell(self, words: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._writing:
                self._process.stdin.write(json.dumps(words) + "\n")
                self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._gone() from error

    def _read(self) -> dict[str, Any]:
        """Read the next message of the process."""
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
        except ValueError as error:
            raise self._gone() from error
        if not line:
            raise self._gone()
        message: dict[str, Any] = json.loads(line)
        return message

    def _checked(self, told: dict[str, Any]) -> dict[str, Any]:
        """Return a message of the process, or raise the error that it reports."""
        if "problem" in told:
            raise RunError(told["problem"], hint=told["hint"])
        return told

    def _gone(self) -> RunError:
        """Return the error for a process that has exited."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        # Last, as another thread may close it while this one waits.
        if self._words.closed:
            return RunError(f"the chat with {self.name} is closed", hint="start another one")
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        detail = f": {lines[-1]}" if lines else ""
        problem = f"the process of {self.name} exited{f' with code {code}' if code else ''}{detail}"
        return RunError(problem, hint="memory may have run out: close other models, or pass --device cpu")


def picture_part(path: str | Path) -> dict[str, str]:
    """Return a picture as a part of a message's content.

    Raises:
        RunError: There is none, or it is damaged or too large.
    """
    return media_part("image", path)


_FORMATS: dict[MediaKind, str] = {
    "image": "an image: JPEG, PNG, WebP, GIF, BMP or TIFF",
    "audio": "audio: WAV, FLAC, MP3, Ogg or AIFF",
    "video": "a video: MP4, MOV, MKV, WebM or AVI",
}
_DEFAULT_TYPES: dict[MediaKind, str] = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}


def media_part(kind: MediaKind, path: str | Path) -> dict[str, str]:
    """Return a picture, an audio clip or a video as a part of a message's content.

    Args:
        kind: Its kind.
        path: Its file.

    Raises:
        RunError: There is none, or it is damaged or too large.
    """
    file = Path(path).expanduser().resolve()
    try:
        find_medium(kind, file.name, f"the {KINDS[kind].noun}", file.parent)
        raw = file.read_bytes()
    except (BadRow, OSError) as error:
        raise RunError(str(error), hint=f"pass {_FORMATS[kind]}") from error
    type_ = mimetypes.guess_type(file.name)[0] or _DEFAULT_TYPES[kind]
    return {"type": kind, kind: f"data:{type_};base64,{base64.b64encode(raw).decode()}"}


def chat(
    run: Run | str | Path,
    checkpoint: str | None = None,
    *,
    compare: bool = False,
    device: Device = "auto",
    backend: Backend = "transformers",
    on_event: Callable[[Event], None] | None = None,
) -> Talk:
    """Open a chat with the result of a run, one of its checkpoints, or a model; close it, or use it as a context.

    Args:
        run: A run, its folder or its name; or a model's folder or name.
        checkpoint: Checkpoint step of a run, instead of the result.
        compare: Whether the model before training answers too.
        device: Device of the model; `auto`: an accelerator if available.
        backend: Generation backend; `auto`: vLLM if it is installed and supports the model. It gains little in
            one chat and uses most of the device memory, so transformers is the default.
        on_event: Called with loading events.

    Raises:
        TunekitError: There is no such model, it does not generate, or it cannot be loaded.
    """
    return Talk(run, checkpoint, compare=compare, device=device, backend=backend, on_event=on_event)
