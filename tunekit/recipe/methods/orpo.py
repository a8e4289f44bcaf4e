"""Recipe section and spec of odds ratio preference optimization."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.comparing import MEAN_OVER_TOKENS, PAIR_METRICS, PAIR_WITHOUT_REFERENCE, MarginMethod
from tunekit.recipe.methods.spec import LOSS_CHECKS, LearningRate, MethodSpec


class ORPOMethod(MarginMethod):
    """Odds ratio preference optimization, without a reference model (TRL's ORPOTrainer)."""

    spec = MethodSpec(
        config=("trl", "experimental/orpo/orpo_config.py", "ORPOConfig"),
        row_formats=("preference",),
        trains_on="pairs",
        learning_rate=LearningRate(5e-6, 5e-5, "ORPO, arXiv 2403.07691"),
        metrics=("loss", "nll_loss", "log_odds_chosen", *PAIR_METRICS[1:]),
        health_checks=(*LOSS_CHECKS, "margins_saturate"),
        loss_description="ORPO losses (experimental in TRL): mean negative log-likelihood of prompts with "
        "chosen answers, plus the weighted odds-ratio term.",
        is_experimental=True,
        stores_metrics=True,
    )

    type: Literal["orpo"] = "orpo"
    """Odds ratio preference optimization, on preference pairs (arXiv 2403.07691). Experimental in TRL."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the odds-ratio term relative to the likelihood of the chosen answer."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's ORPOConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        why = f"experimental in TRL; {PAIR_WITHOUT_REFERENCE}; {MEAN_OVER_TOKENS.format('likelihood')}"
        return f"orpo, beta {self.beta:g}", why
