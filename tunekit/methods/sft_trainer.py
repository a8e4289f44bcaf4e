"""TRL's SFTTrainer with the same rows in each step, and the same evaluation, however they are divided."""

from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from tunekit.methods.order import Order


class DividedSFTTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer whose rows come in an order of ours, and whose evaluation is a mean over tokens.

    The trainer's own evaluation is a mean over micro-batches: it changes with their size, and a row repeated to fill
    the last one counts twice.

    Args:
        order: The order of the training rows; None for a stream, which has its own.
        given: As for SFTTrainer.
    """

    def __init__(self, order: Order | None, **given: Any) -> None:
        super().__init__(**given)
        self.order = order
        if order is not None:
            self.add_callback(order)
        self._nats = 0.0
        self._num_tokens = 0

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        return self.order

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate one micro-batch, and count its loss by its tokens."""
        result = super().prediction_step(model, inputs, *args, **kwargs)
        # The first token of a row is predicted from nothing.
        num_tokens = int((inputs["labels"][:, 1:] != -100).sum())
        self._nats += float(result[0]) * num_tokens
        self._num_tokens += num_tokens
        return result

    def evaluation_loop(
        self, dataloader: DataLoader[Any], *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Evaluate, and put the mean over all tokens of all processes in the place of the loss."""
        self._nats, self._num_tokens = 0.0, 0
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        sums = torch.tensor(gather_object([self._nats, self._num_tokens]), dtype=torch.float64).view(-1, 2).sum(0)
        output.metrics[f"{metric_key_prefix}_loss"] = float(sums[0] / sums[1])
        return output
