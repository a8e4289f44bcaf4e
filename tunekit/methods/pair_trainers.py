"""TRL's trainers of pairs on token ids, and precomputed log-probabilities of a reference.

TRL's experimental trainers of pairs on token ids, with a count of them.

By themselves they tokenise texts without the tokenizer's own special tokens, put a start token before every prompt
where the tokenizer knows one, whether its template has it or not, and an end token behind every answer that does not
end with one: behind ChatML's `<|im_end|>` and line break a second one (trl 1.16, `ORPOTrainer.tokenize_row`). Here a
pair is the tokens that DPO trains on.

Log-probabilities of a reference that are computed before training, once for all runs on the same model and rows.

TRL computes them whenever a trainer is built, and keeps them beside the rows of that run. Here they are kept in
tunekit's cache, by all that they depend on: every weight, the model's configuration, the token ids, and how it is
computed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, concatenate_datasets
from peft import PeftModel
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from tunekit.data import prepare
from tunekit.data.media.collate import MEDIA, MediaCollator
from tunekit.data.tokenization.alignment import tokenised_pairs
from tunekit.methods.arguments import Parts


class _Tokenised:
    """Rows that are tokenised, and the tokens of those that were trained on, which the others of TRL's trainers log."""

    _num_tokens: int | torch.Tensor = 0
    """A tensor once training has begun, so that the host does not wait for the device."""

    def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        """A row as it is."""
        return feature

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of a micro-batch, whose tokens are counted."""
        own = inputs["chosen_attention_mask"].sum() + inputs["rejected_attention_mask"].sum()
        self._num_tokens = self._num_tokens + self.accelerator.gather(own).sum()  # type: ignore[attr-defined]
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log with the number of tokens, by the name that TRL's other trainers have for it."""
        logs["num_tokens"] = int(self._num_tokens)
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


FILE = "log_probs.parquet"
"""File of an entry of the cache."""

PASSING = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Keys of a model's configuration that say where it came from, or record facts about its weights."""

ASKED = ("ld_alpha", "loss_type", "max_length", "truncation_mode")
"""Fields of TRL's config that decide which tokens count, or which columns there are."""


_OF_ANSWERS = ("input_ids", "attention_mask", "completion_mask", "label", "ref_", "KL_")
"""Beginnings of names of what a batch of answers has besides pictures."""


