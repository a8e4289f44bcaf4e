"""Classification: a model with a head of a score for each label learns the labels of texts.

The scores are read at the last token that is no padding, with the losses of transformers' models for sequence
classification: cross-entropy where a text has one label, binary cross-entropy where it may have several. The loss is a
mean over the texts of an optimizer step, however rows are divided into micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from tunekit.data.tokenization.classes import ClassTokens
from tunekit.kernels.cross_entropy import IGNORED
from tunekit.methods.arguments import Parts
from tunekit.methods.run_trainer import RunTrainer
from tunekit.methods.sft import TokenMeanSFTTrainer, token_trainer
from tunekit.recipe.methods.classification import ClassificationMethod


def build(method: ClassificationMethod, parts: Parts) -> RunTrainer:
    """A trainer over texts with labels.

    Args:
        method: The labels, and what else goes to SFTConfig.
        parts: All else. Rows have columns `prompt`, text or messages, and `label`.
    """
    head, pad = method.score_head, parts.tokenizer.pad_token_id
    tokens = ClassTokens(parts.tokenizer, head, parts.data.max_length)
    evaluated = None if parts.eval_dataset is None else tokens.of_rows(parts.eval_dataset)
    with_tokens = replace(parts, train_dataset=tokens.of_rows(parts.train_dataset), eval_dataset=evaluated)
    # The loss of routers is no part of that of labels.
    return token_trainer(
        ClassificationTrainer,
        with_tokens,
        {**method.trainer_args, "router_aux_loss_coef": 0.0},
        {"data_collator": ClassCollator(pad)},
        no_labels=[float(IGNORED)] * head.num_labels if head.is_multi_label else IGNORED,
    )


@dataclass(frozen=True)
class ClassCollator:
    """Texts of a micro-batch padded behind their ends, with their labels.

    Attributes:
        pad_token_id: Token of padding.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask`, `(batch, seq)`, and `labels`, `(batch,)` or `(batch, labels)`."""
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }


class ClassificationTrainer(TokenMeanSFTTrainer):
    """TokenMeanSFTTrainer whose loss is the cross-entropy of labels, a mean over what is labeled in a step.

    Labels are positions, whatever their shape, or floats with a last dimension of all labels, of which any are 1.
    """

    reports_f1 = True

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._counts: Tensor | float = 0.0
        """Sums of an evaluation so far, of all processes, float64: right, labeled and tokens read; then for each label
        how often it was right, predicted and there."""

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The loss of a micro-batch, as its share of the mean over the labels of the optimizer step."""
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False).logits
        labels = inputs["labels"]
        has_several = labels.is_floating_point()
        is_labeled = (labels[..., 0] if has_several else labels) != IGNORED
        scores, labels = logits[is_labeled], labels[is_labeled]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if has_several:
            summed = binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="sum")
            predicted = scores > 0
            is_right = (predicted == labels.bool()).all(-1)
        else:
            summed = cross_entropy(scores, labels, reduction="sum")
            predicted = scores.argmax(-1)
            is_right = predicted == labels
        counts = [is_right.sum(), is_labeled.sum(), inputs["attention_mask"].sum()]
        if self.reports_f1 and not self.model.training:
            counts += by_label(predicted, labels, scores.shape[-1])
        self._keep_counts(counts)
        loss = self._share(summed, labels.numel(), num_items_in_batch if self.model.training else None)
        return (loss, None) if return_outputs else loss

    def _num_counted(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of losses of which a micro-batch's is the mean."""
        return int((inputs["labels"] != IGNORED).sum())

    def _tell(self, noted: list[Tensor], mode: str) -> None:
        """Log what was kept of micro-batches, of all processes together. Called by all of them."""
        # (processes, micro-batches, counts)
        gathered = self.accelerator.gather(torch.stack(noted)[None])
        counts = gathered.sum((0, 1)).cpu()
        if mode == "train":
            self._total_train_tokens += int(counts[2])
            self._metrics[mode]["accuracy"].append(float(counts[0] / counts[1].clamp_min(1)))
        else:
            self._counts = counts = self._counts + counts
            self._metrics[mode]["accuracy"] = [float(counts[0] / counts[1].clamp_min(1))]
            if self.reports_f1:
                self._metrics[mode]["f1"] = [mean_f1(*counts[3:].view(3, -1))]
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate all rows, which count alike."""
        self._counts = 0.0
        return super().evaluation_loop(dataloader, *args, **kwargs)


def by_label(predicted: Tensor, labels: Tensor, num_labels: int) -> list[Tensor]:
    """Return how often each label was predicted where it is, was predicted, and is: three of `(labels,)`, integers.

    Args:
        predicted: Positions, `(rows,)`, or whether each label is predicted, `(rows, labels)`.
        labels: Positions, or 1 for each label that a row has.
        num_labels: Number of labels.
    """
    if predicted.dtype == torch.bool:
        actual = labels.bool()
        return [each.sum(0) for each in (predicted & actual, predicted, actual)]
    right = predicted[predicted == labels]
    return [torch.bincount(each, minlength=num_labels) for each in (right, predicted, labels)]


def mean_f1(right: Tensor, predicted: Tensor, actual: Tensor) -> float:
    """Return the mean F1 score of the labels that occur or are predicted (scikit-learn's macro average).

    Args:
        right: How often each label was predicted where it is, `(labels,)`.
        predicted: How often it was predicted.
        actual: How often it is.
    """
    occurs = (predicted + actual) > 0
    return float((2 * right[occurs] / (predicted + actual)[occurs]).mean()) if occurs.any() else 0.0
