"""Asynchronous roll-outs: a vLLM server generates the completions of later steps while a step is trained.

TRL has a trainer of its own for that (`AsyncGRPOTrainer`, trl 1.16, experimental), whose completions come when they are
done. Here a step asks for completions of the prompts that come next anyway. With a lag of one step they are given
by the model before the last update, and nothing is in flight while the server gets new weights, so that a run can be
repeated. With a longer lag the server pauses for them, and goes on with the new ones (PipelineRL, arXiv 2509.19128).
Either way it returns the probability that it drew each token with, from which GRPOTrainer takes importance weights.

The main process alone asks the server, for all, as in TRL.
"""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunekit.methods.run_trainer import RunTrainer

Completions = Mapping[str, Any]
"""Token ids and log-probabilities of all completions, by the names of TRL's client."""


@dataclass(frozen=True)
class _Request:
    """Completions that were asked for.

    Attributes:
        step: The step that takes them.
        asked_at: The step with whose weights they were asked for.
        prompts: Token ids of the prompts, each once.
        answer: The completions, once they are there.
        is_restored: Whether they come from a checkpoint.
    """

    step: int
    asked_at: int
    prompts: list[list[int]]
    answer: Future[Completions]
    is_restored: bool = False

    @property
    def age(self) -> int:
        """Steps by which the model that was asked is older than the one that takes them."""
        return self.step - self.asked_at

    @classmethod
    def begin(cls, step: int, asked_at: int, prompts: list[list[int]], ask: Callable[[], Completions]) -> "_Request":
        """Ask in a thread, which does not keep the process from ending."""
        request = cls(step, asked_at, prompts, Future())
        Thread(target=request._run, args=(ask,), daemon=True).start()
        return request

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "_Request":
        """Return one of a checkpoint."""
        answer: Future[Completions] = Future()
        answer.set_result(saved["completions"])
        return cls(saved["step"], saved["asked_at"], saved["prompts"], answer, is_restored=True)

    def saved(self) -> dict[str, Any]:
        """Return it as a checkpoint holds it."""
        return {
            "step": self.step,
            "asked_at": self.asked_at,
            "prompts": self.prompts,
            "completions": self.answer.result(),
        }

    def _run(self, ask: Callable[[], Completions]) -> None:
        try:
            self.answer.set_result(ask())
        except Exception as error:  # noqa: BLE001  (it is raised where the completions are due)
            self.answer.set_exception(error)


class AsyncRollouts:
    """Has completions generated before their step begins.

    Args:
        trainer: A trainer of TRL's that generates by a vLLM server, once for each step.
        max_staleness: Steps from a request to the one that takes its completions, at most.
    """

    def __init__(self, trainer: "RunTrainer", max_staleness: int) -> None:
        trainer.rollouts_ahead = []
        if not trainer.accelerator.is_main_process:
            return
        self._trainer = trainer
        self._max_staleness = max_staleness
        self._requests: deque[_Request] = deque()
        self._step: int | None = None
        """The last step that completions were taken for."""
        self._is_due = False
        """True if TRL's next question is that for the completions of the step."""
        server = trainer.vllm_generation
        self._client = server.vllm_client
        self._ask: Callable[..., Completions] = self._client.generate
        self._client.generate = self._answer
        self._sync, server.sync_weights = server.sync_weights, self._pause_and_sync
        trainer.wrap("generate", self._generate)
        trainer.wrap("await_rollouts", self._await)

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the completions of a step, and ask for those of later ones."""
        trainer = self._trainer
        if not trainer.model.training:
            # The server gets the weights that are evaluated.
            wait(request.answer for request in self._requests)
            return generate(*args, **kwargs)
        step = trainer.state.global_step
        if step == self._step:
            # Groups that are drawn again.
            return generate(*args, **kwargs)
        if self._step is None:
            self._requests.extend(map(_Request.restored, trainer.rollouts_ahead or ()))
            while self._requests and self._requests[-1].age > self._max_staleness:
                # The run that was resumed went further ahead.
                self._requests.pop()
        if self._requests:
            # The server gets the weights of this step next.
            wait([self._requests[0].answer])
        self._step, self._is_due = step, True
        completions = generate(*args, **kwargs)
        self._ask_ahead(step)
        return completions

    def _answer(self, prompts: list[list[int]], **sampling: Any) -> Completions:
        """Answer TRL's question for completions."""
        if not self._is_due:
            return self._ask(prompts, **sampling)
        self._is_due, self._sampling = False, sampling
        step = self._trainer.state.global_step
        if self._requests and (step, prompts) != (self._requests[0].step, self._requests[0].prompts):
            assert self._requests[0].is_restored, f"step {step} has other prompts than the request for it"
            # A step of the run that was resumed had other ones, such as more of them.
            self._requests.clear()
        staleness, completions = 0, None
        if self._requests:
            request = self._requests.popleft()
            staleness, completions = request.age, request.answer.result()
        self._trainer.metrics["train"]["sample/staleness_mean"].append(float(staleness))
        return completions or self._ask(prompts, **sampling)

    def _ask_ahead(self, step: int) -> None:
        """Ask for the completions of later steps with the weights of this one."""
        trainer = self._trainer
        last = min(step + self._max_staleness, trainer.state.max_steps - 1)
        for later in range(step + 1 + len(self._requests), last + 1):
            rows = [trainer.train_dataset[place]["prompt"] for place in trainer.prompt_order.of_batch(later)]
            prompts = trainer.prompt_tokens(rows)
            ask = partial(self._ask, prompts, **self._sampling)
            self._requests.append(_Request.begin(later, step, prompts, ask))

    def _pause_and_sync(self) -> None:
        """Give the server new weights.

        Raises:
            Exception: Of a request that has failed: the server may not be there any more.
        """
        if self._requests and self._requests[0].answer.done():
            self._requests[0].answer.result()
        if all(request.answer.done() for request in self._requests):
            self._sync()
            return
        self._client._post(f"{self._client.base_url}/pause", params={"mode": "keep"})
        self._sync()
        self._client._post(f"{self._client.base_url}/resume")

    def _await(self, call: Callable[[], None]) -> None:
        """Wait for all completions, and give them to the trainer for a checkpoint.

        What the server failed to give is asked for again by the run that is resumed, of its own model.
        """
        call()
        wait(request.answer for request in self._requests)
        whole = takewhile(lambda request: request.answer.exception() is None, self._requests)
        self._trainer.rollouts_ahead = [request.saved() for request in whole]
