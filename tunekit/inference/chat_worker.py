"""The process that holds a model for a talk: it loads it, answers what it is asked, and ends with its parent's pipe.

`python -m tunekit.inference.chat_worker` reads lines of JSON: first which model, then questions and wishes to stop. It
writes what it has loaded, then each answer in pieces with how it ended, or what is wrong. See `tunekit.inference.chat`.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer, set_seed

from tunekit.errors import RunError, TunekitError
from tunekit.inference import inference_model
from tunekit.inference.conversations import as_texts, has_other_parts, inputs_of, media_read
from tunekit.inference.prompts import prompt_ids
from tunekit.inference.vllm import VllmModel, takes_vllm
from tunekit.process.log_capture import library_words_to, send_nothing_at_all
from tunekit.redact import Redacting
from tunekit.training.measured_memory import is_out_of_memory, resident_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Pieces(TextStreamer):  # type: ignore[misc]
    """Writes an answer as it is given."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", worker: "Worker") -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.worker = worker

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass a piece on."""
        if text:
            self.worker.tell({"piece": text})


class _Asked(StoppingCriteria):  # type: ignore[misc]
    """Ends an answer once that is asked for."""

    def __init__(self, asked: threading.Event) -> None:
        self.asked = asked

    def __call__(self, input_ids: "torch.Tensor", scores: "torch.Tensor", **kwargs: Any) -> "torch.Tensor":
        """Return whether each sequence, (batch,), is finished."""
        return torch.full((input_ids.shape[0],), self.asked.is_set(), device=input_ids.device)


class Worker:
    """A model with what it was before, and the two pipes.

    Args:
        out: Where answers go.
    """

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.asked = threading.Event()
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, name="read", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "stop" in message:
                self.asked.set()
            else:
                self.asked.clear()
                self.lines.put(message)
        # The parent has closed its end, or is gone: whatever is computed, nobody waits for it.
        os._exit(0)

    def tell(self, words: dict[str, Any]) -> None:
        """Write a line to the parent."""
        self.out.write(json.dumps(words) + "\n")
        self.out.flush()

    def serve(self) -> None:
        """Load what the first line names, and answer the others."""
        first = self.lines.get()
        does_not_fit = f"{first['name']} does not fit in free memory"
        if not self._tell_of(
            partial(self._load_first, first), does_not_fit, "free some, use a smaller model, or pass --device cpu"
        ):
            return
        while True:
            answer = partial(self._answer, self.lines.get())
            self._tell_of(answer, "out of memory while answering", "start a shorter conversation")

    def _tell_of(self, work: Callable[[], dict[str, Any]], out_of_memory: str, hint: str) -> bool:
        """Do some work and tell what came of it, or what is wrong; whether nothing is."""
        try:
            self.tell(work())
        except TunekitError as error:
            self.tell({"problem": error.problem, "hint": error.hint})
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.tell({"problem": out_of_memory, "hint": hint})
        else:
            return True
        return False

    def _load_first(self, first: dict[str, Any]) -> dict[str, Any]:
        """Load what the first line names, and return the facts about it."""
        trained = inference_model.find_trained(first["name"], first["checkpoint"])
        compare = first["compare"]
        self.found = trained
        self.vllm: VllmModel | None = None
        self.model: Any = None
        self.before: Any = None
        if takes_vllm(first["backend"], trained, first["device"]):
            if compare and trained.adapter is None:
                what = "vLLM serves one model, and the model before training would be a second one"
                raise RunError(what, hint="pass --backend transformers")
            self.device, self.tokenizer = "cuda", inference_model.tokenizer_of(trained)
            self.dtype = inference_model.dtype_on(trained, "cuda")
            self.vllm = VllmModel(trained, self.dtype)
        else:
            loaded = inference_model.load(trained, device=first["device"])
            self.device, self.dtype, self.tokenizer = loaded.device, loaded.dtype, loaded.tokenizer
            self.model, self.loaded = loaded.model, loaded
            if compare and trained.adapter is None and trained.before is not None:
                self.before = inference_model.load_trained(trained.before, dtype=self.dtype, device=self.device)
        self.longest = inference_model.longest_of(trained)
        on_gpu = self.device == "cuda"
        return {
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "dtype": self.dtype,
            "media": media_read(trained) if self.vllm is None else (),
            "memory_bytes": torch.cuda.memory_reserved() if on_gpu else resident_bytes(),
        }

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        if question["seed"] is not None:
            set_seed(question["seed"])
        else:
            torch.seed()
        is_base = question["base"]
        if is_base and self.before is None and self.found.adapter is None:
            problem = f"the model before training of {self.found.name} is not loaded"
            raise RunError(problem, hint="start the chat with compare")
        if not question["say"]:
            raise RunError("the conversation is empty", hint="send a message")
        inputs = self._inputs(question["say"])
        num_given = inputs["input_ids"].shape[1]
        limit = self._room(num_given, question["max_new_tokens"])
        sampling = inference_model.Sampling(question["temperature"], question["top_p"], limit, seed=question["seed"])
        if self.vllm is not None:
            num_tokens, is_cut = 0, False
            ids = inputs["input_ids"][0].tolist()
            for piece, more, ended in self.vllm.stream(ids, sampling, base=is_base, is_stopped=self.asked.is_set):
                num_tokens, is_cut = num_tokens + more, ended == "length"
                if piece:
                    self.tell({"piece": piece})
            return self._said_so(num_tokens, began, is_cut=is_cut)
        model = self.before if is_base and self.before is not None else self.model
        aside = model.disable_adapter() if is_base and self.before is None else nullcontext()
        with torch.inference_mode(), aside:
            output = model.generate(
                **inputs,
                max_new_tokens=limit,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
                eos_token_id=inference_model.end_tokens(model, self.tokenizer) or None,
                streamer=_Pieces(self.tokenizer, self),
                stopping_criteria=StoppingCriteriaList([_Asked(self.asked)]),
                **sampling.draws,
            )
        num_tokens = output.shape[1] - num_given
        return self._said_so(num_tokens, began, is_cut=num_tokens >= limit)

    def _said_so(self, num_tokens: int, began: float, *, is_cut: bool) -> dict[str, Any]:
        """Return how an answer ended."""
        reason = "stopped" if self.asked.is_set() else "length" if is_cut else "end"
        return {"num_tokens": num_tokens, "seconds": time.perf_counter() - began, "reason": reason}

    def _inputs(self, messages: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A conversation as the model's inputs."""
        if has_other_parts(messages):
            if self.vllm is not None:
                raise RunError("images are unsupported with vLLM", hint="pass --backend transformers")
            return inputs_of(self.loaded, messages)
        ids = prompt_ids(self.found, self.tokenizer, self._said(as_texts(messages)))
        inputs = torch.tensor([ids], device=self.device)
        return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}

    def _said(self, messages: list[dict[str, str]]) -> str | list[dict[str, str]]:
        """A conversation; to a model that has no template for one, or was trained on texts, its texts."""
        if self.tokenizer.chat_template is None or not self.found.is_chat:
            return "\n".join(message["content"] for message in messages)
        return messages

    def _room(self, num_given: int, asked: int) -> int:
        """Tokens that an answer may have."""
        if self.longest is None:
            return asked
        if num_given >= self.longest:
            problem = f"the conversation has {num_given:,} tokens; {self.found.name} accepts {self.longest:,}"
            raise RunError(problem, hint="clear it to start a new one")
        return min(asked, self.longest - num_given)


def main() -> None:
    """Serve the process that started this one."""
    send_nothing_at_all()
    # What libraries print comes to the log, and nothing between the lines for the parent.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    log, sys.stderr = sys.stderr, Redacting(sys.stderr)
    worker = Worker(out)
    with library_words_to(log):
        worker.serve()


if __name__ == "__main__":
    main()
