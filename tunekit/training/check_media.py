"""Checks before training that rows with media, and rows beside them, are read as each is alone.

A processor gives a batch the features of all its rows. Some models, such as Llama 3.2 Vision, then compute a row
without pictures in another way than where no row of the batch has one (transformers 5.24), so that its loss would
depend on the rows that happen to lie beside it. Audio clips of a batch are padded to the longest one, and the code of
some towers, such as that of Gemma 3n, does not leave the padding out.

Packed documents are compared with themselves alone, padded as rows that are not packed: that attention does not leak
between them, that masks of media and positions begin again with each, and that features come in the order of tokens.
The logits are those of other shapes of products, so more of a difference is rounding than where only tokens change.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device

from tunekit.data.media.collate import MEDIA, TEXT, MediaCollator, as_text, documents_of, in_one_row
from tunekit.data.media.expand import marks_of
from tunekit.data.media.kinds import medium_of, nouns_of
from tunekit.data.media.pictures import Picture
from tunekit.errors import RunError
from tunekit.models.fusion.proof import ROUNDING
from tunekit.planner.plan import Plan
from tunekit.recipe.sections.data import MediaKind
from tunekit.training.check_head import NUM_LOOKED_AT, in_evaluation

NUM_SPREAD = 4
"""Rows of different lengths of clips that are compared."""


def check_kinds(trainer: Any, plan: Plan) -> None:
    """Check that the model computes rows with each of the kinds of media that come together, and, where a micro-batch
    may have several of them, these together: GLM-4V takes images and videos apart from each other alone.

    Called by all processes together.

    Args:
        trainer: The trainer, once its model is where it is trained.
        plan: The micro-batch.

    Raises:
        RunError: It does not.
    """
    rows, collator = trainer.train_dataset, trainer.data_collator
    if not isinstance(collator, MediaCollator):
        return
    first = rows.select(range(min(NUM_LOOKED_AT, len(rows))))
    by_kinds: dict[frozenset[MediaKind], dict[str, Any]] = {}
    for text in (as_text(document) for row in first for document in documents_of(row)):
        by_kinds.setdefault(frozenset(medium_of(json.loads(medium)).kind for medium in text[MEDIA] or ()), text)
    kinds: frozenset[MediaKind] = frozenset().union(*by_kinds)
    if len(kinds) < 2:
        return
    chosen = [row for of_row, row in by_kinds.items() if of_row]
    batches = [[row] for row in chosen]
    if plan.micro_batch_size > 1 or collator.packs:
        batches.append(chosen)
    with in_evaluation(trainer, trainer.model_wrapped):
        for batch in batches:
            try:
                _all_logits(trainer, collator.texts(batch))
            except ValueError as error:
                problem = f"{plan.recipe.model.path} does not compute {nouns_of(kinds)} together: {str(error).strip()}"
                raise RunError(problem, hint="train on rows with one kind of media") from error


def check_mixed_rows(trainer: Any, plan: Plan) -> None:
    """Compare the logits of rows alone and beside others: without media beside some, and of clips beside longer ones.

    Called by all processes together.

    Args:
        trainer: The trainer, once its model is where it is trained.
        plan: The micro-batch, and the type that the model computes in.

    Raises:
        RunError: They differ by more than rounding.
    """
    rows = trainer.train_dataset
    if not isinstance(trainer.data_collator, MediaCollator) or plan.micro_batch_size == 1:
        return
    nouns, flags = nouns_of(plan.data.media), [bool(media) for media in rows[MEDIA]]
    hint = f"set train.micro_batch_size=1, or add {nouns} to all rows or none"
    if any(flags) and not all(flags):
        beside = [
            _shortest(rows, [i for i, flag in enumerate(flags) if flag is has_media]) for has_media in (False, True)
        ]
        what = f"a row without {nouns} in a batch with {nouns} than alone"
        _check_alike(trainer, plan, beside, num=1, what=what, hint=hint)
    if plan.data.has_audio or plan.data.has_videos:
        first = rows.select(range(min(NUM_LOOKED_AT, len(rows))))
        beside = _spread([as_text(row) for row in first])
        media = "audio in a batch with longer clips" if plan.data.has_audio else "a video in a batch with longer ones"
        what, hint = f"a row with {media} than alone", "set train.micro_batch_size=1"
        if len(beside) > 1:
            _check_alike(trainer, plan, beside, num=len(beside), what=what, hint=hint)


def _check_alike(trainer: Any, plan: Plan, rows: Sequence[dict[str, Any]], *, num: int, what: str, hint: str) -> None:
    """Compare the logits of the first `num` of some rows in a batch of all of them with those of each alone.

    Raises:
        RunError: They differ by more than rounding, or the processor refuses such a batch.
    """
    collate = trainer.data_collator.texts
    try:
        together, alone = collate(rows), [collate([row]) for row in rows[:num]]
    except RunError as error:
        raise RunError(error.problem, hint=hint) from error
    with in_evaluation(trainer, trainer.model_wrapped):
        logits = _all_logits(trainer, together)
        pairs = [
            (own[: len(row["input_ids"])], _all_logits(trainer, batch)[0])
            for own, row, batch in zip(logits, rows, alone, strict=False)
        ]
    if not _worst(trainer, plan, pairs) <= 1:
        off = max(float((own - other).abs().amax()) for own, other in pairs)
        model = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
        raise RunError(f"{model} computes other logits for {what}: they differ by {off:.2g}", hint=hint)


def check_packed_rows(trainer: Any, plan: Plan) -> None:
    """Compare the logits of documents in one row with those of each alone: of one without media and two with some.

    The first one has no media, so that the others begin where none of theirs would in a row of their own.

    Called by all processes together.

    Args:
        trainer: The trainer, once its model is where it is trained.
        plan: The type that the model computes in.

    Raises:
        RunError: They differ by more than rounding, or the model does not compute such a row.
    """
    collate, path, nouns = trainer.data_collator.texts, plan.recipe.model.path, nouns_of(plan.data.media)
    first = trainer.train_dataset.select(range(min(NUM_LOOKED_AT, len(trainer.train_dataset))))
    # A row that fills a step has one token.
    whole = (one for row in first for one in documents_of(row) if len(one["input_ids"]) > 1)
    documents = sorted(whole, key=lambda one: len(one["input_ids"]))
    with_media = [document for document in documents if document[MEDIA]]
    some = _spread(with_media) or with_media[:2]
    some = some or documents[:1]
    chosen = [_without_media(some[0], trainer.data_collator.processor), *some, *some[:1] * (len(some) == 1)]
    with in_evaluation(trainer, trainer.model_wrapped):
        alone = [_logits(trainer, collate([document])) for document in chosen]
        try:
            together = _logits(trainer, in_one_row(collate(chosen)))
        except (TypeError, ValueError, RuntimeError) as error:
            problem = f"{path} does not support packed documents with {nouns}: {str(error).strip()}"
            raise RunError(problem, hint="set data.packing=false") from error
    parts = torch.split(together, [len(document["input_ids"]) for document in chosen])
    if not _worst(trainer, plan, zip(parts, alone, strict=True)) <= 1:
        problem = f"{path}: packed documents with {nouns} have other logits than each alone"
        raise RunError(problem, hint="set data.packing=false")


def _without_media(row: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Return a row of the words of another one.

    Tokens around a medium go with it: Qwen2.5-Omni counts clips by those before them (transformers 5.24).
    """
    words = row[TEXT] or processor.tokenizer.decode(row["input_ids"])
    around = f"(?:{'|'.join(map(re.escape, processor.tokenizer.get_added_vocab()))})?"
    for token in marks_of(processor):
        words = re.sub(f"{around}{re.escape(token)}{around}", "", words)
    ids = processor.tokenizer(words, add_special_tokens=False)["input_ids"]
    return {"input_ids": ids, "labels": ids, TEXT: words, MEDIA: []}


