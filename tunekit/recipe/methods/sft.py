"""Recipe section and spec of supervised fine-tuning."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.spec import LearningRate, MethodSection, MethodSpec, OtherSections
from tunekit.recipe.sections.section import Conflict


class SFTMethod(MethodSection):
    """Supervised fine-tuning (TRL's SFTTrainer)."""

    spec = MethodSpec(
        config=("trl", "trainer/sft_config.py", "SFTConfig"),
        row_formats=("messages", "prompt_completion", "text", "tokens"),
        trains_on="tokens",
        learning_rate=LearningRate(2e-5, 2e-4, "TRL's SFTConfig"),
        metrics=("loss", "mean_token_accuracy", "entropy"),
        loss_description="Losses are mean negative log-likelihoods in nats per trained token.",
        upstream_names=("_get_num_items_in_batch",),
        adds_router_loss=True,
        settings_scale_loss=False,
        masks_as_told=True,
        media=("image", "audio", "video"),
    )

    type: Literal["sft"] = "sft"
    """Supervised fine-tuning."""

    loss_type: Literal["nll", "dft", "eaft"] = "nll"
    """Loss of a token: its negative log-likelihood, weighted by its probability in dft (arXiv 2508.05629), and by the
    entropy of its prediction in eaft (arXiv 2601.02151). With eaft, evaluations report the unweighted loss."""

    eaft_alpha: Annotated[float, Field(gt=0)] = 1.0
    """Power of the entropy in eaft's weight."""

    eaft_top_k: Annotated[int, Field(gt=1)] = 20
    """Number of most likely tokens in eaft's entropy, which is divided by its maximum."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's SFTConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    @property
    def sums_losses(self) -> bool:
        """True if training needs the sum of losses alone."""
        return self.loss_type != "dft"

    def why_no_loss(self, trl_head: tuple[str, str] | None, *, divides_sequences: bool) -> tuple[str, str] | None:
        """Return why the loss cannot be computed, and the remedy; None if it can."""
        loss = f"method.loss_type: {self.loss_type}"
        if self.loss_type == "eaft" and trl_head is not None:
            why, remedy = trl_head
            return f"{loss} needs tunekit's head, and {why}", remedy
        if self.loss_type == "dft" and divides_sequences:
            return f"{loss}: TRL does not compute it on sequences that are divided by sp_size", "use cp_size"
        return None

    @property
    def loss_description(self) -> str:
        """Meaning of the losses, for the model card."""
        weights = {"dft": "the probability of the token", "eaft": "the entropy of its prediction"}
        if self.loss_type == "nll":
            return self.spec.loss_description
        evaluated = "; those of evaluations are unweighted" if self.loss_type == "eaft" else ""
        return f"{self.spec.loss_description[:-1]}, weighted by {weights[self.loss_type]}{evaluated}."

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and settings of a loss that is not used."""
        yield from super().conflicts(others)
        if self.loss_type != "eaft":
            for name in ("eaft_alpha", "eaft_top_k"):
                if dict(self)[name] != type(self).model_fields[name].default:
                    yield Conflict(("method", name), "has no effect without method.loss_type eaft", "unset it")
        if self.loss_type != "nll" and self.trainer_args.get("label_smoothing_factor"):
            what = f"not used by method.loss_type {self.loss_type}"
            yield Conflict(("method", "trainer_args", "label_smoothing_factor"), what, "unset it")
