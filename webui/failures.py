"""Gradio's pages as these are served, and failures as a visitor sees them: in words, and with every button free again.

A handler that raises is told in a toast, whichever it is: `Pages` sees them all. One that says that it is busy first is
decorated with `told_by`, which shows the failure where the page shows errors, and gives its buttons back.
"""

import copy
import functools
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, ParamSpec, TypeVar

import gradio as gr

import tunekit
from tunekit import frontend

SHOWN_SECONDS = 10
"""Seconds that a toast is shown."""

MAX_TOASTS = 256
"""Of those that stand, how many are remembered."""

P = ParamSpec("P")
T = TypeVar("T")


def in_words(error: Exception) -> tunekit.TunekitError:
    """An error as a page tells it: as it is, or as a defect of tunekit, whose traceback is printed."""
    if isinstance(error, tunekit.TunekitError):
        return error
    print(*traceback.format_exception(error), sep="", end="", file=sys.stderr, flush=True)
    message = ": ".join(filter(None, [type(error).__name__, frontend.redacted(str(error))]))
    hint = "the terminal of `tunekit ui` shows where; try again, and report it if it fails again"
    return tunekit.TunekitError(f"tunekit itself failed: {message}", hint=hint)


def told_by(
    show: Callable[[tunekit.TunekitError], T],
) -> Callable[[Callable[P, Iterator[T]]], Callable[P, Iterator[T]]]:
    """Decorate a handler that answers in steps: where it raises, its last answer is that of `show`.

    Args:
        show: Makes of an error what the outputs are to show, with every button free again.
    """

    def decorate(handler: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
        @functools.wraps(handler)
        def answer(*args: P.args, **options: P.kwargs) -> Iterator[T]:
            try:
                yield from handler(*args, **options)
            except Exception as error:  # noqa: BLE001  (whatever it is, the page is to say so and not to wait for ever)
                yield show(in_words(error))

        return answer

    return decorate


def _is_skipped(prediction: object) -> bool:
    return isinstance(prediction, dict) and prediction == gr.skip()


class Pages(gr.Blocks):  # type: ignore[misc]  # gradio has no types
    """Gradio's pages, whose visitors are told in a toast of every handler that raises."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._standing: OrderedDict[tuple[str | None, str], float] = OrderedDict()

    def begin_page(self, path: str, title: str) -> None:
        """Put the components that follow on a page of its own.

        `route` does so for a context of each page, and makes an application at the end of each: most of a start.
        """
        self.pages.append((path, title, True))
        self.current_page = path

    async def process_api(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Gradio's, which runs each handler or a step of it; what it raises has words."""
        try:
            answer: dict[str, Any] = await super().process_api(*args, **options)
        except gr.Error:
            raise
        except Exception as error:
            raise self._toast(in_words(error), options.get("session_hash")) from error
        return answer

    async def postprocess_data(self, block_fn: Any, predictions: Any, state: Any) -> list[Any]:
        """Gradio's, for the outputs that are not skipped.

        Gradio (6.31) builds a component anew for each `gr.skip()` as well, and keeps it for the browser: of a run's
        page 30 a tick, which took more than all else that the server does.
        """
        outputs = block_fn.outputs
        if not isinstance(predictions, list | tuple) or len(predictions) != len(outputs) or len(outputs) < 2:
            return list(await super().postprocess_data(block_fn, predictions, state))
        places = [place for place, prediction in enumerate(predictions) if not _is_skipped(prediction)]
        answers: list[Any] = [gr.skip() for _ in outputs]
        if places:
            part = copy.copy(block_fn)
            part.outputs = [outputs[place] for place in places]
            shown = [predictions[place] for place in places]
            shown = shown[0] if len(places) == 1 and not block_fn.batch else shown
            for place, answer in zip(places, await super().postprocess_data(part, shown, state), strict=True):
                answers[place] = answer
        return answers

    def _toast(self, error: tunekit.TunekitError, session: str | None) -> gr.Error:
        """A toast; one that stands in a page already is not shown there once more, as a timer would have it."""
        now, key = time.monotonic(), (session, str(error))
        is_new = now - self._standing.get(key, float("-inf")) >= SHOWN_SECONDS
        if is_new:
            self._standing[key] = now
            while len(self._standing) > MAX_TOASTS:
                self._standing.popitem(last=False)
        return gr.Error(escape(str(error)), SHOWN_SECONDS, visible=is_new, print_exception=False)