def _worst(trainer: Any, plan: Plan, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the largest difference of logits from expected ones, in all processes, in those that are rounding."""
    dtype = getattr(torch, plan.dtype)
    allowed = ROUNDING[dtype] * torch.finfo(dtype).eps
    shares = [(own - other).abs().amax().float() / (allowed * other.abs().amax().float()) for own, other in pairs]
    worst: torch.Tensor = trainer.accelerator.gather(torch.stack(shares)).amax()
    return worst


def _shortest(rows: Any, indices: list[int]) -> dict[str, Any]:
    """Return the shortest of the first rows of some."""
    return min(map(as_text, rows.select(indices[:NUM_LOOKED_AT])), key=lambda row: len(row["input_ids"]))


def _spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a few of those rows that have audio or videos, from the one with the shortest to that with the longest."""
    timed = [(length, number) for number, row in enumerate(rows) if (length := _seconds(row)) > 0]
    ordered, last = sorted(timed), len(timed) - 1
    places = dict.fromkeys(round(share * last / (NUM_SPREAD - 1)) for share in range(NUM_SPREAD) if last >= 0)
    return [rows[ordered[place][1]] for place in places]


def _seconds(row: dict[str, Any]) -> float:
    """Return the length of the longest clip or video of a row; 0 without one."""
    media = [medium_of(json.loads(medium)) for medium in row[MEDIA] or ()]
    return max((medium.seconds for medium in media if not isinstance(medium, Picture)), default=0.0)


def _logits(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the logits of the first row of a batch, `(tokens, vocabulary)`."""
    return _all_logits(trainer, batch)[0]


def _all_logits(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the logits of a batch, `(rows, tokens, vocabulary)`."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "scored_positions")}
    model, device = trainer.model_wrapped, trainer.accelerator.device
    logits: torch.Tensor = model(**send_to_device(inputs, device), use_cache=False).logits
    return logits
