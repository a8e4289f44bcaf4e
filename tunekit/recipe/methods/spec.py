"""Spec of a training method, and its passes through the model.

What every training method says about itself, and how the rest of the code asks for it.

A method is a section of the recipe with two halves. What never changes is its `spec`: row formats, TRL's classes,
metrics, health checks. What depends on the recipe's settings are methods of the section: conflicts, passes for the
planner, its words in the plan. The half that builds the trainer is `tunekit.methods.NAME.build`.

Passes of a training method through the model besides one forward and one backward pass, as the planner counts them.

Supervised fine-tuning takes a row through the model once. DPO (TRL 1.16, trl/trainer/dpo_trainer.py) takes both answers
of a pair through it in one batch, then both through the reference model without gradients, while everything that the
backward pass needs is kept. KTO (trl/trainer/kto_trainer.py) does so with single answers, and its loss `kto` takes each
prompt with another's answer through both models besides, without gradients. ORPO and CPO (trl/experimental) have no
reference, and score with all logits at once; a reward model has a score of a text in their place. GRPO
(trl/trainer/grpo_trainer.py) first generates all answers of an optimizer step at once with a cache of keys and values,
and then trains on them in micro-batches. The others score tokens with the same head in tiles as supervised fine-tuning,
so logits are never there whole.

With adapters the reference is the model without them. Where all weights are trained it is a second model, in their
type, float32. DPO and KTO can compute its log-probabilities before training instead.

RLOO (trl/trainer/rloo_trainer.py) does as GRPO, and always scores its answers once before it learns from them.
Distillation (trl/trainer/distillation_trainer.py) generates one answer to each prompt, and takes each micro-batch
through a teacher between the forward and the backward pass, as DPO does through its reference.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from tunekit.recipe.sections.adapters import Adapter, FullAdapter, LoraAdapter, PromptTuningAdapter
from tunekit.recipe.sections.data import DataSection, MediaKind, SourceFormat, each_source
from tunekit.recipe.sections.section import Conflict, OutputSection, Section, TrainSection

HeadKind = Literal["tiles", "sums", "chunks", "whole", "score"]
"""Head that scores tokens: TRL's in tiles; tunekit's in chunks, whose gradients are computed with them where the sum of
losses is learned from (`sums`), or are those of each token (`chunks`); the model's own with all logits at once; or one
that scores each token by one number."""


@dataclass(frozen=True)
class Generation:
    """The answers that are generated for an optimizer step."""

    num_sequences: int
    """On all devices together."""
    prompt_tokens: int
    """Length to which prompts are padded, at most."""
    completion_tokens: int
    """Length of the answers, at most."""
    num_steps: int
    """Optimizer steps on the same answers."""
    by_vllm: bool = False
    """True if vLLM generates them rather than transformers."""
    is_ahead: bool = False
    """True if they are generated while other steps are trained."""


@dataclass(frozen=True)
class MethodPasses:
    """Passes of a method in an optimizer step."""

    method: str = "sft"
    """`method.type`."""
    sequences_per_row: int = 1
    """Sequences that a row of a micro-batch is: both answers of a pair."""
    max_scored_share: float = 1.0
    """Share of the tokens that count in the loss, at most."""
    keeps_reference: bool = False
    """True if a reference model is loaded besides the trained one."""
    refers_in_micro_batch: bool = False
    """True if the reference is computed between the forward and the backward pass."""
    compares_with_itself: bool = False
    """True if tokens are scored by the model's distribution with other prompts, without gradients."""
    sorts_probabilities: bool = False
    """True if probabilities of a teacher with another vocabulary are compared by rank."""
    num_forwards: float = 0.0
    """Forward passes without gradients of each sequence, in each optimizer step."""
    reference_passes: float = 1.0
    """Forward passes of the reference for each sequence that is generated."""
    num_feature_layers: int = 0
    """Layers whose hidden states are compared, in a pass without gradients that returns those of all layers."""
    num_forwards_before: int = 0
    """The same once, before the training."""
    generation: Generation | None = None
    head: HeadKind = "tiles"
    """Kind of head that scores tokens."""
    estimates: bool = False
    """True if each sequence passes the model and its reference once more, with another's answer."""
    media: tuple[MediaKind, ...] = ()
    """Kinds of media of rows."""
    num_virtual_tokens: int = 0
    """Trained embeddings before each sequence."""
    always_pads: bool = False
    """True if batches are padded whatever the recipe says."""

    @property
    def num_reference_forwards(self) -> float:
        """Of `num_forwards` those of a reference model that is there besides the trained one."""
        if not self.keeps_reference:
            return 0.0
        if self.generation is not None:
            return self.reference_passes / self.generation.num_steps
        return 2.0 if self.estimates else 1.0


