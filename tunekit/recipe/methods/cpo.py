"""Recipe section and spec of contrastive preference optimization and SimPO."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.comparing import MEAN_OVER_TOKENS, PAIR_METRICS, PAIR_WITHOUT_REFERENCE, MarginMethod
from tunekit.recipe.methods.spec import LOSS_CHECKS, LearningRate, MethodSpec, OtherSections
from tunekit.recipe.sections.section import Conflict


class CPOMethod(MarginMethod):
    """Contrastive preference optimization and SimPO, without a reference model (TRL's CPOTrainer)."""

    spec = MethodSpec(
        config=("trl", "experimental/cpo/cpo_config.py", "CPOConfig"),
        row_formats=("preference",),
        trains_on="pairs",
        learning_rate=LearningRate(1e-6, 1e-5, "SimPO, arXiv 2405.14734"),
        metrics=("loss", "nll_loss", "log_odds_chosen", *PAIR_METRICS[1:]),
        health_checks=(*LOSS_CHECKS, "margins_saturate"),
        loss_description="CPO losses (experimental in TRL). Accuracies are the share of pairs whose "
        "chosen answer is more likely than the rejected one.",
        is_experimental=True,
        stores_metrics=True,
    )

    type: Literal["cpo"] = "cpo"
    """Contrastive preference optimization, on preference pairs (arXiv 2401.08417). Experimental in TRL."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"] = "sigmoid"
    """Loss by its TRL name."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Scale of the log-probabilities in the loss."""

    cpo_alpha: Annotated[float | None, Field(ge=0)] = None
    """Weight of the likelihood of the chosen answer. Default: 1, and 0 for simpo and alphapo."""

    simpo_gamma: Annotated[float, Field(ge=0)] = 0.5
    """Target reward margin of simpo and alphapo."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of swapped pairs. Not for `hinge` and `ipo`."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's CPOConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    @property
    def margin(self) -> Literal["per token", "total"]:
        """Log-probability that the loss compares: the mean of an answer's tokens, or their sum."""
        return "per token" if self.loss_type in ("simpo", "alphapo", "ipo") else "total"

    @property
    def likelihood_weight(self) -> float:
        """Weight of the likelihood of the better answer, which SimPO and AlphaPO have none of."""
        if self.cpo_alpha is not None:
            return self.cpo_alpha
        return 0.0 if self.loss_type in ("simpo", "alphapo") else 1.0

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        why = f"experimental in TRL; {PAIR_WITHOUT_REFERENCE}"
        if self.likelihood_weight:
            why += f"; {MEAN_OVER_TOKENS.format('likelihood')}"
        choice = f"cpo, loss {self.loss_type}, beta {self.beta:g}"
        return f"{choice}, likelihood weight {self.likelihood_weight:g}", why

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and between settings of the method."""
        yield from super().conflicts(others)
        loss, has_margin = self.loss_type, self.loss_type in ("simpo", "alphapo")
        if self.label_smoothing and loss in ("hinge", "ipo"):
            yield Conflict(("method", "label_smoothing"), f"has no effect with {loss}", "unset it")
        # A recipe that was written out states the defaults too.
        if self.simpo_gamma != type(self).model_fields["simpo_gamma"].default and not has_margin:
            what = f"has no effect with {loss}"
            yield Conflict(("method", "simpo_gamma"), what, "unset it, or set method.loss_type=simpo")
        if loss != "alphapo":
            return
        if self.cpo_alpha:
            what = "must be 0 with alphapo: TRL drops the likelihood term"
            yield Conflict(("method", "cpo_alpha"), what, "unset it, or set method.loss_type=simpo")
        if not self.trainer_args.get("alpha"):
            what = "alphapo without alpha equals simpo"
            yield Conflict(("method", "loss_type"), what, "set method.trainer_args.alpha, or use simpo")
