"""TRL's experimental trainers of pairs on token ids, with a count of them.

By themselves they tokenise texts without the tokenizer's own special tokens, put a start token before every prompt
where the tokenizer knows one, whether its template has it or not, and an end token behind every answer that does not
end with one: behind ChatML's `<|im_end|>` and line break a second one (trl 1.16, `ORPOTrainer.tokenize_row`). Here a
pair is the tokens that DPO trains on.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from tunekit.data.tokenization.alignment import tokenised_pairs
from tunekit.methods.arguments import Parts


class _Tokenised:
    """Rows that are tokenised, and the tokens of those that were trained on, which the others of TRL's trainers log."""

    _num_tokens = 0

    def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        """A row as it is."""
        return feature

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of a micro-batch, whose tokens are counted."""
        own = inputs["chosen_attention_mask"].sum() + inputs["rejected_attention_mask"].sum()
        self._num_tokens += int(self.accelerator.gather(own).sum())  # type: ignore[attr-defined]
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log with the number of tokens, by the name that TRL's other trainers have for it."""
        logs["num_tokens"] = self._num_tokens
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class TokenisedORPOTrainer(_Tokenised, ORPOTrainer):  # type: ignore[misc]
    """ORPOTrainer on token ids."""


class TokenisedCPOTrainer(_Tokenised, CPOTrainer):  # type: ignore[misc]
    """CPOTrainer on token ids."""


def with_tokens(parts: Parts) -> Parts:
    """Parts whose pairs are tokenised."""
    tokens = partial(tokenised_pairs, tokenizer=parts.tokenizer, max_length=parts.data.max_length)
    evaluated = None if parts.eval_dataset is None else tokens(parts.eval_dataset)
    return replace(parts, train_dataset=tokens(parts.train_dataset), eval_dataset=evaluated)