@dataclass(frozen=True)
class PassInputs:
    """Settings outside the method's section on which its passes depend."""

    is_full: bool
    """True if all weights are trained, and no adapter."""
    max_length: int
    """Longest sequence, in tokens."""
    global_batch_size: int
    """Rows, pairs or answers of an optimizer step."""
    by_vllm: bool
    """True if vLLM generates answers."""


TrainsOn = Literal["tokens", "pairs", "answers", "steps", "labels", "prompts"]
"""Kind of row that a method learns from: tokens that tunekit has made, a pair of answers, an answer that is good or
bad, one whose steps are, a text with a label, or a prompt that the model answers while it is trained."""

Judged = Literal["text", "steps", "classes"]
"""Score of a model that does not write: a text by one number, each step of an answer as bad or good by two, or a text
by one number for each of its possible labels."""

ProblemType = Literal["single_label_classification", "multi_label_classification"]
"""Labels of a text: exactly one, or any number of them. Transformers' names."""


class ScoreHead(NamedTuple):
    """Head of a model that scores and does not write."""

    scores: Judged
    num_labels: int
    """Numbers for each text or token."""
    labels: tuple[str, ...] = ()
    """Names of its numbers, in their order; none where they have no names."""
    problem_type: ProblemType = "single_label_classification"

    @property
    def is_multi_label(self) -> bool:
        """True if a text has any number of labels."""
        return self.problem_type == "multi_label_classification"


NUM_LABELS: dict[Judged, int] = {"text": 1, "steps": 2}
"""Numbers of a score whose labels no recipe names."""

ReferenceUse = Literal["none", "model", "beforehand"]
"""Use of a reference model: none, in every step, or log-probabilities that are computed before training."""

COMMON_CHECKS = ("gradient_grows", "throughput_stalls")
"""Health checks of every method, by their names in `tunekit.training.health_warnings`."""

LOSS_CHECKS = ("loss_rises", "loss_spikes", *COMMON_CHECKS)
"""Health checks of methods whose loss tells whether they learn."""


class LearningRate(NamedTuple):
    """Peak learning rates of a method where the recipe gives none, and where they are from."""

    full: float
    lora: float
    """Of lora and qlora: ten times that of all weights, as LoRA takes (arXiv 2106.09685)."""
    source: str
    """Of the rate for all weights."""


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """Facts about a training method that no setting changes."""

    config: tuple[str, str, str]
    """TRL's config: package, file in it, class. The trainer stands beside it, by the same name."""
    row_formats: tuple[SourceFormat, ...]
    """Formats of rows that it learns from."""
    trains_on: TrainsOn
    learning_rate: LearningRate
    metrics: tuple[str, ...]
    """Logged metrics by which runs may be ranked, in TRL's names."""
    loss_description: str
    """Meaning of the losses, for the model card."""
    health_checks: tuple[str, ...] = LOSS_CHECKS
    """Names of the functions in `tunekit.training.health_warnings` that watch a run."""
    upstream_names: tuple[str, ...] = ()
    """Private names of TRL's trainer that tunekit needs for this method alone."""
    is_experimental: bool = False
    """True if the trainer is of `trl.experimental`, and says so in its log."""
    stores_metrics: bool = False
    """True if the trainer keeps what it measures in `_stored_metrics`, and counts no tokens."""
    classifies: Judged | None = None
    """Score that the model gives, where it does not write."""
    adds_router_loss: bool = False
    """True if TRL's trainer adds the auxiliary loss of routers, for each model that has one (TRL 1.16)."""
    settings_scale_loss: bool = True
    """True if losses and margins of runs with other settings are other quantities."""
    masks_as_told: bool = False
    """True if rows are packed and masked as the data section says."""
    media: tuple[MediaKind, ...] = ()
    """Kinds of media of the rows that it trains on."""
    disables_dropout: bool = False
    """True if the trainer never has dropout, whatever `trainer_args` say."""
    teacher_reads_own_tokens: bool = False
    """True if a teacher has another tokenizer, and reads rows in its own tokens."""
    learns_distributions: bool = False
    """True if the loss compares the probabilities of all tokens with those of a teacher."""
    uses_tiled_head: bool = True
    """True if tunekit's head can take the place of one that scores tokens in tiles."""


