"""Recipe section and spec of direct preference optimization."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tunekit.recipe.methods.comparing import MEAN_OVER_TOKENS, PAIR_METRICS, ReferenceMethod
from tunekit.recipe.methods.spec import LOSS_CHECKS, LearningRate, MethodPasses, MethodSpec, OtherSections, PassInputs
from tunekit.recipe.sections.section import Conflict, alone_in_list

_Pairwise = Literal["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"]
DPOLoss = Literal[_Pairwise, "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]
"""Losses of DPO by TRL's names; `sft` is the likelihood of the better answer, as a part of a mix (RPO, MPO), and
`sigmoid_norm` divides log-probabilities by the length of an answer."""

SMOOTHED_LOSSES = ("aot", "aot_unpaired", "exo_pair", "robust")
"""Losses of DPO that read `label_smoothing`."""


class DPOMethod(ReferenceMethod):
    """Direct preference optimization: prefer chosen over rejected answers (TRL's DPOTrainer)."""

    spec = MethodSpec(
        config=("trl", "trainer/dpo_config.py", "DPOConfig"),
        row_formats=("preference",),
        trains_on="pairs",
        learning_rate=LearningRate(5e-7, 5e-6, "Zephyr, arXiv 2310.16944"),
        metrics=PAIR_METRICS,
        health_checks=(*LOSS_CHECKS, "chosen_falls", "margins_saturate"),
        loss_description="DPO losses: ln 2 if the preference equals the reference's. Accuracies are the share of "
        "pairs with a higher reward for the chosen answer, margins the difference of the rewards.",
        upstream_names=("_prepare_dataset", "_precompute_ref_logps", "_precompute_model_hash"),
        adds_router_loss=True,
        media=("image",),
    )

    type: Literal["dpo"] = "dpo"
    """Direct preference optimization, on preference pairs (arXiv 2305.18290)."""

    loss_type: Annotated[
        list[DPOLoss],
        Field(min_length=1),
        BeforeValidator(alone_in_list, json_schema_input_type=DPOLoss | Annotated[list[DPOLoss], Field(min_length=1)]),
    ] = ["sigmoid"]
    """Loss by its TRL name, or a list of losses to sum, such as `[sigmoid, sft]`."""

    loss_weights: list[Annotated[float, Field(ge=0)]] | None = None
    """Weights of several losses, in their order. Default: 1 each."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of swapped pairs. For the losses `robust`, `aot` and `aot_unpaired`, and required for `exo_pair`
    (1e-3 in the paper)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """KL coefficient: the higher, the closer the model stays to the reference."""

    precompute_ref_log_probs: bool = False
    """Compute reference log-probabilities once, before training. Full fine-tuning then needs no second copy of the
    weights, and no step runs a second forward pass."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's DPOConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    @property
    def likelihood_hint(self) -> str:
        """How to keep better answers likely, besides a lower rate and a higher beta."""
        return ", or add their likelihood: method.loss_type: [sigmoid, sft]"

    @property
    def has_plain_loss(self) -> bool:
        """True if the loss is -log sigmoid of the difference of rewards."""
        return self.loss_type == ["sigmoid"] and self.loss_weights is None and not self.label_smoothing

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        refers = not self.precompute_ref_log_probs
        return MethodPasses(
            self.type,
            sequences_per_row=2,
            keeps_reference=inputs.is_full and refers,
            refers_in_micro_batch=refers,
            num_forwards=float(refers),
            num_forwards_before=int(not refers),
        )

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        return f"dpo{self._mix()}, beta {self.beta:g}", "; ".join(
            ["each row is two sequences", reference, *self._coupled()]
        )

    def _mix(self) -> str:
        """Describe a mix of losses with their weights, where it is not the one that DPO is known by."""
        if self.loss_type == ["sigmoid"]:
            return ""
        weights = self.loss_weights or [1.0] * len(self.loss_type)
        mix = " + ".join(
            loss if weight == 1 else f"{weight:g} {loss}" for weight, loss in zip(weights, self.loss_type, strict=True)
        )
        return f", loss {mix}"

    def _coupled(self) -> Iterator[str]:
        """Yield the losses that depend on which pairs share a micro-batch."""
        if "sft" in self.loss_type:
            yield MEAN_OVER_TOKENS.format("sft loss")
        if {"aot", "aot_unpaired"} & set(self.loss_type):
            yield "aot sorts the pairs of a micro-batch, so the loss depends on their grouping"

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and between settings of the method."""
        yield from super().conflicts(others)
        losses = ", ".join(self.loss_type)
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            what = f"has {len(self.loss_weights)} weights for {len(self.loss_type)} losses ({losses})"
            yield Conflict(("method", "loss_weights"), what, "give one weight per loss, in their order")
        if self.label_smoothing and not set(self.loss_type) & set(SMOOTHED_LOSSES):
            *most, last = SMOOTHED_LOSSES
            hint = f"unset it, or use {', '.join(most)} or {last}"
            yield Conflict(("method", "label_smoothing"), f"has no effect with {losses}", hint)
        if "exo_pair" in self.loss_type and not self.label_smoothing:
            what = "must be greater than 0 with loss exo_pair"
            yield Conflict(("method", "label_smoothing"), what, "set it to 1e-3, as in the paper")
