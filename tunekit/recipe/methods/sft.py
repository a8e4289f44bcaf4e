"""Recipe section and spec of supervised fine-tuning."""

from typing import Any, Literal

from tunekit.recipe.methods.spec import LearningRate, MethodSection, MethodSpec


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

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's SFTConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""