class StepSettings(NamedTuple):
    """Settings of a method whose rows are answers with a label for each step."""

    separator: str
    """Text after each step."""
    only_last: bool
    """True if the label of the last step alone is trained on."""


class OtherSections(NamedTuple):
    """Sections of a recipe besides the method's, with which that has to agree."""

    data: DataSection
    train: TrainSection
    adapter: Adapter
    output: OutputSection


class MethodSection(Section):
    """A training method. Each has a literal `type`, its name in recipes, and `trainer_args` for TRL's config."""

    shorthand = "type"
    spec: ClassVar[MethodSpec]

    if TYPE_CHECKING:  # Each method declares them itself, so that they stand first and last among its fields.
        type: str
        trainer_args: dict[str, Any]

    def default_learning_rate(self, adapter: Adapter) -> float:
        """Return the peak learning rate of a recipe that gives none."""
        rates = self.spec.learning_rate
        if isinstance(adapter, FullAdapter) or adapter.takes_full_rate:
            return rates.full
        return adapter.times_rate_of_lora * rates.lora

    @property
    def reference_use(self) -> ReferenceUse:
        """Use of a reference model."""
        return "none"

    @property
    def best_metric(self) -> str:
        """Metric of evaluations that tells the best checkpoint, without their prefix."""
        return "loss"

    @property
    def is_single_pass(self) -> bool:
        """True if a step takes each row through the trained model once, and through no other."""
        return self.spec.trains_on == "tokens"

    @property
    def sums_losses(self) -> bool:
        """True if training on tokens needs the sum of their losses alone."""
        return True

    def why_no_loss(self, trl_head: tuple[str, str] | None, *, divides_sequences: bool) -> tuple[str, str] | None:
        """Return why the loss cannot be computed, and the remedy; None if it can.

        Args:
            trl_head: Why TRL's head scores tokens, and the remedy; None where tunekit's does.
            divides_sequences: Whether Ulysses divides sequences over devices.
        """
        return None

    @property
    def loss_description(self) -> str:
        """Meaning of the losses, for the model card."""
        return self.spec.loss_description

    @property
    def num_server_devices(self) -> int:
        """Devices of the vLLM server that the run starts; 0 where it starts none."""
        return 0

    @property
    def score_head(self) -> ScoreHead | None:
        """Head of a model that scores and does not write; None where it generates."""
        scores = self.spec.classifies
        return None if scores is None else ScoreHead(scores, NUM_LABELS[scores])

    @property
    def step_settings(self) -> StepSettings | None:
        """Settings of steps; None where rows have none."""
        return None

    @property
    def couples_rows(self) -> bool:
        """True if the loss of a row depends on which others share its step, beyond a mean over them."""
        return False

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        return MethodPasses(self.type)

    def summary(self, reference: str) -> tuple[str, str] | None:
        """Return the choice and the reason of a plan; None where a row goes through the model once.

        Args:
            reference: The reference of the run, in words.
        """
        return None

    def balance(self, num_rows: int, num_good: int) -> tuple[str, str] | None:
        """Return how good and bad answers are balanced, choice and reason of a plan; None where nothing depends on it.

        Args:
            num_rows: Rows for training.
            num_good: Good answers among them.
        """
        return None

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield the fields of a recipe that do not go together with the method or with each other under it."""
        if not self.spec.masks_as_told:
            yield from self._conflicts_of_rows(others.data)
        if self.spec.trains_on in ("pairs", "answers") or self.spec.disables_dropout:
            yield from self._conflicts_of_dropout(others.adapter)
        if isinstance(others.adapter, PromptTuningAdapter):
            yield from self._conflicts_of_virtual_tokens(others.data)
        if self.spec.classifies and others.output.sample_prompts:
            what = f"has no effect with method {self.type}, whose model does not generate"
            yield Conflict(("output", "sample_prompts"), what, "unset it")

    def _conflicts_of_rows(self, data: DataSection) -> Iterator[Conflict]:
        """Yield settings of rows that TRL's trainer would not follow, as it lays them out itself."""
        with_it = f"with method {self.type}"
        if data.packing:
            yield Conflict(("data", "packing"), f"unsupported {with_it}", "unset it")
        if data.curriculum is not None:
            yield Conflict(("data", "curriculum"), f"unsupported {with_it}: TRL tokenizes its rows", "unset it")
        yield from self._conflicts_of_length(data)
        if data.padding_free is True:
            yield Conflict(("data", "padding_free"), f"unsupported {with_it}: TRL pads its batches", "unset it")
        sources = [*each_source("train", data.train), *each_source("eval", data.eval)]
        settings = [(("loss_on",), data.loss_on), *(((*key, "loss_on"), source.loss_on) for key, source in sources)]
        for key, loss_on in settings:
            if loss_on not in (None, "assistant"):
                what = f"cannot be {loss_on} {with_it}, whose loss covers complete answers"
                yield Conflict(("data", *key), what, "unset it")

    def _conflicts_of_length(self, data: DataSection) -> Iterator[Conflict]:
        """Yield a treatment of long rows that the method does not have."""
        if data.too_long != "truncate":
            what = f"unsupported with method {self.type}: rows are kept by the length of their prompts"
            yield Conflict(("data", "too_long"), what, "unset it")

    def _conflicts_of_virtual_tokens(self, data: DataSection) -> Iterator[Conflict]:
        """Yield what cannot have virtual tokens before each row: most methods, and rows of several documents."""
        why = None
        if self.spec.classifies:
            why = "the score is read at the last token, found by token IDs, for which PEFT passes embeddings"
        elif self.spec.trains_on == "prompts":
            why = "prompts are padded on the left, and PEFT drops the positions that would leave the padding out"
        elif self.reference_use != "none":
            why = "virtual tokens change the model before training, which would not start at the reference"
        elif self.spec.trains_on != "tokens":
            why = "untested"
        if why is not None:
            yield Conflict(
                ("adapter", "type"), f"prompt_tuning is unsupported with method {self.type}: {why}", "use lora"
            )
        for name, is_set in (("packing", data.packing), ("padding_free", data.padding_free is True)):
            if is_set and self.spec.masks_as_told:
                what = "unsupported with adapter.type prompt_tuning: only the first document of a row would see its "
                yield Conflict(("data", name), f"{what}virtual tokens", "unset it")

    def _conflicts_of_dropout(self, adapter: Adapter) -> Iterator[Conflict]:
        """Yield the dropout of an adapter, which TRL switches off for methods that compare answers."""
        if not isinstance(adapter, LoraAdapter) or not adapter.dropout:
            return
        if self.spec.disables_dropout:
            what = f"unsupported with method {self.type}, which compares the model with itself"
            yield Conflict(("adapter", "dropout"), what, "unset it")
            return
        if self.trainer_args.get("disable_dropout", True):
            what = f"has no effect with method {self.type}: TRL disables dropout"
            if self.reference_use != "none":
                what += ", so that the model starts equal to the reference"
            hint = "unset it, or set method.trainer_args.disable_dropout=false"
            yield Conflict(("adapter", "dropout"), what, hint)

    @classmethod
    def offers(cls, key: tuple[str, ...]) -> bool:
        """Return whether a field of the recipe may differ from its default with the method; a form hides the others.

        Args:
            key: The field's key without positions in lists.
        """
        if key[0] == "data" and key[-1] in ("packing", "padding_free", "loss_on", "curriculum", "too_long"):
            return cls.spec.masks_as_told
        if key == ("adapter", "dropout"):
            return not cls.spec.disables_dropout
        return key != ("output", "sample_prompts") or not cls.spec.classifies
