"""GRPO whose reward is the similarity of features: hidden states of the model before training.

Rows have an answer, in the column `ground_truth`. It and the completions of its prompt are read by the model as it was:
without its adapter, with the adapter that training began with, or by a second model. That is the reference of the KL
term too, where there is one. TRL has no such trainer (trl 1.16), so this is one on top of its GRPOTrainer, whose
reward functions it precedes with its own.

Completions are embedded by the tokens that were generated, answers by those of their text. End tokens are in neither: a
completion that is cut off and one that ends there have the same features.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import gcd
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, pad, use_adapter

from tunekit.data.sources.ground_truth import ground_truth_tokens
from tunekit.errors import RunError
from tunekit.methods.arguments import COPY, Parts
from tunekit.methods.ebft.features import feature_rewards, layer_indices, pooled
from tunekit.methods.generation import rewarded_trainer
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.ebft import EBFTMethod


def build(method: EBFTMethod, parts: Parts) -> RunTrainer:
    """Build a trainer over prompts.

    Args:
        method: Features, groups, and what else goes to GRPOConfig.
        parts: All else. Rows have columns `prompt`, a text or messages, and `ground_truth`, a text, and others for
            further rewards.
    """
    if parts.plan.reference == "copied adapter":
        model: Any = parts.model
        model.add_adapter(COPY, model.peft_config[model.active_adapter])
    return rewarded_trainer(
        EBFTTrainer,
        GRPOConfig,
        method,
        parts,
        {"settings": method, "reference": parts.reference()},
        loss_type=method.loss_type,
        scale_rewards=method.scale_rewards,
    )


class EBFTTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that rewards features of completions like those of the row's answer.

    Args:
        settings: Features, and their weights.
        reference: The model before training, where it is a second one.
        args: TRL's settings.
        reward_funcs: Further rewards.
        given: Other arguments of GRPOTrainer.
    """

    def __init__(
        self,
        *,
        settings: EBFTMethod,
        reference: PreTrainedModel | None,
        args: GRPOConfig,
        reward_funcs: list[Any],
        **given: Any,
    ) -> None:
        self._settings = settings
        # With a coefficient TRL would load a reference, or copy the adapter, beside the ones that are here.
        beta, args.beta = args.beta, 0.0
        super().__init__(args=args, reward_funcs=[self.features, *reward_funcs], **given)
        self.beta = args.beta = beta
        if reference is not None:
            add_fused_lm_head(reference, temperature=self.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
            self.ref_model = self._prepared(reference)
        config = self.accelerator.unwrap_model(self.model).config.get_text_config()
        self._layers = layer_indices(settings.feature_layers, config.num_hidden_layers)

    @torch.no_grad()
    def features(
        self,
        prompts: list[Any],
        completion_ids: list[list[int]],
        ground_truth: list[str],
        log_metric: Any,
        **columns: Any,
    ) -> list[float]:
        """Return the reward of each completion, as TRL calls a reward function. Called by all processes together.

        Args:
            prompts: Prompts of the completions, texts or messages.
            completion_ids: Token ids of the completions.
            ground_truth: Answers of their rows.
            log_metric: Logs a number.
            columns: Other columns of the rows.

        Raises:
            RunError: Features are not finite.
        """
        method, num_completions = self._settings, len(prompts)
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        # Completions of a prompt may lie on several processes: so many of them in a row always have the same one.
        stride = gcd(num_completions, group_size)
        prompt_ids = self._tokenize_prompts(prompts)[0]
        answer_ids = [ground_truth_tokens(text, self._tokenizer) for text in ground_truth[::stride]]
        sequences = [
            *zip(prompt_ids, map(self._without_end, completion_ids), strict=True),
            *zip(prompt_ids[::stride], answer_ids, strict=True),
        ]
        embeddings = self._embeddings(sequences)
        own, answers = embeddings[:num_completions], embeddings[num_completions:]
        own, answers = self.accelerator.gather(own), self.accelerator.gather(answers)
        if not (own.isfinite().all() and answers.isfinite().all()):
            problem = "method.feature_layers: hidden states of the model before training are not finite"
            raise RunError(problem, hint="set model.dtype=float32, or use other layers")
        outcome = feature_rewards(
            own,
            answers[:: group_size // stride],
            alignment_coef=method.alignment_coef,
            diversity_coef=method.diversity_coef,
            use_whitening=method.use_whitening,
        )
        for name in ("alignment", "diversity", "cfm_loss"):
            log_metric(f"ebft/{name}", getattr(outcome, name).mean().item())
        start = self.accelerator.process_index * num_completions
        rewards: list[float] = outcome.rewards[start : start + num_completions].tolist()
        return rewards

    def _without_end(self, ids: list[int]) -> Sequence[int]:
        """Return the token ids of a completion without its end token."""
        tokens = list(ids)
        return tokens[:-1] if tokens and tokens[-1] in self.eos_token_ids else tokens

    def _embeddings(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
        """Return embeddings of prompts with answers in float32, `(sequences, features)`.

        Args:
            sequences: Token ids of each prompt, and of the answer to it.
        """
        args, model = self.args, self.model if self.ref_model is None else self.ref_model
        size = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        was_training = model.training
        model.eval()
        try:
            with self._before_training():
                batches = [
                    self._embed(model, sequences[start : start + size]) for start in range(0, len(sequences), size)
                ]
        finally:
            model.train(was_training)
        return torch.cat(batches)

    def _embed(self, model: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
        """Return embeddings of a micro-batch in float32, `(sequences, features)`."""
        device = self.accelerator.device
        rows = [torch.tensor([*prompt, *answer], device=device) for prompt, answer in sequences]
        prompt_lengths = torch.tensor([len(prompt) for prompt, _ in sequences], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        with self.accelerator.autocast():
            hidden = model(
                input_ids=pad(rows, padding_value=self._tokenizer.pad_token_id, padding_side="right"),
                attention_mask=pad([torch.ones_like(row) for row in rows], padding_value=0, padding_side="right"),
                output_hidden_states=True,
                logits_to_keep=1,
                use_cache=False,
            ).hidden_states
        method: EBFTMethod = self._settings
        chosen = torch.cat([hidden[layer].float() for layer in self._layers], dim=-1)
        return pooled(chosen, prompt_lengths, lengths, method.embed_method)

    def _before_training(self) -> AbstractContextManager[Any]:
        """Around a pass of the model before training: with its adapter as it was, or without one."""
        model = self.accelerator.unwrap_model(self.model)
        if self.ref_model is not None or not isinstance(model, PeftModel):
            return nullcontext()
        switched: AbstractContextManager[Any] = use_adapter(model, COPY if COPY in model.peft_config else None)
        return switched

    def _prepared(self, reference: PreTrainedModel) -> Any:
        """Return the second model as the engine has it."""
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(reference, self.accelerator)
        if self.is_fsdp_enabled:
            return prepare_fsdp(reference, self.accelerator)
        return self.accelerator.prepare_model(reference, evaluation_mode=True)
