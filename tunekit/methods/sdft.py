"""Self-distillation fine-tuning (arXiv 2601.19897): the model, shown a demonstration, scores its own completions.

TRL's SDFTTrainer (trl 1.16, experimental) makes the logits of both whole, and takes a mean over completions of means
over their tokens. Here completions come from DistillationTrainer, and the loss is its own: the tiled divergence, a mean
over the tokens of a step. The teacher reads another prompt, made when rows are prepared, and is the model without its
adapter, a copy of it, or the model as it is.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from trl import DistillationConfig, DistillationTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import pad, selective_log_softmax, use_adapter

from tunekit.data.sources.teacher_prompts import TEACHER_PROMPT
from tunekit.methods.arguments import COPY, Parts
from tunekit.methods.distillation import compute_under_autocast
from tunekit.methods.divergence import divergences, hidden_states, with_head
from tunekit.methods.generation import generating_trainer, generation_arguments
from tunekit.methods.head import language_model, trl_head
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.sdft import SDFTMethod


def build(method: SDFTMethod, parts: Parts) -> RunTrainer:
    """Build a trainer over prompts.

    Args:
        method: The divergence, the teacher, and what else goes to DistillationConfig.
        parts: All else. Rows have columns `prompt` and `teacher_prompt`, of texts or messages.
    """
    if parts.plan.reference == "copied adapter":
        model: Any = parts.model
        model.add_adapter(COPY, model.peft_config[model.active_adapter])
    trainer = generating_trainer(
        SDFTTrainer,
        method,
        parts,
        reference=parts.reference(),
        without_adapter=method.teacher_model_kind == "base",
        num_skipped=method.num_loss_tokens_to_skip,
        args=DistillationConfig(
            **parts.arguments(),
            beta=method.beta,
            disable_dropout=True,
            **{**method.trainer_args, **generation_arguments(method, parts.data, parts.plan)},
        ),
    )
    compute_under_autocast(trainer)
    return trainer


class SDFTTrainer(DistillationTrainer):  # type: ignore[misc]
    """DistillationTrainer whose teacher is the model itself, which reads another prompt.

    Args:
        reference: The model before training, where it is a second one.
        without_adapter: Whether the adapter that is trained is off, or its copy in its place, for the teacher.
        num_skipped: First tokens of each completion that the loss leaves out.
        given: Arguments of DistillationTrainer.
    """

    def __init__(
        self, *, reference: PreTrainedModel | None, without_adapter: bool, num_skipped: int, **given: Any
    ) -> None:
        super().__init__(teacher_model=None, **given)
        self._without_adapter, self._num_skipped = without_adapter, num_skipped
        with trl_head(language_model(self.accelerator.unwrap_model(self.model))) as bound:
            self._bound = dict(bound)
        self.ref_model: Any = reference
        if reference is not None and self.is_deepspeed_enabled:
            self.ref_model = prepare_deepspeed(reference, self.accelerator)
        elif reference is not None and self.is_fsdp_enabled:
            self.ref_model = prepare_fsdp(reference, self.accelerator)
        elif reference is not None:
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate completions, and add the teacher's prompts, padded on the left, `(completions, tokens)`."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        prompts, *_ = self._tokenize_prompts([row[TEACHER_PROMPT] for row in inputs])
        rows = [torch.tensor(ids) for ids in prompts]
        masks = [torch.ones_like(ids) for ids in rows]
        device = self.accelerator.device
        fill = self.processing_class.pad_token_id
        output["teacher_ids"] = pad(rows, padding_value=fill, padding_side="left").to(device)
        output["teacher_mask"] = pad(masks, padding_value=0, padding_side="left").to(device)
        if self._num_skipped:
            counted = output["completion_mask"][:, self._num_skipped :].sum()
            output["num_items_in_batch"] = self.accelerator.gather(counted).sum()
        return output

    def _compute_loss(
        self, student: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of a micro-batch, the sum of the student's entropies in nats, and the number of tokens.

        Called within the student's forward pass.
        """
        # Completion tokens in the loss, by row and place.
        rows, places = inputs["completion_mask"].nonzero(as_tuple=True)
        is_counted = places >= self._num_skipped
        rows, places = rows[is_counted], places[is_counted]
        own = self._hidden(student, inputs, "prompt", rows, places)
        teacher: Any = student if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
        with torch.no_grad(), self._as_teacher(teacher):
            arguments = teacher, inputs, "teacher", rows, places
            if self.ref_model is None:
                its = self._hidden(*arguments)
            else:
                its = self._forward_redirection(self.ref_model, teacher, self._hidden, *arguments)
            scorer = with_head(teacher, its)
        divergence, entropy = divergences(
            with_head(student, own),
            scorer,
            self._bound,
            self._bound,
            beta=self.beta,
            temperature=self.temperature,
        )
        num_tokens = torch.tensor(len(rows), device=own.device)
        loss = divergence.sum() / (num_tokens.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return loss, entropy.sum().detach(), num_tokens

    def _hidden(self, model: Any, inputs: dict[str, Any], prompt: str, rows: Tensor, places: Tensor) -> Tensor:
        """Return the hidden states before tokens of completions, `(tokens, hidden)`.

        Args:
            model: The model.
            inputs: A micro-batch.
            prompt: Prompts that it reads: `prompt` or `teacher`.
            rows: Rows of the tokens, `(tokens,)`.
            places: Their places in the completions, `(tokens,)`.
        """
        ids, mask = inputs[f"{prompt}_ids"], inputs[f"{prompt}_mask"]
        width = ids.size(1)
        batch = {
            "input_ids": torch.cat([ids, inputs["completion_ids"]], dim=1),
            "attention_mask": torch.cat([mask, inputs["completion_mask"]], dim=1),
        }
        return hidden_states(model, batch, rows * batch["input_ids"].size(1) + width - 1 + places)

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Tensor, mask: Tensor, num_scored: int
    ) -> tuple[Tensor, None, None]:
        """Return log-probabilities of the last tokens of rows, `(rows, tokens)`, as GRPOTrainer does."""
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -num_scored - 1 : -1].float()
        return selective_log_softmax(logits, ids[:, -num_scored:]), None, None

    def _as_teacher(self, model: Any) -> AbstractContextManager[Any]:
        """Around the teacher's pass: without the adapter that is trained, where the teacher is the model before it."""
        if not self._without_adapter or not isinstance(model, PeftModel):
            return nullcontext()
        switched: AbstractContextManager[Any] = use_adapter(model, COPY if COPY in model.peft_config else None)
        return switched
