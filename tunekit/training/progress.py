"""Progress of a process in a run, reported by its trainer and the layers of its model to the heartbeat.

What is told is kept in memory: a mark takes about a microsecond, and a step has a few of them. Layers tell in the
forward pass, and through their outputs in the backward pass, so that one pass through a model that takes minutes is not
taken for one that stands still; that takes some ten microseconds for each layer.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tunekit.process.watchdog import Heart

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

    from tunekit.methods.run_trainer import RunTrainer

P = ParamSpec("P")
T = TypeVar("T")


def follow_layers(model: "Module", heart: Heart) -> "list[RemovableHandle]":
    """Have the layers of a model tell that they are passed, from here on; the hooks can be taken away."""
    import torch
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Functions, which a copy of a model shares with it; a heart cannot be copied.
    def on_gradient(_: Any) -> None:
        heart.move()

    def on_layer(_: Any, __: Any, output: Any) -> None:
        heart.move()
        passed = output[0] if isinstance(output, tuple) else output
        if isinstance(passed, torch.Tensor) and passed.requires_grad:
            passed.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    return [layer.register_forward_hook(on_layer) for layer in layers]


def follow(trainer: "RunTrainer", heart: Heart, layers: "list[RemovableHandle]") -> None:
    """Have a trainer tell what it is at, from here on.

    Args:
        trainer: The trainer, before its model is wrapped.
        heart: Which is told.
        layers: The hooks of its model's layers, which would split what is compiled.
    """
    if trainer.args.torch_compile:
        for hook in layers:
            hook.remove()

    def take_batches(take: Callable[..., Any], rows: Iterator[Any], *args: Any) -> Any:
        heart.mark("data", trainer.state.global_step + 1)
        return take(_moving(rows, heart), *args)

    def evaluate_batch(predict: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        heart.move()
        return predict(*args, **kwargs)

    trainer.wrap("batches_of_step", take_batches)
    trainer.wrap("prediction_step", evaluate_batch)
    trainer.wrap("training_step", partial(_begin, heart, "forward"))
    trainer.wrap("backward", partial(_begin, heart, "backward"))
    trainer.wrap("save_checkpoint", partial(_begin, heart, "saving"))
    trainer.wrap("evaluate", partial(_do, heart, "evaluation"))
    trainer.wrap("generate", partial(_do, heart, "generation"))
    trainer.wrap("calculate_rewards", partial(_do, heart, "rewards"))


def _begin(heart: Heart, at: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call with which something begins that goes on until something else does."""
    heart.mark(at)
    return call(*args, **kwargs)


def _do(heart: Heart, at: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call that is something, at whose end what was before goes on."""
    before = heart.at
    heart.mark(at)
    answer = call(*args, **kwargs)
    heart.mark(before)
    return answer


def _moving(rows: Iterator[Any], heart: Heart) -> Iterator[Any]:
    for row in rows:
        heart.move()
        yield row
