"""The process that holds a model for a talk: it loads it, answers what it is asked, and ends with its parent's pipe.

`python -m tunekit.run.chat_worker` reads lines of JSON: first which model, then questions and wishes to stop. It writes
what it has loaded, then each answer in pieces with how it ended, or what is wrong. See `tunekit.run.chat`.
"""

import json
import os
import queue
import sys
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TextIO

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer, set_seed

from tunekit.errors import RunError, TunekitError
from tunekit.planner.states import Dtype
from tunekit.redact import Redacting
from tunekit.run.memory import is_out_of_memory, resident_bytes
from tunekit.run.quiet import library_words_to
from tunekit.run.silence import send_nothing_at_all
from tunekit.run.trained import Trained, find_trained, load_trained, stored_dtype, tokenizer_of

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
        """Whether each sequence, (batch,), is over."""
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
            told = json.loads(line)
            if "stop" in told:
                self.asked.set()
            else:
                self.asked.clear()
                self.lines.put(told)
        # The parent has closed its end, or is gone: whatever is computed, nobody waits for it.
        os._exit(0)

    def tell(self, words: dict[str, Any]) -> None:
        """Write a line to the parent."""
        self.out.write(json.dumps(words) + "\n")
        self.out.flush()

    def serve(self) -> None:
        """Load what the first line names, and answer the others."""
        first = self.lines.get()
        try:
            self._load(find_trained(first["name"], first["checkpoint"]), first["device"], compare=first["compare"])
        except TunekitError as error:
            self.tell({"problem": error.problem, "hint": error.hint})
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            hint = "free some of it, choose a smaller model, or take --device cpu"
            self.tell({"problem": f"{first['name']} does not fit the memory that is free", "hint": hint})
            return
        self.tell(self._facts())
        while True:
            question = self.lines.get()
            try:
                self.tell(self._answer(question))
            except TunekitError as error:
                self.tell({"problem": error.problem, "hint": error.hint})
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.tell({"problem": "memory ran out in the answer", "hint": "begin a shorter conversation"})

    def _load(self, found: Trained, device: str, *, compare: bool) -> None:
        self.found = found
        if device == "cuda" and not torch.cuda.is_available():
            raise RunError("there is no accelerator here", hint="take --device cpu")
        self.device = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        self.tokenizer = tokenizer_of(found)
        self.dtype = self._dtype(found)
        self.model: Any = load_trained(found, dtype=self.dtype, device=self.device)
        self.before: Any = None
        if compare and found.adapter is None and found.before is not None:
            self.before = load_trained(found.before, dtype=self.dtype, device=self.device)

    def _dtype(self, found: Trained) -> Dtype:
        """As it was computed in training; a processor without a type of 16 bits computes in float32."""
        if found.run is not None:
            planned = found.run.plan
            return planned.dtype if planned.device.kind == self.device else self._own_dtype(found)
        return self._own_dtype(found)

    def _own_dtype(self, found: Trained) -> Dtype:
        stored = stored_dtype(found)
        return "float32" if self.device == "cpu" and stored == "float16" else stored

    def _facts(self) -> dict[str, Any]:
        on_gpu = self.device == "cuda"
        return {
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "dtype": self.dtype,
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
            raise RunError(f"what {self.found.name} was before is not loaded", hint="begin the talk with compare")
        model = self.before if is_base and self.before is not None else self.model
        aside = model.disable_adapter() if is_base and self.before is None else nullcontext()
        ids = self._ids(question["say"])
        limit = self._room(model, ids, question["max_new_tokens"])
        given = torch.tensor([ids], device=self.device)
        draws: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if question["temperature"] > 0:
            draws = {"do_sample": True, "temperature": question["temperature"], "top_p": question["top_p"], "top_k": 0}
        with torch.inference_mode(), aside:
            output = model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=limit,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
                streamer=_Pieces(self.tokenizer, self),
                stopping_criteria=StoppingCriteriaList([_Asked(self.asked)]),
                **draws,
            )
        num_tokens = output.shape[1] - len(ids)
        reason = "stopped" if self.asked.is_set() else "length" if num_tokens >= limit else "end"
        return {"num_tokens": num_tokens, "seconds": time.perf_counter() - began, "reason": reason}

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, by the model's template; of a model without one, of its texts."""
        from jinja2 import TemplateError

        if not messages:
            raise RunError("nothing was said", hint="begin with a message")
        if self.tokenizer.chat_template is None or not self.found.is_chat:
            found: list[int] = self.tokenizer("\n".join(one["content"] for one in messages))["input_ids"]
            return found
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise RunError(
                f"the chat template of {self.found.name} refuses this conversation: {error}",
                hint="leave the system prompt out, and let user and assistant take turns",
            ) from error
        found = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def _room(self, model: Any, ids: list[int], asked: int) -> int:
        """Tokens that an answer may have."""
        limit = model.config.get_text_config().to_dict().get("max_position_embeddings")
        if limit is None:
            return asked
        if len(ids) >= limit:
            raise RunError(
                f"the conversation has {len(ids):,} tokens, and {self.found.name} takes {limit:,}",
                hint="clear it, and begin another one",
            )
        return min(asked, int(limit) - len(ids))


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
