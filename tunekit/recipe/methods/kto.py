"""Recipe section and spec of Kahneman-Tversky optimization."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.comparing import PAIR_METRICS, ReferenceMethod
from tunekit.recipe.methods.spec import LOSS_CHECKS, LearningRate, MethodPasses, MethodSpec, OtherSections, PassInputs
from tunekit.recipe.sections.section import Conflict

GOOD_TO_BAD = (1.0, 4 / 3)
"""Total weight of good answers over that of bad answers (arXiv 2402.01306, equation 8)."""


class KTOMethod(ReferenceMethod):
    """Kahneman-Tversky optimization: learn from desirable and undesirable answers (TRL's KTOTrainer)."""

    spec = MethodSpec(
        config=("trl", "trainer/kto_config.py", "KTOConfig"),
        row_formats=("unpaired_preference",),
        trains_on="answers",
        learning_rate=LearningRate(5e-7, 5e-6, "KTO, arXiv 2402.01306"),
        metrics=PAIR_METRICS,
        health_checks=(*LOSS_CHECKS, "chosen_falls", "margins_saturate"),
        loss_description="KTO losses: half the mean weight of an answer if the model equals the reference. Rewards "
        "are the log ratio to the reference, times beta: `rewards/chosen` of desirable answers, `rewards/rejected` "
        "of undesirable ones.",
        upstream_names=("_prepare_dataset", "_precompute_ref_logps", "_precompute_model_hash"),
        adds_router_loss=True,
        media=("image",),
    )

    type: Literal["kto"] = "kto"
    """Kahneman-Tversky optimization, on single answers labelled desirable or undesirable (arXiv 2402.01306)."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """Loss by its TRL name. `kto` compares the answers of an optimizer step, which must have at least two rows."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """KL coefficient: the higher, the closer the model stays to the reference."""

    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Loss weight of desirable answers."""

    undesirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Loss weight of undesirable answers."""

    precompute_ref_log_probs: bool = False
    """Compute reference log-probabilities once, before training."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's KTOConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    @property
    def couples_rows(self) -> bool:
        """True if the loss of a row depends on which others share its step."""
        return self.loss_type == "kto"

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        refers, estimates = not self.precompute_ref_log_probs, self.couples_rows
        return MethodPasses(
            self.type,
            keeps_reference=inputs.is_full and refers,
            refers_in_micro_batch=refers,
            num_forwards=float(estimates + (1 + estimates) * refers),
            num_forwards_before=(1 + estimates) * (not refers),
            estimates=estimates,
        )

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        words = [reference]
        if self.couples_rows:
            words = [
                "the KL divergence is estimated from mismatched prompts and completions of the whole optimizer step, "
                "so it does not depend on the micro-batch size",
                "rows are shuffled once before training; every epoch has the same order",
                reference,
            ]
        return f"kto, loss {self.loss_type}, beta {self.beta:g}", "; ".join(words)

    def balance(self, num_rows: int, num_good: int) -> tuple[str, str]:
        """Return how good and bad answers are balanced, and how KTO's paper would have them."""
        num_bad = num_rows - num_good
        choice = f"{num_good:,} desirable, {num_bad:,} undesirable answers"
        good, bad = self.desirable_weight * num_good, self.undesirable_weight * num_bad
        weighed = f"{self.desirable_weight:g} x {num_good:,} to {self.undesirable_weight:g} x {num_bad:,}"
        least, most = GOOD_TO_BAD
        if least * bad <= good <= most * bad:
            return choice, f"{weighed} is between 1:1 and 4:3, as the paper recommends"
        weights = [share * self.undesirable_weight * num_bad / num_good for share in GOOD_TO_BAD]
        suggested_weights = [self.desirable_weight * num_good / num_bad / share for share in reversed(GOOD_TO_BAD)]
        field, (low, high) = (
            ("desirable_weight", weights) if weights[0] >= 1 else ("undesirable_weight", suggested_weights)
        )
        advice = f"the paper recommends 1:1 to 4:3: method.{field} from {low:.3g} to {high:.3g}"
        return choice, f"{weighed} is {good / bad:.3g}:1; {advice}" if bad else weighed

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and between settings of the method."""
        yield from super().conflicts(others)
        if self.desirable_weight == self.undesirable_weight == 0:
            what = "is 0 like undesirable_weight, so the loss is always 0"
            yield Conflict(("method", "desirable_weight"), what, "set one of them above 0")
        if self.couples_rows and others.train.global_batch_size == 1:
            what = "must be at least 2 with method kto, which compares the answers of an optimizer step"
            hint = "raise it, or use method.loss_type=apo_zero_unpaired, which does not compare them"
            yield Conflict(("train", "global_batch_size"), what, hint)