class _Remembering:
    """A reference that is asked once for all runs on the same model and rows, and rows that are tokens already."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        """Rows as tokens; those with pictures are tokens already."""
        if "prompt_ids" in dataset.column_names:
            return dataset
        prepared: Dataset = super()._prepare_dataset(dataset, *args)  # type: ignore[misc]
        return prepared

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        compute = super()._precompute_ref_logps  # type: ignore[misc]
        return remembered(self, dataset, name, lambda: compute(dataset, name, batch_size))


class RememberingDPOTrainer(_Remembering, DPOTrainer):  # type: ignore[misc]
    """DPOTrainer whose reference is asked once, and that takes tokens where rows have them."""


class RememberingKTOTrainer(_Remembering, KTOTrainer):  # type: ignore[misc]
    """KTOTrainer whose reference is asked once, and whose loss is the same in any layout.

    TRL estimates the KL divergence of its loss `kto` from the mismatched answers of a micro-batch. Here it is one of
    all rows of an optimizer step, and of all held-out rows in an evaluation, so that it does not depend on the size of
    a micro-batch or on the number of processes. In one process without gradient accumulation that is TRL's estimate.
    """

    _batches: Iterable[dict[str, Any]] = ()
    """Micro-batches of the step or the evaluation."""
    _kl: Tensor | None = None
    """Their divergence, once it is known."""
    _kl_terms: Iterator[Tensor] | None = None
    """Terms of the difference that TRL takes for the divergence; None where it is one of a batch alone."""
    _is_coupled = False
    """True within a step or an evaluation."""

    def __init__(self, *, args: Any, global_batch_size: int, **kwargs: Any) -> None:
        self._global_batch_size, self._micro_batch_size = global_batch_size, args.per_device_train_batch_size
        # TRL refuses a micro-batch of one row, as its divergence would be none. `_prepare_dataset` follows that check.
        args.per_device_train_batch_size = max(2, self._micro_batch_size)
        super().__init__(args=args, **kwargs)

    def _prepare_dataset(self, dataset: Dataset, processor: Any, args: Any, name: str) -> Dataset:
        """Rows as tokens, each with the answer before it in its optimizer step, or among all held-out rows."""
        args.per_device_train_batch_size = self._micro_batch_size
        together = copy(args)
        # The rows that TRL takes the mismatched answers from.
        together.per_device_train_batch_size = self._global_batch_size if name == "train" else len(dataset)
        return super()._prepare_dataset(dataset, processor, together, name)

    def get_batch_samples(self, *args: Any) -> Any:
        """Take the micro-batches of a step, whose divergence is not known yet."""
        samples = super().get_batch_samples(*args)
        self._batches, self._kl = samples[0], None
        return samples

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss and the gradients of a micro-batch."""
        with self._coupled():
            loss: Tensor = super().training_step(*args, **kwargs)
            return loss

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate held-out rows, whose divergence is not known yet."""
        if self.calculate_KL:
            self._batches, self._kl = self.get_eval_dataloader(dataloader.dataset), None
        with self._coupled():
            return super().evaluation_loop(dataloader, *args, **kwargs)

    @contextmanager
    def _coupled(self) -> Iterator[None]:
        self._is_coupled = self.calculate_KL
        try:
            yield
        finally:
            self._is_coupled = False

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if not self._is_coupled:
            return super()._compute_loss(model, inputs, return_outputs)
        if self._kl is None:
            self._kl = self._mean_divergence(model)
        # TRL subtracts what it gets for the reference from what it gets for the model.
        zero = torch.zeros_like(self._kl)
        self._kl_terms = iter((self._kl, zero))
        if self.precompute_ref_logps:
            inputs = {**inputs, "ref_KL_logps": zero}
        try:
            return super()._compute_loss(model, inputs, return_outputs)
        finally:
            self._kl_terms = None

    def _compute_kl_logps(self, model: Any, batch: dict[str, Any]) -> Any:
        return super()._compute_kl_logps(model, batch) if self._kl_terms is None else next(self._kl_terms)

    def _mean_divergence(self, model: Any) -> Tensor:
        """Mean log ratio of model to reference over mismatched answers of all processes, `()`."""
        ratios = []
        # A data loader draws a number where it begins: an evaluation must not change what training draws.
        with torch.random.fork_rng(devices=[]):
            for batch in self._batches:
                batch = self._prepare_inputs(batch)
                ratio = super()._compute_kl_logps(model, batch) - self._ref_kl_logps(batch)
                ratios.append(self.accelerator.gather_for_metrics(ratio))
        self._batches = ()
        return torch.cat(ratios).float().mean()

    def _ref_kl_logps(self, batch: dict[str, Any]) -> Any:
        """Log-probabilities of mismatched answers by the reference, `(batch,)`, as TRL computes them in its loss."""
        if self.precompute_ref_logps:
            return batch["ref_KL_logps"]
        compute = super()._compute_kl_logps
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self.ref_model is not None:
                return compute(self.ref_model, batch)
            unwrapped = self.accelerator.unwrap_model(self.model)
            with use_adapter(unwrapped, adapter_name="ref" if "ref" in unwrapped.peft_config else None):
                return compute(self.model, batch)

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Log-probabilities by the reference, which is given the pictures too: TRL gives it tokens and their mask."""
        pictures = {name: value for name, value in inputs.items() if not name.startswith(_OF_ANSWERS)}
        return super().compute_ref_log_probs(partial(model, **pictures), inputs)


