"""Micro-batches of rows with media, made by the model's own processor.

Rows were tokenized and masked before; here the processor makes tokens and features of their texts and media. The tokens
have to be those of the rows, so that each label stands at its token.

A packed row has several documents. The processor reads them as a batch, as it reads rows that are not packed, and its
padding is left out behind it: features stay in the order of the tokens that stand for them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunekit.data.media.expand import features_of
from tunekit.data.media.kinds import COLUMN, medium_of
from tunekit.data.packing.sequences import IGNORED
from tunekit.errors import DataError, RunError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import ProcessorMixin

TEXT, MEDIA = "media_text", "media"
"""Columns of prepared rows: the text in which each medium is one token, and the media as JSON; where packed, a list of
those of each document."""


def as_json(row: Mapping[str, Any]) -> list[str]:
    """Return the media of a row, as its file holds them, as they are prepared."""
    return [json.dumps(medium) for medium in row.get(COLUMN) or ()]


class MediaCollator:
    """Collates rows with columns `input_ids`, `labels`, `media_text` and `media`.

    Args:
        processor: Processor of the model.
        scores_positions: Whether a batch names the positions whose next token counts, as tunekit's head takes them.
        packs: Whether rows are laid in one row without padding; they have a column `seq_lengths` where packed.

    Attributes:
        processor: The processor.
        packs: See above.
    """

    def __init__(self, processor: "ProcessorMixin", *, scores_positions: bool, packs: bool = False) -> None:
        self.processor = processor
        self.packs = packs
        self._scores_positions = scores_positions

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch as tensors: as `texts`, or packed as `in_one_row`.

        Raises:
            DataError: As for `texts`.
        """
        if not self.packs:
            return self.texts(rows)
        batch = in_one_row(self.texts([document for row in rows for document in documents_of(row)]))
        return self._with_scored_positions(batch)

    def texts(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch as tensors: tokens, mask and labels `(batch, seq)`, padded on the right, and the features.

        Raises:
            DataError: A medium changed, or the processor makes other tokens than were prepared.
            RunError: The processor does not take the rows together.
        """
        import torch

        tokenizer = self.processor.tokenizer
        # A row that fills a step has no text.
        texts = [tokenizer.decode(row["input_ids"]) if row[TEXT] is None else row[TEXT] for row in rows]
        media = [[medium_of(json.loads(text)) for text in row[MEDIA] or ()] for row in rows]
        try:
            batch: dict[str, Any] = dict(features_of(self.processor, texts, media, padding_side="right"))
        # Llama 3.2 Vision's looks up the images of a first row without any.
        except (ValueError, IndexError) as error:
            reader = type(self.processor).__name__
            problem = f"{reader} refuses a batch of rows with different media: {str(error).strip()}"
            raise RunError(problem, hint="set train.micro_batch_size=1, without data.packing") from error
        lengths = batch["attention_mask"].sum(1).tolist()
        for row, of_row, ids, length in zip(rows, media, batch["input_ids"].tolist(), lengths, strict=True):
            if ids[:length] != list(row["input_ids"]):
                names = ", ".join(medium.path for medium in of_row) or "a row without media"
                raise DataError(
                    f"{names}: the processor returns {length:,} tokens, but {len(row['input_ids']):,} were prepared",
                    hint="prepare the rows again with the installed versions",
                )
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for number, row in enumerate(rows):
            labels[number, : len(row["labels"])] = torch.tensor(row["labels"])
        batch["labels"] = labels
        return self._with_scored_positions(batch)

    def _with_scored_positions(self, batch: dict[str, Any]) -> dict[str, Any]:
        from tunekit.kernels.linear_ce import next_labels, places_of

        if self._scores_positions:
            batch["scored_positions"] = places_of(next_labels(batch["labels"]))
        return batch


class PicturePairCollator(MediaCollator):
    """Collates pairs with columns `{prompt,chosen,rejected}_ids`, `{chosen,rejected}_text` and `media`.

    Args:
        processor: Processor of the model.
    """

    def __init__(self, processor: "ProcessorMixin") -> None:
        super().__init__(processor, scores_positions=False)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch as TRL's DPOTrainer takes it: all chosen answers, then all rejected ones, with their prompts.

        Raises:
            DataError: As for rows of one text.
        """
        import torch

        batch = self.texts([*(as_text(row, "chosen") for row in rows), *(as_text(row, "rejected") for row in rows)])
        batch["completion_mask"] = (batch.pop("labels") != IGNORED).long()
        for name in ("ref_chosen_logps", "ref_rejected_logps"):
            if name in rows[0]:
                batch[name] = torch.tensor([row[name] for row in rows])
        return batch


class RatedPictureCollator(MediaCollator):
    """Collates answers that are good or bad, with columns `{prompt,completion}_ids`, `completion_text` and `media`.

    Where a divergence is estimated, columns `KL_ids`, `KL_num_prompt` and `KL_text` have the prompts with the answers
    to others.

    Args:
        processor: Processor of the model.
        max_length: Longest sequence, in tokens; a prompt with the answer to another one is cut there.
    """

    def __init__(self, processor: "ProcessorMixin", *, max_length: int) -> None:
        super().__init__(processor, scores_positions=False)
        self._max_length = max_length

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch as TRL's KTOTrainer takes it.

        Sequences of both kinds are padded to one length: then what a processor gives for each token of a prompt is the
        same for both, and TRL, which gives the pixels to both, may give it that as well.

        Raises:
            DataError: As for rows of one text.
        """
        import torch

        estimates = "KL_ids" in rows[0]
        batch = self.texts([*map(as_text, rows), *(_as_mismatched(row) for row in rows if estimates)])
        batch["completion_mask"] = (batch.pop("labels") != IGNORED).long()
        shape = batch["input_ids"].shape
        cut = {
            name: value[:, : self._max_length] if value.shape[:2] == shape else value for name, value in batch.items()
        }
        batch, mismatched = halves(cut) if estimates else (cut, {})
        if estimates:
            batch |= {f"KL_{name}": mismatched[name] for name in ("input_ids", "attention_mask", "completion_mask")}
        for name in ("ref_logps", "ref_KL_logps"):
            if name in rows[0]:
                batch[name] = torch.tensor([row[name] for row in rows])
        batch["label"] = torch.tensor([row["label"] for row in rows])
        return batch


def halves(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the two halves of a batch whose second half has the pictures of the first once more."""
    middle = {name: len(value) // 2 for name, value in batch.items()}
    first = {name: value[: middle[name]] for name, value in batch.items()}
    return first, {name: value[middle[name] :] for name, value in batch.items()}


def in_one_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a padded batch of documents as one row without padding, whose positions begin again with each document.

    Args:
        batch: Inputs with a value for each token, `(documents, tokens)`, and others, which stay as they are. The first
            token of a document has no label.
    """
    mask = batch["attention_mask"].bool()
    row = {
        name: value[mask][None] if _is_of_tokens(name, value, mask) else value
        for name, value in batch.items()
        if name not in ("attention_mask", "scored_positions")
    }
    row["position_ids"] = (mask.cumsum(1) - 1)[mask][None]
    return row


def _is_of_tokens(name: str, value: "Tensor", mask: "Tensor") -> bool:
    """Return whether an input has a value for each token; masks of media may have the same shape."""
    return value.shape == mask.shape and not value.is_floating_point() and not name.endswith("_mask")


def documents_of(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the documents of a packed row as rows of one text each; any other row as it is."""
    if "seq_lengths" not in row:
        yield dict(row)
        return
    start = 0
    for length, text, pictures in zip(row["seq_lengths"], row[TEXT], row[MEDIA], strict=True):
        part = slice(start, start + length)
        yield {"input_ids": row["input_ids"][part], "labels": row["labels"][part], TEXT: text, MEDIA: pictures}
        start += length


def as_text(row: Mapping[str, Any], answer: str | None = None) -> dict[str, Any]:
    """Return a prompt with one of its answers as a row of one text, in whose loss the answer counts.

    A row of one text stays as it is.

    Args:
        row: A row.
        answer: Which answer of a pair; the better one, or the only one, by default.
    """
    if "input_ids" in row:
        return dict(row)
    answer = answer or ("chosen" if "chosen_ids" in row else "completion")
    prompt, own = row["prompt_ids"], row[f"{answer}_ids"]
    return {
        "input_ids": [*prompt, *own],
        "labels": [IGNORED] * len(prompt) + list(own),
        TEXT: row[f"{answer}_text"],
        MEDIA: row[MEDIA],
    }


def _as_mismatched(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prompt with the answer to another one as a row of one text."""
    ids, num_prompt = row["KL_ids"], row["KL_num_prompt"]
    labels = [IGNORED] * num_prompt + list(ids[num_prompt:])
    return {"input_ids": ids, "labels": labels, TEXT: row["KL_text"], MEDIA: row[MEDIA]}
