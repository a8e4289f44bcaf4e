"""Process reward modeling: a model with a head of two classes learns to tell good steps of answers from bad ones.

TRL has no trainer for it any more (1.16). Each step is scored at the last token of the separator behind it, with the
cross-entropy of transformers' models for token classification. The loss is a mean over the steps of an optimizer step,
however rows are divided into micro-batches.
"""

from dataclasses import replace

from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tunekit.data.tokenization.steps import SEPARATOR_KEY, StepTokens
from tunekit.methods.arguments import Parts
from tunekit.methods.classification import ClassificationTrainer
from tunekit.methods.run_trainer import RunTrainer
from tunekit.methods.sft import token_trainer
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


class PRMTrainer(ClassificationTrainer):
    """ClassificationTrainer of tokens: steps at the last tokens of their separators, and -100 elsewhere."""

    reports_f1 = False
