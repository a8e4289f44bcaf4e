"""Process reward modeling: a model with a head of two classes learns to tell good steps of answers from bad ones.

TRL has no trainer for it any more (1.16). Each step is scored at the last token of the separator behind it, with the
cross-entropy of transformers' models for token classification. The loss is a mean over the steps of an optimizer step,
however rows are divided into micro-batches.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tunekit.data.tokenization.steps import SEPARATOR_KEY, StepTokens
from tunekit.kernels.cross_entropy import IGNORED
from tunekit.methods.arguments import Parts
from tunekit.methods.run_trainer import RunTrainer
from tunekit.methods.sft import TokenMeanSFTTrainer, token_trainer
from tunekit.recipe.methods.prm import PRMMethod


def build(method: PRMMethod, parts: Parts) -> RunTrainer:
    """A trainer over answers with labelled steps.

    Args:
        method: The separator of steps, and what else goes to SFTConfig.
        parts: All else. Rows have columns `prompt`, text or messages, `completions`, the steps, and `labels`.
    """
    steps = StepTokens(parts.tokenizer, method.step_separator, method.train_on_last_step_only)
    # It is saved with the tokenizer, beside adapters too.
    parts.tokenizer.init_kwargs[SEPARATOR_KEY] = method.step_separator
    evaluated = None if parts.eval_dataset is None else steps.of_all.of_rows(parts.eval_dataset)
    with_tokens = replace(parts, train_dataset=steps.of_rows(parts.train_dataset), eval_dataset=evaluated)
    # TRL's trainer makes its own collator for models that generate.
    collation = {"data_collator": DataCollatorForLanguageModeling(parts.tokenizer.pad_token_id)}
    # The loss of routers is no part of that of steps.
    return token_trainer(PRMTrainer, with_tokens, {**method.trainer_args, "router_aux_loss_coef": 0.0}, collation)


class PRMTrainer(TokenMeanSFTTrainer):
    """TokenMeanSFTTrainer whose loss is the cross-entropy of steps, a mean over the steps of an optimizer step."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._num_right = self._num_steps = 0.0
        """Steps of an evaluation so far: those whose likelier class is their label, and all."""

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The loss of a micro-batch, as its share of the mean over the steps of the optimizer step."""
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False).logits
        is_step = inputs["labels"] != IGNORED
        scores, labels = logits[is_step], inputs["labels"][is_step]
        summed = cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), labels, reduction="sum")
        self._keep_counts([(scores.argmax(-1) == labels).sum(), is_step.sum(), inputs["attention_mask"].sum()])
        loss = self._share(summed, len(labels), num_items_in_batch if self.model.training else None)
        return (loss, None) if return_outputs else loss

    def _tell(self, noted: list[Tensor], mode: str) -> None:
        """Log what was kept of micro-batches, of all processes together. Called by all of them."""
        # (processes, micro-batches, counts)
        gathered = self.accelerator.gather(torch.stack(noted)[None])
        num_right, num_steps, num_read = gathered.sum((0, 1)).tolist()
        if mode == "train":
            self._total_train_tokens += int(num_read)
            self._metrics[mode]["accuracy"].append(num_right / max(1.0, num_steps))
        else:
            self._num_right += num_right
            self._num_steps += num_steps
            self._metrics[mode]["accuracy"] = [self._num_right / max(1.0, self._num_steps)]
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate all rows, whose steps count alike."""
        self._num_right = self._num_steps = 0.0
        return super().evaluation_loop(dataloader, *args, **kwargs)
