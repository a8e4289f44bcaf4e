"""Evaluation without generation: losses on sequences, pairs of answers, and rated answers.

Each is made from rows and a tokenizer alone, measures a model, and then says what the measurements of a model and of
the one before it come to. What the rows of a run are and how they were tokenised is as it was in training.

Log-likelihood of given texts under a model, and scores of a reward model: a figure for each sequence.

Everything is summed in float64 from log-softmaxes in float32. Sequences go through in batches of about one length,
padded behind their ends, where causal attention does not see it; a batch that memory has no room for is halved.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tunekit.data.formats.row_formats import Row
from tunekit.data.packing.sequences import IGNORED
from tunekit.data.tokenization.alignment import tokens_of
from tunekit.evaluation.bootstrap import Figure, Sample, scored
from tunekit.inference.inference_model import Loaded
from tunekit.recipe.methods import Method, compares_with_reference, has_margins
from tunekit.recipe.methods.comparing import MarginMethod
from tunekit.runs.evaluation_result import Score
from tunekit.runs.events import measures
from tunekit.training.measured_memory import is_out_of_memory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


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

    def sums(batch: list[int], given: "torch.Tensor", mask: "torch.Tensor") -> list[float]:
        logits = model(input_ids=given, attention_mask=mask, use_cache=False).logits
        return sums_of(logits, given, [counted[number] for number in batch])

    return through(model, ids, sums, tell)


def sums_of(logits: "torch.Tensor", given: "torch.Tensor", counted: Sequence[Ids]) -> list[float]:
    """The log-probability of the tokens that count, summed over each sequence of a batch.

    Args:
        logits: Logits `(batch, seq, vocabulary)`.
        given: Token ids `(batch, seq)`.
        counted: For each token of each sequence whether it counts.
    """
    import torch

    targets = np.zeros(given.shape, dtype=bool)
    for line, counts in enumerate(counted):
        targets[line, : len(counts)] = counts
    targets[:, 0] = False
    rows, places = (torch.from_numpy(index).to(given.device) for index in targets.nonzero())
    totals = torch.zeros(len(counted), dtype=torch.float64, device=given.device)
    for start in range(0, len(rows), _POSITIONS):
        row, place = rows[start : start + _POSITIONS], places[start : start + _POSITIONS]
        likely = logits[row, place - 1].float().log_softmax(-1)
        of_token = likely.gather(-1, given[row, place].unsqueeze(-1)).squeeze(-1)
        totals.index_add_(0, row, of_token.double())
    return list(totals.tolist())


def judgements(model: Any, ids: Sequence[Ids], tell: Told | None = None) -> np.ndarray:
    """The score of each sequence by a model with a single output; float64, `(sequences,)`.

    It is read behind the last token that is no padding, so that the model must know its padding token.
    """

    def scores(batch: list[int], given: "torch.Tensor", mask: "torch.Tensor") -> list[float]:
        return list(model(input_ids=given, attention_mask=mask).logits[:, 0].double().tolist())

    return through(model, ids, scores, tell, pad=model.config.pad_token_id)


def through(
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
    waiting = _batches([len(sequence) for sequence in ids], MAX_LOGITS // vocabulary if pad is not None else 0)
    num_done = 0
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


Values = dict[str, np.ndarray]
"""Measurements of each row, by name."""

LOSS = Figure("loss", "loss (nats per token)", ".4f", higher_is_better=False)
PERPLEXITY = Figure("perplexity", "perplexity", ".4g", higher_is_better=False, is_perplexity=True)


class Part(Protocol):
    """Something that a model is evaluated on."""

    @property
    def of(self) -> str:
        """The rows, or the task."""

    @property
    def needs_before(self) -> bool:
        """True if its figures measure how far a model has moved from its reference."""

    def measure(self, loaded: Loaded, tell: Told) -> Any:
        """Measure a model."""

    def scores(self, after: Any, before: Any | None) -> list[Score]:
        """Summarize the measurements of a model and of its predecessor."""


@dataclass(frozen=True)
class Texts:
    """Sequences, of which some tokens count: a loss weighs each of these alike, whichever row it is in.

    Attributes:
        of: The rows.
        ids: Token ids of each.
        counted: For each token whether it counts.
    """

    of: str
    ids: Sequence[np.ndarray]
    counted: Sequence[np.ndarray]
    needs_before: bool = False

    def measure(self, loaded: Loaded, tell: Told) -> Values:
        """The log-probability of each."""
        return {"logps": log_likelihoods(loaded.model, self.ids, self.counted, tell)}

    def scores(self, after: Values, before: Values | None) -> list[Score]:
        """The mean over all tokens that count, and its exponential."""
        num_tokens = np.array([counts[1:].sum() for counts in self.counted], dtype=np.float64)

        def sample(values: Values) -> Sample:
            return Sample(-values["logps"] / np.maximum(num_tokens, 1), num_tokens)

        theirs = None if before is None else sample(before)
        return [scored(figure, self.of, sample(after), theirs) for figure in (LOSS, PERPLEXITY)]


@dataclass(frozen=True)
class Answered:
    """A prompt with one answer, as tokens."""

    ids: np.ndarray
    counted: np.ndarray

    @classmethod
    def of_row(
        cls, row: Row, columns: Sequence[str], tokenizer: "PreTrainedTokenizerBase", max_length: int
    ) -> "list[Answered] | None":
        """The answers in some columns of a row, cut as in training; None where the prompt leaves no room for them."""
        num_prompt, sequences = tokens_of(row, columns, tokenizer)
        if num_prompt >= max_length:
            return None
        cut = [np.array(sequence[:max_length], dtype=np.int64) for sequence in sequences]
        return [cls(ids, np.arange(len(ids)) >= num_prompt) for ids in cut]


@dataclass(frozen=True)
class Pairs:
    """Preference pairs, scored by a model that generates.

    Attributes:
        of: The rows.
        chosen: The chosen answers.
        rejected: The rejected answers.
        method: How the model was trained; None where no run tells.
    """

    of: str
    chosen: Sequence[Answered]
    rejected: Sequence[Answered]
    method: Method | None

    @property
    def needs_before(self) -> bool:
        """DPO's rewards are how much likelier an answer has become."""
        return self.method is not None and compares_with_reference(self.method)

    def measure(self, loaded: Loaded, tell: Told) -> Values:
        """The log-probability of each answer, and how many tokens it has."""
        both = [*self.chosen, *self.rejected]
        likelihoods = log_likelihoods(
            loaded.model, [sequence.ids for sequence in both], [sequence.counted for sequence in both], tell
        )
        middle = len(self.chosen)
        return {"chosen": likelihoods[:middle], "rejected": likelihoods[middle:]}

    def scores(self, after: Values, before: Values | None) -> list[Score]:
        """Return the method's own measure, then the log-likelihoods of the answers."""
        return [*self._of_method(after, before), *self._of_likelihood(after, before)]

    def _of_method(self, after: Values, before: Values | None) -> Iterator[Score]:
        method = self.method
        if method is not None and compares_with_reference(method) and before is not None:
            beta = method.beta
            chosen, rejected = (beta * (after[name] - before[name]) for name in ("chosen", "rejected"))
            margins, zero = chosen - rejected, np.zeros_like(chosen)
            if method.has_plain_loss:
                loss = Figure("loss", f"{method.type.upper()} loss", ".4f", higher_is_better=False)
                yield _mean(loss, self.of, np.logaddexp(0, -margins), zero + math.log(2))
            yield _mean(logged_figure("rewards/accuracies", higher=True), self.of, margins > 0, None)
            for name, values in (("margins", margins), ("chosen", chosen), ("rejected", rejected)):
                yield _mean(logged_figure(f"rewards/{name}"), self.of, values, zero)
        if method is not None and has_margins(method):
            margins, earlier = self._margins(method, after), None if before is None else self._margins(method, before)
            figure = logged_figure("rewards/accuracies", higher=True)
            yield _mean(figure, self.of, margins > 0, None if earlier is None else earlier > 0)
            yield _mean(logged_figure("rewards/margins"), self.of, method.beta * margins,
                        None if earlier is None else method.beta * earlier)  # fmt: skip

    def _margins(self, method: MarginMethod, values: Values) -> np.ndarray:
        """Return the reward margins of chosen answers, per token or in total, as the loss defines them."""
        sizes = [1.0 if method.margin == "total" else _sizes(answers) for answers in (self.chosen, self.rejected)]
        return np.asarray(values["chosen"] / sizes[0] - values["rejected"] / sizes[1])

    def _of_likelihood(self, after: Values, before: Values | None) -> Iterator[Score]:
        likelier = Figure("logps/accuracies", "chosen answer more likely", ".1%", higher_is_better=True)
        earlier = None if before is None else before["chosen"] > before["rejected"]
        yield _mean(likelier, self.of, after["chosen"] > after["rejected"], earlier)
        for name in ("chosen", "rejected"):
            yield _mean(logged_figure(f"logps/{name}"), self.of, after[name], None if before is None else before[name])


@dataclass(frozen=True)
class JudgedPairs:
    """Preference pairs, scored by a reward model. Before its training its score is random, and not measured.

    Attributes:
        of: The rows.
        chosen: The chosen answers.
        rejected: The rejected answers.
    """

    of: str
    chosen: Sequence[Answered]
    rejected: Sequence[Answered]
    needs_before: bool = False

    def measure(self, loaded: Loaded, tell: Told) -> Values:
        """The score of each answer."""
        rewards = judgements(loaded.model, [sequence.ids for sequence in (*self.chosen, *self.rejected)], tell)
        return {"margins": rewards[: len(self.chosen)] - rewards[len(self.chosen) :]}

    def scores(self, after: Values, before: Values | None) -> list[Score]:
        """Return the accuracy on pairs, and the margin."""
        margins = after["margins"]
        loss = Figure("loss", "loss (Bradley-Terry)", ".4f", higher_is_better=False)
        return [
            _mean(loss, self.of, np.logaddexp(0, -margins), None),
            _mean(logged_figure("accuracy", higher=True), self.of, margins > 0, None),
            _mean(logged_figure("margin"), self.of, margins, None),
        ]


@dataclass(frozen=True)
class JudgedSteps:
    """Answers with labelled steps, scored by a process reward model. Before its training its score is random.

    Attributes:
        of: The rows.
        ids: Token ids of each row.
        labels: The label of each token: 1 or 0 where a step is scored, -100 elsewhere.
    """

    of: str
    ids: Sequence[Ids]
    labels: Sequence[Ids]
    needs_before: bool = False

    def measure(self, loaded: Loaded, tell: Told) -> Values:
        """The sum of the losses of each row's steps, and how many of them are classified right."""
        import torch

        num_right = np.zeros(len(self.ids))

        def sums(batch: list[int], given: "torch.Tensor", mask: "torch.Tensor") -> list[float]:
            logits = loaded.model(input_ids=given, attention_mask=mask, use_cache=False).logits
            nats = []
            for line, number in enumerate(batch):
                labels = torch.tensor(self.labels[number], device=given.device)
                is_step = labels != IGNORED
                scores, targets = logits[line, : len(labels)][is_step].double(), labels[is_step]
                num_right[number] = float((scores.argmax(-1) == targets).sum())
                nats.append(float(torch.nn.functional.cross_entropy(scores, targets, reduction="sum")))
            return nats

        return {"nats": through(loaded.model, self.ids, sums, tell), "right": num_right}

    def scores(self, after: Values, before: Values | None) -> list[Score]:
        """Return the mean loss of a step, and the share of steps classified right."""
        num_steps = np.array([(np.asarray(labels) != IGNORED).sum() for labels in self.labels], dtype=np.float64)
        figures = {
            "nats": Figure("loss", "loss (nats per step)", ".4f", higher_is_better=False),
            "right": logged_figure("accuracy", higher=True),
        }
        return [
            scored(figure, self.of, Sample(after[name] / num_steps, num_steps), None)
            for name, figure in figures.items()
        ]


@dataclass(frozen=True)
class JudgedTexts:
    """Texts with labels, scored by a classifier. Before its training its score is random.

    Attributes:
        of: The rows.
        ids: Token ids of each row.
        targets: The position of each row's label; or 1 or 0 for each label, where a row may have several.
    """

    of: str
    ids: Sequence[Ids]
    targets: Sequence[int | list[float]]
    needs_before: bool = False

    def measure(self, loaded: Loaded, tell: Told) -> Values:
        """The loss of each row, and whether it is classified right."""
        import torch
        from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

        num_right = np.zeros(len(self.ids))

        def losses_of(batch: list[int], given: "torch.Tensor", mask: "torch.Tensor") -> list[float]:
            logits = loaded.model(input_ids=given, attention_mask=mask).logits.double()
            targets = torch.tensor([self.targets[number] for number in batch], device=given.device)
            if targets.is_floating_point():
                losses = binary_cross_entropy_with_logits(logits, targets.double(), reduction="none").mean(-1)
                is_right = ((logits > 0) == targets.bool()).all(-1)
            else:
                losses = cross_entropy(logits, targets, reduction="none")
                is_right = logits.argmax(-1) == targets
            num_right[batch] = is_right.cpu().numpy()
            return list(losses.tolist())

        nats = through(loaded.model, self.ids, losses_of, tell, pad=loaded.model.config.pad_token_id)
        return {"nats": nats, "right": num_right}

    def scores(self, after: Values, before: Values | None) -> list[Score]:
        """Return the mean loss of a row, and the share of rows classified right."""
        has_several = isinstance(self.targets[0], list)
        loss = Figure("loss", f"loss (nats per {'label' if has_several else 'row'})", ".4f", higher_is_better=False)
        return [
            _mean(loss, self.of, after["nats"], None),
            _mean(logged_figure("accuracy", higher=True), self.of, after["right"], None),
        ]


@dataclass(frozen=True)
class Rated:
    """Unpaired answers, each desirable or undesirable.

    Attributes:
        of: The rows.
        answers: The answers.
        good: Whether each is desirable, bool, `(rows,)`.
        method: How the model was trained; None where no run tells.
    """

    of: str
    answers: Sequence[Answered]
    good: np.ndarray
    method: Method | None

    @property
    def needs_before(self) -> bool:
        """KTO's rewards are how much likelier an answer has become."""
        return self.method is not None and compares_with_reference(self.method)

    def measure(self, loaded: Loaded, tell: Told) -> Values:
        """The log-probability of each answer."""
        ids, counted = [sequence.ids for sequence in self.answers], [sequence.counted for sequence in self.answers]
        return {"logps": log_likelihoods(loaded.model, ids, counted, tell)}

    def scores(self, after: Values, before: Values | None) -> list[Score]:
        """The rewards of desirable and of undesirable answers, and their log-likelihoods."""
        results = []
        for name, which in (("chosen", self.good), ("rejected", ~self.good)):
            if not which.any():
                continue
            weights = which.astype(np.float64)
            if self.method is not None and compares_with_reference(self.method) and before is not None:
                gained = self.method.beta * (after["logps"] - before["logps"])
                figure = logged_figure(f"rewards/{name}", higher=name == "chosen")
                results.append(scored(figure, self.of, Sample(gained, weights), Sample(np.zeros_like(gained), weights)))
            theirs = None if before is None else Sample(before["logps"], weights)
            results.append(scored(logged_figure(f"logps/{name}"), self.of, Sample(after["logps"], weights), theirs))
        return sorted(results, key=lambda score: score.name.startswith("logps"))


def _mean(figure: Figure, of: str, after: np.ndarray, before: np.ndarray | None) -> Score:
    """A figure to which each row counts alike."""
    ones = np.ones(len(after))
    theirs = None if before is None else Sample(before.astype(np.float64), ones)
    return scored(figure, of, Sample(after.astype(np.float64), ones), theirs)


def logged_figure(name: str, *, higher: bool | None = None) -> Figure:
    """Something that trainers log too, by its words there."""
    measure = next(measure for measure in measures() if measure.name == name)
    digits = ".1%" if measure.digits.endswith("%") else measure.digits
    return Figure(name, measure.words, digits, higher)


def _sizes(answers: Sequence[Answered]) -> np.ndarray:
    return np.array([sequence.counted.sum() for sequence in answers], dtype=np.float64)