def remembered(
    trainer: DPOTrainer | KTOTrainer, dataset: Dataset, name: str, compute: Callable[[], Dataset]
) -> Dataset:
    """Rows with the log-probabilities of the reference, from the cache, or computed and kept there.

    Called by all processes together. The first one has the cache.

    Args:
        trainer: The trainer, which is being built; its model is where training starts.
        dataset: Tokenised rows.
        name: What they are for.
        compute: Gives the same rows with further columns.
    """
    if trainer.is_deepspeed_enabled and trainer.accelerator.deepspeed_plugin.zero_stage == 3:
        # Its weights are in parts already, of which TRL's digest sees none.
        return compute()
    is_main, rows = trainer.accelerator.is_main_process, len(dataset)
    key = prepare.key_of("log-probabilities", _made_of(trainer, dataset)) if is_main else ""
    cached = [_kept(key, rows) if is_main else None]
    broadcast_object_list(cached, from_process=0)
    if cached[0] is not None:
        return concatenate_datasets([dataset, Dataset.from_dict(cached[0])], axis=1)
    # A data loader draws a number where it begins: what training draws must not depend on what was remembered.
    with torch.random.fork_rng(devices=[]):
        computed = compute()
    if is_main:
        columns = [column for column in computed.column_names if column.startswith("ref_")]

        def write(folder: Path) -> dict[str, Any]:
            computed.with_format("arrow").select_columns(columns).to_parquet(folder / FILE)
            return {"num_sequences": rows, "num_tokens": _num_tokens(dataset)}

        prepare.cached(key, "log-probabilities", f"reference of {name}", write)
    return computed


def _kept(key: str, num_rows: int) -> dict[str, Any] | None:
    """The columns that the cache has, if it has them."""
    entry = prepare.found(key)
    if entry is None or entry.account["num_sequences"] != num_rows:
        return None
    columns = Dataset.from_parquet(str(entry.path / FILE), keep_in_memory=True).with_format("numpy")[:]
    return dict(columns)


def _made_of(trainer: DPOTrainer | KTOTrainer, dataset: Dataset) -> dict[str, Any]:
    """All that the log-probabilities depend on."""
    model = trainer.ref_model if trainer.ref_model is not None else trainer.model
    config = {name: str(value) for name, value in model.config.to_dict().items() if name not in PASSING}
    adapters = model.peft_config if isinstance(model, PeftModel) else {}
    collator = trainer.data_collator
    settings = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "oft_block_size")
    return {
        "weights": trainer._precompute_model_hash,
        "config": config,
        "attention": model.config._attn_implementation,
        "adapters": {name: [str(vars(adapter).get(field)) for field in settings] for name, adapter in adapters.items()},
        "rows": _digest(dataset),
        "asked": {name: str(vars(trainer.args).get(name)) for name in ASKED},
        "precision": trainer.accelerator.mixed_precision,
        "processor": prepare.digest_of(collator.processor) if isinstance(collator, MediaCollator) else None,
        "device": trainer.accelerator.device.type,
        "torch": torch.__version__,
    }


def _digest(dataset: Dataset) -> str:
    """Digest of the token ids and pictures of rows, in their order."""
    names = sorted(
        name for name in dataset.column_names if name.endswith(("_ids", "_mask", "label", "num_prompt", MEDIA))
    )
    digest = hashlib.sha256(json.dumps(names).encode())
    for batch in dataset.with_format("arrow").iter(1000):
        digest.update(json.dumps([batch[name].to_pylist() for name in names]).encode())
    return digest.hexdigest()


def _num_tokens(dataset: Dataset) -> int:
    names = [name for name in dataset.column_names if name.endswith("_ids")]
    batches = dataset.with_format("arrow").iter(1000)
    return sum(len(row) for batch in batches for name in names for row in batch[name].to_pylist())
