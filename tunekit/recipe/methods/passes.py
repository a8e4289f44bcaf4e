"""Passes of a training method through the model besides one forward and one backward pass, as the planner counts them.

Supervised fine-tuning takes a row through the model once. DPO (TRL 1.16, trl/trainer/dpo_trainer.py) takes both answers
of a pair through it in one batch, then both through the reference model without gradients, while everything that the
backward pass needs is kept. KTO (trl/trainer/kto_trainer.py) does so with single answers, and its loss `kto` takes each
prompt with another's answer through both models besides, without gradients. ORPO and CPO (trl/experimental) have no
reference, and score with all logits at once; a reward model has a score of a text in their place. GRPO
(trl/trainer/grpo_trainer.py) first generates all answers of an optimizer step at once with a cache of keys and values,
and then trains on them in micro-batches. The others score tokens with the same head in tiles as supervised fine-tuning,
so logits are never there whole.

With adapters the reference is the model without them. Where all weights are trained it is a second model, in their
type, float32. DPO and KTO can compute its log-probabilities before training instead.

RLOO (trl/trainer/rloo_trainer.py) does as GRPO, and always scores its answers once before it learns from them.
Distillation (trl/trainer/distillation_trainer.py) generates one answer to each prompt, and takes each micro-batch
through a teacher between the forward and the backward pass, as DPO does through its reference.
"""

from dataclasses import dataclass
from typing import Literal

HeadKind = Literal["tiles", "sums", "chunks", "whole", "score"]
"""Head that scores tokens: TRL's in tiles; tunekit's in chunks, whose gradients are computed with them where the sum of
losses is learned from (`sums`), or are those of each token (`chunks`); the model's own with all logits at once; or one
that scores each token by one number."""


@dataclass(frozen=True)
class Generation:
    """The answers that are generated for an optimizer step."""

    num_sequences: int
    """On all devices together."""
    prompt_tokens: int
    """Length to which prompts are padded, at most."""
    completion_tokens: int
    """Length of the answers, at most."""
    num_steps: int
    """Optimizer steps on the same answers."""
    by_vllm: bool = False
    """True if vLLM generates them rather than transformers."""


@dataclass(frozen=True)
class MethodPasses:
    """Passes of a method in an optimizer step."""

    method: str = "sft"
    """`method.type`."""
    sequences_per_row: int = 1
    """Sequences that a row of a micro-batch is: both answers of a pair."""
    max_scored_share: float = 1.0
    """Share of the tokens that count in the loss, at most."""
    keeps_reference: bool = False
    """True if a reference model is loaded besides the trained one."""
    refers_in_micro_batch: bool = False
    """True if the reference is computed between the forward and the backward pass."""
    num_forwards: float = 0.0
    """Forward passes without gradients of each sequence, in each optimizer step."""
    num_forwards_before: int = 0
    """The same once, before the training."""
    generation: Generation | None = None
    head: HeadKind = "tiles"
    """Kind of head that scores tokens."""
    estimates: bool = False
    """True if each sequence passes the model and its reference once more, with another's answer."""
    least_rows: int = 1
    """Rows of a micro-batch that there are at least."""

    @property
    def num_reference_forwards(self) -> float:
        """Of `num_forwards` those of a reference model that is there besides the trained one."""
        if not self.keeps_reference:
            return 0.0
        if self.generation is not None:
            return 1 / self.generation.num_steps
        return 2.0 if self.estimates else 1.0

    @property
    def always_pads(self) -> bool:
        """True if TRL pads batches whatever the recipe says."""
        return self.method != "sft"


@dataclass(frozen=True)
class PassInputs:
    """Settings outside the method's section on which its passes depend."""

    is_full: bool
    """True if all weights are trained, and no adapter."""
    max_length: int
    """Longest sequence, in tokens."""
    global_batch_size: int
    """Rows, pairs or answers of an optimizer step."""
    by_vllm: bool
    """True if vLLM generates answers."""
