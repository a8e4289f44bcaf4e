"""Progress of a process in a run, reported by its trainer and the layers of its model to the heartbeat.

What is told is kept in memory: a mark takes about a microsecond, and a step has a few of them. Layers tell in the
forward pass, and through their outputs in the backward pass, so that one pass through a model that takes minutes is not
taken for one that stands still; that takes some ten microseconds for each layer.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tunekit.process.heartbeat import Heart
from tunekit.recipe.methods import generates, is_rewarded

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle
    from transformers import Trainer

    from tunekit.recipe.methods.spec import MethodSection

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


def follow(trainer: "Trainer", method: "MethodSection", heart: Heart, layers: "list[RemovableHandle]") -> None:
    """Have a trainer tell what it is at, from here on.

    Args:
        trainer: The trainer, before its model is wrapped.
        method: Its method.
        heart: Which is told.
        layers: The hooks of its model's layers, which would split what is compiled.
    """
    if trainer.args.torch_compile:
        for hook in layers:
            hook.remove()
    take = trainer.get_batch_samples

    def rows_of_step(rows: Iterator[Any], *args: Any) -> Any:
        heart.mark("data", trainer.state.global_step + 1)
        return take(_moving(rows, heart), *args)

    trainer.get_batch_samples = rows_of_step
    trainer.training_step = _begins(trainer.training_step, heart, "forward")
    trainer.accelerator.backward = _begins(trainer.accelerator.backward, heart, "backward")
    trainer._save_checkpoint = _begins(trainer._save_checkpoint, heart, "saving")
    trainer.evaluate = _is(trainer.evaluate, heart, "evaluation")
    predict = trainer.prediction_step

    def batch_of_evaluation(*args: Any, **kwargs: Any) -> Any:
        heart.move()
        return predict(*args, **kwargs)

    trainer.prediction_step = batch_of_evaluation
    if generates(method):
        trainer._generate_single_turn = _is(trainer._generate_single_turn, heart, "generation")
    if is_rewarded(method):
        trainer._calculate_rewards = _is(trainer._calculate_rewards, heart, "rewards")


def _begins(call: Callable[P, T], heart: Heart, at: str) -> Callable[P, T]:
    """A call with which something begins that goes on until something else does."""

    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        heart.mark(at)
        return call(*args, **kwargs)

    return told


def _is(call: Callable[P, T], heart: Heart, at: str) -> Callable[P, T]:
    """A call that is something, at whose end what was before goes on."""

    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        before = heart.at
        heart.mark(at)
        answer = call(*args, **kwargs)
        heart.mark(before)
        return answer

    return told


def _moving(rows: Iterator[Any], heart: Heart) -> Iterator[Any]:
    for row in rows:
        heart.move()
        yield row
