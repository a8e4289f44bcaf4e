"""TRL's SFTTrainer with an evaluation that is the same however its rows are divided."""

from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer


class TokenMeanSFTTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer whose evaluation is a mean over tokens, as its training is.

    The trainer's own evaluation is a mean over micro-batches: it changes with their size, and a row repeated to fill
    the last one counts twice.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._nats = 0.0
        self._num_tokens = 0

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
