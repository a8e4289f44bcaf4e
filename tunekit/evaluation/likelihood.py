"""Log-likelihood of given texts under a model, and scores of a reward model: a figure for each sequence.

Everything is summed in float64 from log-softmaxes in float32. Sequences go through in batches of about one length,
padded behind their ends, where causal attention does not see it; a batch that memory has no room for is halved.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunekit.training.measured_memory import is_out_of_memory

if TYPE_CHECKING:
    import torch

MAX_LOGITS = 2**27
"""Logits of a batch, at most, where it has more than one sequence."""

_POSITIONS = 512
"""Positions whose logits are in float32 at once."""

Ids = Sequence[int] | np.ndarray
"""Token ids of a sequence."""

Told = Callable[[int, int], None]


def log_likelihoods(model: Any, ids: Sequence[Ids], counted: Sequence[Ids], tell: Told | None = None) -> np.ndarray:
    """The log-probability of the tokens that count, summed over each sequence; float64, `(sequences,)`.

    Args:
        model: A causal language model in evaluation mode.
        ids: Token ids of each sequence.
        counted: For each token whether it counts. The first is predicted from nothing, and does not.
        tell: Told how many sequences are done, and how many there are.
    """
    import torch

    def sums(batch: list[int], given: "torch.Tensor", mask: "torch.Tensor") -> list[float]:
        logits = model(input_ids=given, attention_mask=mask, use_cache=False).logits
        targets = np.zeros(given.shape, dtype=bool)
        for line, number in enumerate(batch):
            targets[line, : len(counted[number])] = counted[number]
        targets[:, 0] = False
        rows, places = (torch.from_numpy(index).to(given.device) for index in targets.nonzero())
        totals = torch.zeros(len(batch), dtype=torch.float64, device=given.device)
        for start in range(0, len(rows), _POSITIONS):
            row, place = rows[start : start + _POSITIONS], places[start : start + _POSITIONS]
            likely = logits[row, place - 1].float().log_softmax(-1)
            of_token = likely.gather(-1, given[row, place].unsqueeze(-1)).squeeze(-1)
            totals.index_add_(0, row, of_token.double())
        return list(totals.tolist())

    return _through(model, ids, sums, tell)


def judgements(model: Any, ids: Sequence[Ids], tell: Told | None = None) -> np.ndarray:
    """The score of each sequence by a model with a single output; float64, `(sequences,)`.

    It is read behind the last token that is no padding, so that the model must know its padding token.
    """

    def scores(batch: list[int], given: "torch.Tensor", mask: "torch.Tensor") -> list[float]:
        return list(model(input_ids=given, attention_mask=mask).logits[:, 0].double().tolist())

    return _through(model, ids, scores, tell, pad=model.config.pad_token_id)


def _through(
    model: Any,
    ids: Sequence[Ids],
    compute: Callable[[list[int], "torch.Tensor", "torch.Tensor"], list[float]],
    tell: Told | None,
    pad: int | None = 0,
) -> np.ndarray:
    """Compute values for batches of sequences; return them in the order of the sequences."""
    import torch

    results = np.full(len(ids), np.nan)
    vocabulary = model.config.get_text_config().vocab_size
    waiting, num_done = (
        _batches([len(sequence) for sequence in ids], MAX_LOGITS // vocabulary if pad is not None else 0),
        0,
    )
    while waiting:
        batch = waiting.pop()
        longest = max(len(ids[number]) for number in batch)
        padded = np.full((len(batch), longest), pad or 0, dtype=np.int64)
        mask = np.zeros_like(padded)
        for row, number in enumerate(batch):
            padded[row, : len(ids[number])] = ids[number]
            mask[row, : len(ids[number])] = 1
        try:
            with torch.inference_mode():
                results[batch] = compute(
                    batch, torch.from_numpy(padded).to(model.device), torch.from_numpy(mask).to(model.device)
                )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(batch) == 1:
                raise
            middle = len(batch) // 2
            waiting += [batch[middle:], batch[:middle]]
            continue
        num_done += len(batch)
        if tell is not None:
            tell(num_done, len(ids))
    return results


def _batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Sequences of about one length together, no more than a number of padded tokens; the longest come last."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if batches and (len(batches[-1]) + 1) * lengths[number] <= max_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches
