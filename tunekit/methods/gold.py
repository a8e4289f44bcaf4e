"""Distillation from a teacher with another tokenizer (GOLD), on rows that both models read in their own tokens.

TRL's GOLDTrainer (trl 1.16, experimental) makes the logits of both models whole, gives the teacher the text that the
model's chat template wrote, and by default takes each probability from the place of the token itself, where the model
predicts the next one (`uld_token_merge_strategy="observed"`). Here the teacher reads the same messages by its own
template; probabilities are those of TRL's other strategy, `bayesian`, from the place before each token; logits are made
of a few pieces of text at once; and the loss is a mean over the pieces of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunekit.data.tokenization.teacher_tokens import TEACHER_IDS, TEACHER_LABELS, TeacherTokenizer
from tunekit.data.tokenization.token_bytes import answers_in, pieces_of
from tunekit.kernels.cross_entropy import IGNORED
from tunekit.kernels.linear_ce import next_labels, places_of
from tunekit.methods.arguments import Parts
from tunekit.methods.divergence import Scorer, hidden_states, log_probs_of, with_head
from tunekit.methods.gkd import GKDTrainer, PromptedRow, taught_trainer, unpadded
from tunekit.methods.head import fused_heads
from tunekit.methods.logit_distance import Hybrid, distances
from tunekit.methods.run_trainer import RunTrainer
from tunekit.models.load import load_tokenizer
from tunekit.recipe.methods.gold import GOLDMethod

_MASK = "teacher_attention_mask"


def build(method: GOLDMethod, parts: Parts) -> RunTrainer:
    """Build a trainer over token ids and labels of a model and of its teacher.

    Args:
        method: The distance and the completions, and what else goes to SFTConfig.
        parts: All else. Rows have columns `input_ids` and `labels` (-100 off the loss), and the same of the teacher.
    """
    paths = parts.plan.recipe.model.path, method.teacher.path
    tokenizers = TeacherTokenizer.of(parts.tokenizer, paths[0], load_tokenizer(method.teacher), paths[1])
    hybrid = hybrid_of(method, parts.tokenizer.get_vocab(), tokenizers.tokenizer.get_vocab())
    return taught_trainer(GOLDTrainer, method, parts, {"tokenizers": tokenizers, "hybrid": hybrid})


def hybrid_of(method: GOLDMethod, own: Mapping[str, int], its: Mapping[str, int]) -> Hybrid | None:
    """Return how tokens that two vocabularies have in common are compared; None where all are compared by rank.

    Args:
        method: The method.
        own: Token ids of the model's vocabulary, by token.
        its: Those of the teacher's.
    """
    if not method.uld_use_hybrid_loss:
        return None
    matched = sorted((number, own[token]) for token, number in its.items() if token in own)
    weights = method.uld_hybrid_matched_weight, method.uld_hybrid_unmatched_weight
    ids = torch.tensor(matched, dtype=torch.long).view(-1, 2)
    return Hybrid(ids[:, 1].contiguous(), ids[:, 0].contiguous(), method.beta, *weights)


class GOLDTrainer(GKDTrainer):
    """GKDTrainer whose teacher reads the same text in tokens of another vocabulary.

    Args:
        tokenizers: Tokenizers of both models.
        hybrid: Comparison of the tokens that both vocabularies have.
        given: Arguments of GKDTrainer.
    """

    def __init__(self, *, tokenizers: TeacherTokenizer, hybrid: Hybrid | None, **given: Any) -> None:
        super().__init__(**given)
        self._tokenizers = tokenizers
        self._hybrid = None if hybrid is None else hybrid.to(self.accelerator.device)
        self.data_collator: Any = PiecesCollator(self.data_collator, tokenizers)

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns of the teacher."""
        super()._set_signature_columns_if_needed()
        self._signature_columns: list[str]
        if TEACHER_IDS not in self._signature_columns:
            self._signature_columns += [TEACHER_IDS, TEACHER_LABELS]

    def _num_counted(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of pieces of a micro-batch."""
        return len(inputs["own_last"])

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        """Return the number of pieces of a step, of all processes where their losses are averaged."""
        own = torch.tensor(sum(map(self._num_counted, batch_samples)), device=device)
        if self.args.average_tokens_across_devices:
            own = self.accelerator.gather(own).sum()
        return own.clamp(min=1)

    def _compare(self, student: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Sum the losses and the student's entropy over pieces, in nats. Called within the student's forward pass.

        Args:
            student: The trained model.
            inputs: A micro-batch.
        """
        labels = next_labels(inputs["labels"])
        places = places_of(labels) if self.kd_ratio < 1 else labels.new_empty(0)
        its_inputs = {"input_ids": inputs[TEACHER_IDS], "attention_mask": inputs[_MASK]}
        names = ("input_ids", "attention_mask")
        own_inputs = {name: inputs[name] for name in names if name in inputs}
        # The type of the products is set around a model's own forward pass, which this one replaces.
        with self.accelerator.autocast():
            sizes = [len(inputs["own_last"]), len(inputs["own_before"]), len(places)]
            positions = torch.cat([inputs["own_last"], inputs["own_before"], places])
            own, own_before, trained = torch.split(hidden_states(student, own_inputs, positions), sizes)
            teacher = self.accelerator.unwrap_model(self.teacher_model)
            its_sizes = [len(inputs["its_last"]), len(inputs["its_before"])]
            positions = torch.cat([inputs["its_last"], inputs["its_before"]])
            with torch.no_grad():
                arguments = teacher, its_inputs, positions
                hidden = self._redirected(self.teacher_model, teacher, hidden_states, *arguments)
                its, its_before = torch.split(hidden, its_sizes)
                its_lead = self._lead(with_head(teacher, its_before), inputs, "its", self._bound)
            head, *_ = fused_heads(self)
            scorer = with_head(student, own)
            own_lead = self._lead(scorer._replace(hidden=own_before), inputs, "own", head.bound)
            distance, entropy = distances(
                scorer,
                own_lead,
                with_head(teacher, its),
                its_lead,
                head.bound,
                self._bound,
                temperature=self.temperature,
                hybrid=self._hybrid,
            )
            loss = self.kd_ratio * distance.sum()
            if self.kd_ratio < 1:
                targets = labels.flatten().index_select(0, places)
                log_probs = log_probs_of(scorer._replace(hidden=trained), targets, head.bound)
                loss = loss - (1 - self.kd_ratio) * log_probs.sum()
        return loss, entropy.sum()

    def _lead(self, scorer: Scorer, inputs: Mapping[str, Any], side: str, bound: Mapping[str, Any]) -> Tensor:
        """Return the log-probability of the tokens of each piece before its last one, `(pieces,)`."""
        log_probs = log_probs_of(scorer, inputs[f"{side}_before_tokens"], bound, self.temperature)
        zeros = log_probs.new_zeros(len(inputs[f"{side}_last"]))
        return zeros.index_add(0, inputs[f"{side}_before_pieces"], log_probs)

    def _row(self, batch: Mapping[str, Tensor], index: int) -> PromptedRow:
        return _TaughtRow.both(batch, index, self._tokenizers)


class PiecesCollator:
    """Collates rows of a model and of its teacher, and names the pieces of text that both spell with whole tokens.

    Besides what another collator makes of the model's rows there are `teacher_input_ids`, `teacher_labels` and
    `teacher_attention_mask`, `(rows, tokens)`, and for both models (`own`, `its`), as places in the flattened batch:
    `last`, the hidden state that the last token of a piece follows, `(pieces,)`; `before`, those that the other tokens
    of pieces follow, `before_tokens`, these tokens, and `before_pieces`, the piece of each, `(tokens before,)`.

    Args:
        collator: Collates the rows of the model, padded on the right.
        tokenizers: Tokenizers of both models.
    """

    def __init__(self, collator: Any, tokenizers: TeacherTokenizer) -> None:
        self._collator, self._tokenizers = collator, tokenizers

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch of rows; where the teacher does not read them, as the other collator makes it."""
        if TEACHER_IDS not in examples[0]:
            return dict(self._collator(list(examples)))
        rows = [{name: row[name] for name in ("input_ids", "labels")} for row in examples]
        batch: dict[str, Any] = self._collator(rows)
        ids, labels = ([torch.tensor(row[name]) for row in examples] for name in (TEACHER_IDS, TEACHER_LABELS))
        masks = [torch.ones_like(row) for row in ids]
        for name, columns, fill in ((TEACHER_IDS, ids, 0), (TEACHER_LABELS, labels, IGNORED), (_MASK, masks, 0)):
            batch[name] = torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=fill)
        sides = _Places(batch["input_ids"].size(1)), _Places(batch[TEACHER_IDS].size(1))
        for index, row in enumerate(examples):
            self._add(index, row, sides)
        return batch | sides[0].tensors("own") | sides[1].tensors("its")

    def _add(self, index: int, row: Mapping[str, Any], sides: "tuple[_Places, _Places]") -> None:
        both = self._tokenizers.own, self._tokenizers.its
        ids = [list(row[name]) for name in ("input_ids", TEACHER_IDS)]
        labels = [row[name] for name in ("labels", TEACHER_LABELS)]
        answers = [
            answers_in(of, trained, tokens.special) for of, trained, tokens in zip(ids, labels, both, strict=True)
        ]
        # Where the teacher's row is cut, or the model's, the other has more answers.
        for spans in zip(*answers, strict=False):
            texts = [tokens.of(of[start:end]) for of, (start, end), tokens in zip(ids, spans, both, strict=True)]
            starts = [start for start, _ in spans]
            for ends in pieces_of(*texts):
                stops = [start + end for (start, _), end in zip(spans, ends, strict=True)]
                for side, of, start, stop in zip(sides, ids, starts, stops, strict=True):
                    side.add(index, of, start, stop)
                starts = stops


class _Places:
    """Places of the pieces of a batch, of one model.

    Args:
        width: Tokens of a row, with its padding.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._last: list[int] = []
        self._before: list[tuple[int, int, int]] = []

    def add(self, row: int, ids: Sequence[int], start: int, stop: int) -> None:
        """Add the piece of tokens `[start, stop)` of a row."""
        # A hidden state is of the token before the one that is predicted from it.
        first = row * self._width - 1
        self._before += [(first + place, ids[place], len(self._last)) for place in range(start, stop - 1)]
        self._last.append(first + stop - 1)

    def tensors(self, side: str) -> dict[str, Tensor]:
        """Return the places of a side."""
        before = torch.tensor(self._before, dtype=torch.long).view(-1, 3).unbind(1)
        names = (f"{side}_before", f"{side}_before_tokens", f"{side}_before_pieces")
        return {f"{side}_last": torch.tensor(self._last, dtype=torch.long), **dict(zip(names, before, strict=True))}


@dataclass(frozen=True)
class _TaughtRow(PromptedRow):
    """A row of a micro-batch of both models.

    Attributes:
        its_ids: Token ids that the teacher reads.
        its_labels: Those in answers, -100 for others.
        its_prompt: The teacher's prompt of the same answer.
        tokenizers: Tokenizers of both models.
    """

    its_ids: list[int]
    its_labels: list[int]
    its_prompt: list[int]
    tokenizers: TeacherTokenizer

    @classmethod
    def both(cls, batch: Mapping[str, Tensor], index: int, tokenizers: TeacherTokenizer) -> "_TaughtRow":
        """Return a row of a padded batch, whose prompt ends where the last answer that both have begins."""
        ids, labels = unpadded(batch, index)
        its_ids, its_labels = unpadded(batch, index, "teacher_")
        answers = answers_in(ids, labels, tokenizers.own.special)
        its_answers = answers_in(its_ids, its_labels, tokenizers.its.special)
        prompts = ids, its_ids
        last = min(len(answers), len(its_answers)) - 1
        if last >= 0:
            prompts = ids[: answers[last][0]], its_ids[: its_answers[last][0]]
        return cls(ids, labels, prompts[0], its_ids, its_labels, prompts[1], tokenizers)

    def completed(self, completion: list[int], max_length: int) -> dict[str, list[int]]:
        """Return both prompts with a completion, in tokens of both; a row without an answer as it is."""
        row = super().completed(completion, max_length)
        if len(self.prompt) == len(self.ids):
            return {**row, TEACHER_IDS: self.its_ids, TEACHER_LABELS: self.its_labels}
        own, its = self.tokenizers.own, self.tokenizers.its
        answer = row["input_ids"][len(self.prompt) :]
        end = next((place for place, token in enumerate(answer) if token in own.special), len(answer))
        tokens = its.encode(b"".join(own.of(answer[:end])))[: max(0, max_length - len(self.its_prompt))]
        labels = [IGNORED] * len(self.its_prompt) + tokens
        return {**row, TEACHER_IDS: self.its_prompt + tokens, TEACHER_LABELS: labels}
