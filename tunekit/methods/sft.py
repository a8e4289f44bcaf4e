"""Supervised fine-tuning through TRL's SFTTrainer, on rows that tunekit has tokenised, masked and packed.

TRL's SFTTrainer with means over tokens that are the same however rows and sequences are divided.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from tunekit.data.media.collate import MediaCollator
from tunekit.kernels.cross_entropy import IGNORED
from tunekit.methods.arguments import Parts
from tunekit.methods.run_trainer import Order, RunTrainer, filled, filled_stream, keep_order, num_missing
from tunekit.recipe.methods.sft import SFTMethod


def build(method: SFTMethod, parts: Parts) -> RunTrainer:
    """A trainer over token ids and labels.

    Args:
        method: What else goes to SFTConfig.
        parts: All else. Rows have columns `input_ids` and `labels` (-100 off the loss), and `seq_lengths` where packed.
    """
    # TRL has no such loss: our head weighs tokens by their entropies.
    is_eaft = method.loss_type == "eaft"
    arguments = {**method.trainer_args, "loss_type": "nll" if is_eaft else method.loss_type}
    weighting = {"entropy_top_k": method.eaft_top_k, "entropy_power": method.eaft_alpha} if is_eaft else {}
    return token_trainer(TokenMeanSFTTrainer, parts, arguments, weighting=weighting)


def token_trainer(
    base: type["TokenMeanSFTTrainer"],
    parts: Parts,
    trainer_args: Mapping[str, Any],
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    no_labels: Any = (IGNORED,),
    weighting: Mapping[str, Any] = MappingProxyType({}),
) -> RunTrainer:
    """A trainer over token ids and labels, whose losses are means over the tokens of a step.

    Args:
        base: Its class.
        parts: The parts of a trainer.
        trainer_args: Arguments of SFTConfig.
        given: Arguments of the trainer that only its class has.
        no_labels: Labels of a row that is not trained on.
        weighting: Weights of tokens in the sum of losses, as `replace_heads` takes them.
    """
    from datasets import Dataset
    from trl import SFTConfig

    from tunekit.methods.head import name_scored_positions, replace_heads

    # Processes that divide sequences bring each other micro-batches of their own.
    side_by_side = parts.plan.layout.num_batches * parts.plan.layout.sp_size
    at_once = parts.plan.micro_batch_size * side_by_side if side_by_side > 1 else 1
    pad, order = parts.tokenizer.pad_token_id, None
    train_dataset, eval_dataset = parts.train_dataset, parts.eval_dataset
    if isinstance(train_dataset, Dataset):
        num_rows, missing = len(train_dataset), num_missing(len(train_dataset), at_once)
        order = Order(num_rows, missing, repeats=False, shuffle=parts.data.shuffle, seed=parts.train.seed)
        train_dataset = filled(train_dataset, at_once, pad, no_labels)
    else:
        train_dataset = filled_stream(train_dataset, parts.train.global_batch_size, pad)
    if eval_dataset is not None:
        eval_dataset = filled(eval_dataset, at_once, pad, no_labels)
    collation: dict[str, Any] = {}
    if parts.processor is not None:
        collator = MediaCollator(parts.processor, scores_positions=parts.head != "tiles", packs=parts.plan.padding_free)
        collation = {"data_collator": collator}
    trainer = replace(parts, train_dataset=train_dataset, eval_dataset=eval_dataset).trainer(
        base,
        **collation,
        **given,
        args=SFTConfig(
            **parts.arguments(),
            # With pictures the collator lays rows in one row; TRL's would have no pixels.
            packing=parts.data.packing and parts.processor is None,
            padding_free=parts.plan.padding_free and parts.processor is None,
            # The rows are tokenised, truncated and packed already.
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            # The columns that pictures come by are no inputs of the model.
            remove_unused_columns=parts.processor is None,
            **trainer_args,
        ),
    )
    if order is not None:
        keep_order(trainer, order)
    # Each process makes its own micro-batches of a stream, and gets none that the first one has made.
    trainer.accelerator.dataloader_config.dispatch_batches = False
    if parts.plan.recipe.method.spec.classifies is not None:
        return trainer
    trainer.learns_from_sums = parts.head == "sums"
    replace_heads(trainer, sums_losses=trainer.learns_from_sums, keeps_trls=parts.head == "tiles", **weighting)
    if parts.head != "tiles" and parts.processor is None:
        name_scored_positions(trainer)
    return trainer


class TokenMeanSFTTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer whose evaluation is a mean over tokens, as its training is, also where Ulysses divides sequences.

    The trainer's own evaluation is a mean over micro-batches: it changes with their size, and a row repeated to fill
    the last one counts twice. So is its training on divided sequences, where it takes the labels, which come shifted,
    for none (transformers 5.23, `_get_num_items_in_batch` and `deepspeed_sp_compute_loss`).

    What it logs of a micro-batch stays on the device until the optimizer step, so that in between the host does not
    wait for the device, nor processes for each other.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._nats = 0.0
        self._num_tokens = 0
        self._noted: list[torch.Tensor] = []
        """Counts of micro-batches since the last optimizer step, of this process: each `(counts,)` in float64."""
        sizes = self.accelerator.parallelism_config
        self._num_parts: int = 1 if sizes is None else sizes.sp_size
        self.learns_from_sums = False
        if self._num_parts > 1:
            self.loss_is_scaled_for_ga = True
        else:
            # Some model classes say no (Qwen3-VL, Gemma 4), since their own loss is a mean over a micro-batch. It is
            # not the one that is trained on: heads divide by the tokens of the step.
            self.model_accepts_loss_kwargs = True

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        """Trained tokens of a step, of which each process has some of each sequence where they are divided."""
        if self._num_parts == 1:
            return super()._get_num_items_in_batch(batch_samples, device)
        own = sum(((batch["shift_labels"] != -100).sum() for batch in batch_samples), torch.tensor(0))
        return self.accelerator.gather(own.to(device)).sum()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss of a micro-batch, as its share of the mean over the tokens of the step."""
        if self.learns_from_sums and not return_outputs:
            return self._summed_loss(model, inputs, num_items_in_batch)
        if self._num_parts == 1 or not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert num_items_in_batch is not None and not return_outputs
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        self._note(outputs, inputs)
        loss = -outputs.log_probs.sum() / num_items_in_batch.clamp(min=1)
        num_processes = self.accelerator.num_processes
        if self.aux_loss_enabled:
            times = self.current_gradient_accumulation_steps * num_processes
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / times
        # The sum over all processes is what is wanted, of gradients too, and the mean is what is made of it.
        return loss * num_processes

    def _num_counted(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of losses of which a micro-batch's is the mean."""
        # The first token of a row is predicted from nothing.
        return int((inputs["labels"][:, 1:] != -100).sum())

    def _share(self, summed: torch.Tensor, num_tokens: int, num_items_in_batch: torch.Tensor | None) -> torch.Tensor:
        """Return the share of a micro-batch in the mean over the tokens of a step.

        Args:
            summed: Sum of the losses of the micro-batch.
            num_tokens: Tokens of which it is the sum.
            num_items_in_batch: Tokens of the step; None: the mean over the micro-batch.
        """
        if num_items_in_batch is None:
            return summed / max(1, num_tokens)
        # Of a sum over all processes it is a share, and their gradients are averaged.
        times = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        share: torch.Tensor = summed / num_items_in_batch * times
        return share

    def _summed_loss(self, model: Any, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None) -> Any:
        """The loss that TRL makes of each token's, made of their sum (trl 1.16, `SFTTrainer.compute_loss`)."""
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        options = {"use_cache": False, "fused_lm_head": True, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs, **options)
        self._note(outputs, inputs)
        loss, is_shared = outputs.nll, num_items_in_batch is not None
        if self.args.average_tokens_across_devices and is_shared:
            # It is a share of the sum over all processes, whose gradients are averaged.
            loss = loss * self.accelerator.num_processes
        if self.aux_loss_enabled:
            steps = self.current_gradient_accumulation_steps if is_shared else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        return loss

    def _note(self, outputs: Any, inputs: dict[str, Any]) -> None:
        """Keep what TRL logs besides the loss."""
        device = outputs.label_mask.device
        counts = [outputs.entropy.sum(), outputs.is_top1.sum(), outputs.label_mask.sum()]
        if "attention_mask" in inputs:
            counts.append(inputs["attention_mask"].sum())
        else:
            counts.append(torch.full((), inputs["position_ids"].numel(), device=device))
        if self.learns_from_sums and self.aux_loss_enabled:
            counts.append(outputs.aux_loss)
        self._keep_counts(counts)

    def _keep_counts(self, counts: list[torch.Tensor]) -> None:
        """Keep the counts of a micro-batch until they are logged: scalars or `(n,)`, the same ones each time."""
        device = counts[0].device
        own = torch.cat([count.detach().to(device, torch.float64).view(-1) for count in counts])
        if self.model.training:
            self._noted.append(own)
        else:
            self._tell([own], "eval")

    def _tell(self, noted: list[torch.Tensor], mode: str) -> None:
        """Give TRL what was kept of micro-batches, of all processes. Called by all together."""
        # (processes, micro-batches, counts)
        gathered = self.accelerator.gather(torch.stack(noted)[None])
        for of_batch in gathered.unbind(1):
            self._log_counts(of_batch, mode)

    def _log_counts(self, counts: torch.Tensor, mode: str) -> None:
        """Log what was kept of a micro-batch, `(processes, counts)`."""
        entropy, num_right, num_trained, num_read = counts[:, :4].sum(0).tolist()
        self._log_tokens(entropy, num_trained, num_read, mode)
        self._metrics[mode]["mean_token_accuracy"].append(num_right / max(1.0, num_trained))
        if counts.shape[1] > 4:
            self._metrics[mode]["aux_loss"].append(float(counts[:, 4].mean()))

    def _log_tokens(self, entropy: float, num_trained: float, num_read: float, mode: str) -> None:
        """Log the mean entropy of trained tokens in nats, and the tokens read so far."""
        self._total_train_tokens += int(num_read) if mode == "train" else 0
        self._metrics[mode]["entropy"].append(entropy / max(1.0, num_trained))
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """The norm of the gradients, and the end of an optimizer step's micro-batches."""
        # With TRL's own loss nothing is kept.
        noted, self._noted = self._noted, []
        if noted:
            self._tell(noted, "train")
        return super()._get_grad_norm(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate one micro-batch, and count its loss by the number of losses in it."""
        result = super().prediction_step(model, inputs, *args, **kwargs)
        num_tokens = self._num_counted(inputs)
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
