"""Generalized knowledge distillation (arXiv 2306.13649) on rows that tunekit has tokenised and masked.

TRL's GKDTrainer (trl 1.16, experimental) lays rows out itself, makes the logits of both models whole, and has each
process draw for itself whether a micro-batch is generated, so that processes which share weights wait for each other.
Here the rows, masks and packs are those of supervised fine-tuning; the divergence is TRL's tiled one, of the tokens
that count; and all processes draw alike, from the seed and the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device, set_seed
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from trl.distributed import DistributedBackend
from trl.models import prepare_deepspeed
from trl.models.utils import _ForwardRedirection, unwrap_model_for_generation

from tunekit.kernels.cross_entropy import IGNORED
from tunekit.kernels.linear_ce import next_labels, places_of
from tunekit.methods.arguments import Parts
from tunekit.methods.divergence import divergences, hidden_states, log_probs_of, with_head
from tunekit.methods.head import fused_heads, trl_head
from tunekit.methods.run_trainer import RunTrainer
from tunekit.methods.sft import TokenMeanSFTTrainer, token_trainer
from tunekit.recipe.methods.gkd import GKDMethod, RowDistillationMethod

if TYPE_CHECKING:
    from collections.abc import Iterator


def build(method: GKDMethod, parts: Parts) -> RunTrainer:
    """A trainer over token ids and labels, and a teacher.

    Args:
        method: The divergence and the completions, and what else goes to SFTConfig.
        parts: All else. Rows have columns `input_ids` and `labels` (-100 off the loss), and `seq_lengths` where packed.
    """
    return taught_trainer(GKDTrainer, method, parts)


def taught_trainer(
    base: type["GKDTrainer"],
    method: RowDistillationMethod,
    parts: Parts,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> RunTrainer:
    """Build a trainer over token ids and labels, with its teacher.

    Args:
        base: Its class.
        method: The method.
        parts: The parts of a trainer.
        given: Arguments of the trainer that only its class has.
    """
    teacher = parts.load_teacher(method.teacher)
    # The loss of routers is no part of the divergence.
    arguments = {**method.trainer_args, "router_aux_loss_coef": 0.0}
    trainer_parts = {"teacher": teacher, "method": method, "max_length": parts.data.max_length, **given}
    return token_trainer(base, parts, arguments, trainer_parts)


class GKDTrainer(TokenMeanSFTTrainer):
    """TokenMeanSFTTrainer whose loss is the divergence from a teacher, a mean over the trained tokens of a step.

    Args:
        teacher: The teacher, frozen, whole on this device.
        method: The divergence, and how often completions are trained on.
        max_length: Longest prompt with its completion, in tokens.
        given: Arguments of SFTTrainer.
    """

    def __init__(
        self, *, teacher: PreTrainedModel, method: RowDistillationMethod, max_length: int, **given: Any
    ) -> None:
        super().__init__(**given)
        self.beta, self.temperature, self.lmbda = method.beta, method.temperature, method.lmbda
        self.kd_ratio = method.kd_ratio
        with trl_head(teacher) as bound:
            self._bound = bound
        if self.is_deepspeed_enabled:
            self.teacher_model = prepare_deepspeed(teacher, self.accelerator)
        else:
            self.teacher_model = self.accelerator.prepare_model(teacher, evaluation_mode=True)
        self._redirected = _ForwardRedirection()
        self._rows: Sequence[Mapping[str, Tensor]] = ()
        """Micro-batches of a step whose completions are to be generated."""
        self._answers: Iterator[tuple[dict[str, Any], Tensor]] | None = None
        """The completed micro-batches of a step, with the trained tokens of all; None where rows are trained on."""
        if not self.lmbda:
            return
        self._max_length = max_length
        self._dist = DistributedBackend(self.accelerator)
        self._generation_kwargs = self._sampling(method)
        # Processes sample completions of their own.
        set_seed(self.args.seed, device_specific=True)

    def _sampling(self, method: RowDistillationMethod) -> dict[str, Any]:
        ends = self.model.generation_config.eos_token_id or []
        ends = [ends] if isinstance(ends, int) else list(ends)
        return {
            "max_new_tokens": method.max_completion_length,
            "do_sample": True,
            "pad_token_id": self.processing_class.pad_token_id,
            "bos_token_id": self.processing_class.bos_token_id,
            "eos_token_id": list(dict.fromkeys([self.processing_class.eos_token_id, *ends])),
            **dict(method.generation),
        }

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The divergence of a micro-batch, as its share of the mean over the tokens of the step."""
        student = self.accelerator.unwrap_model(model)
        summed, entropy = self._redirected(model, student, self._compare, student, inputs)
        num_counted, labels = self._num_counted(inputs), inputs["labels"]
        read = inputs["attention_mask"].sum() if "attention_mask" in inputs else torch.tensor(labels.numel())
        self._keep_counts([entropy, torch.tensor(num_counted), read])
        loss = self._share(summed, num_counted, num_items_in_batch)
        return (loss, None) if return_outputs else loss

    def _compare(self, student: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Sum the losses and the student's entropy over tokens, in nats. Called within the student's forward pass.

        Args:
            student: The trained model.
            inputs: A micro-batch.
        """
        labels = next_labels(inputs["labels"])
        # Hidden states whose next token counts, and these tokens, `(tokens,)`.
        places = places_of(labels)
        targets = labels.flatten().index_select(0, places)
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        # The type of the products is set around a model's own forward pass, which this one replaces.
        with self.accelerator.autocast():
            own = hidden_states(student, inputs, places)
            teacher = self.accelerator.unwrap_model(self.teacher_model)
            with torch.no_grad():
                its = self._redirected(self.teacher_model, teacher, hidden_states, teacher, inputs, places)
            head, *_ = fused_heads(self)
            scorer = with_head(student, own)
            divergence, entropy = divergences(
                scorer,
                with_head(teacher, its),
                head.bound,
                self._bound,
                beta=self.beta,
                temperature=self.temperature,
            )
            loss = self.kd_ratio * divergence.sum()
            if self.kd_ratio < 1:
                loss = loss - (1 - self.kd_ratio) * log_probs_of(scorer, targets, head.bound).sum()
        return loss, entropy.sum()

    def _log_counts(self, counts: Tensor, mode: str) -> None:
        """Log what was kept of a micro-batch, `(processes, counts)`."""
        entropy, num_trained, num_read = counts.sum(0).tolist()
        self._log_tokens(entropy, num_trained, num_read, mode)

    def get_batch_samples(self, *args: Any) -> Any:
        """Take the micro-batches of a step, and draw whether it trains on completions."""
        batches, num_items = super().get_batch_samples(*args)
        self._rows, self._answers = (), None
        if self.lmbda and batches:
            is_on_policy = Random(f"{self.args.seed} {self.state.global_step}").random() < self.lmbda
            self._metrics["train"]["on_policy"].append(float(is_on_policy))
            self._rows = batches if is_on_policy else ()
        return batches, num_items

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Tensor | None = None) -> Any:
        """Compute the loss and the gradients of a micro-batch: its rows, or the model's completions of their prompts.

        All completions of a step are generated before its first micro-batch, when a resumed run has the random numbers
        of its checkpoint.
        """
        if self._rows:
            completed, self._rows = self._completed(self._rows), ()
            num_items = self._get_num_items_in_batch(completed, self.accelerator.device)
            self._answers = iter([(batch, num_items) for batch in completed])
        if self._answers is not None:
            inputs, num_items_in_batch = next(self._answers)
        return super().training_step(model, inputs, num_items_in_batch)

    def _completed(self, batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Any]]:
        """Replace the last trained turn of each row, and what follows it, by a completion of the model's.

        Rows without a trained token, which fill the last step of an epoch, stay.
        """
        sizes = [len(batch["input_ids"]) for batch in batches]
        rows = [self._row(batch, index) for batch, size in zip(batches, sizes, strict=True) for index in range(size)]
        completions = self._generate_single_turn([row.prompt for row in rows])
        counts = torch.tensor([[sum(map(len, completions)), len(completions)]], device=self.accelerator.device)
        num_tokens, num_completions = self.accelerator.gather(counts).sum(0).tolist()
        self._metrics["train"]["completions/mean_length"].append(num_tokens / num_completions)
        examples = (row.completed(answer, self._max_length) for row, answer in zip(rows, completions, strict=True))
        collated = [self.data_collator(list(islice(examples, size))) for size in sizes]
        return [send_to_device(batch, self.accelerator.device) for batch in collated]

    def _row(self, batch: Mapping[str, Tensor], index: int) -> "PromptedRow":
        return PromptedRow.of(batch, index)

    def _generate_single_turn(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Generate a completion of each prompt, up to and with its end token."""
        device, pad = self.accelerator.device, self._generation_kwargs["pad_token_id"]
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        was_training = self.model.training
        self.model.eval()
        try:
            with (
                unwrap_model_for_generation(
                    self.model_wrapped,
                    self.accelerator,
                    generation_kwargs=self._generation_kwargs,
                    gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
                ) as model,
                torch.no_grad(),
                self._dist.summon_full_params(self.model_wrapped, recurse=False),
            ):
                config = GenerationConfig(**self._generation_kwargs, disable_compile=True)
                generated = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        finally:
            self.model.train(was_training)
        return [_ended(row, self._generation_kwargs["eos_token_id"]) for row in generated[:, width:].tolist()]


@dataclass(frozen=True)
class PromptedRow:
    """A row of a micro-batch, without its padding.

    Attributes:
        ids: Token ids.
        labels: The trained ones of them, -100 for others.
        prompt: What comes before the last run of trained tokens; all where none is trained.
    """

    ids: list[int]
    labels: list[int]
    prompt: list[int]

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], index: int) -> "PromptedRow":
        """Return a row of a padded batch."""
        ids, labels = unpadded(batch, index)
        is_trained = [label != IGNORED for label in labels]
        start = end = next((place for place in range(len(ids), 0, -1) if is_trained[place - 1]), 0)
        while start and is_trained[start - 1]:
            start -= 1
        return cls(ids, labels, ids[:start] if end else ids)

    def completed(self, completion: list[int], max_length: int) -> dict[str, list[int]]:
        """Return the prompt with a completion, which alone is trained on; a row without trained tokens as it is."""
        if len(self.prompt) == len(self.ids):
            return {"input_ids": self.ids, "labels": self.labels}
        answer = completion[: max_length - len(self.prompt)]
        return {"input_ids": self.prompt + answer, "labels": [IGNORED] * len(self.prompt) + answer}


def unpadded(batch: Mapping[str, Tensor], index: int, prefix: str = "") -> tuple[list[int], list[int]]:
    """Return the token ids and labels of a row of a batch, without its padding.

    Args:
        batch: The batch.
        index: The row.
        prefix: Start of the names of its tensors.
    """
    ids, labels = batch[f"{prefix}input_ids"][index], batch[f"{prefix}labels"][index]
    if f"{prefix}attention_mask" in batch:
        is_read = batch[f"{prefix}attention_mask"][index].bool()
        ids, labels = ids[is_read], labels[is_read]
    return ids.tolist(), labels.tolist()


def _ended(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """A completion up to and with its first end token."""
    end = next((place for place, token in enumerate(tokens, start=1) if token in ends), len(tokens))
    return tokens[:end]
