"""Answers of a page in the order in which its browser asked for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

_SENT = "(...given) => [...given.slice(0, -2), performance.now(), null]"


@dataclass
class Newest:
    """The latest request of one page.

    Attributes:
        sent: Milliseconds by the browser's clock at which it was sent.
    """

    sent: float = 0.0


def attach_in_order(
    events: Sequence[Any],
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[gr.Component],
    outputs: Sequence[gr.Component],
    **options: Any,
) -> None:
    """Attach a function to events that may follow each other at once, and show only what the latest of them asked for.

    Gradio handles two requests in the order in which they arrive and shows an answer when it is there, also where a
    later request was answered before.

    Args:
        events: Methods of components that listen, such as `text.change`.
        function: Computes one value for each output.
        inputs: Its arguments.
        outputs: What its values are shown in.
        options: Further options of each listener.
    """

    def answer(*given: Any) -> Sequence[Any]:
        *values, sent, newest = given
        skipped = [gr.skip()] * len(outputs)
        if sent < newest.sent:
            return skipped
        newest.sent = sent
        computed = function(*values)
        return computed if newest.sent == sent else skipped

    sent, newest = gr.Number(visible="hidden", label="sent"), gr.State(Newest())
    given = [*inputs, sent, newest]
    for event in events:
        event(answer, given, outputs, js=_SENT, show_progress="hidden", trigger_mode="always_last", **options)
