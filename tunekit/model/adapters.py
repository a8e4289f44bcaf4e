"""What is trained: every weight, or low-rank updates through PEFT."""

from typing import TYPE_CHECKING, Literal

from tunekit.recipe.adapters import FullAdapter, LoraAdapter

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


Task = Literal["CAUSAL_LM", "SEQ_CLS"]
"""What a model is for, by PEFT's names. With `SEQ_CLS` the score that stands for a head is trained and saved whole."""


def attach_adapter(
    model: "PreTrainedModel", adapter: FullAdapter | LoraAdapter, *, seed: int, task: Task = "CAUSAL_LM"
) -> "PreTrainedModel | torch.nn.Module":
    """The model with what is to be trained requiring gradients; adapters are seeded and kept in float32."""
    from transformers import set_seed

    set_seed(seed)
    if isinstance(adapter, FullAdapter):
        model.requires_grad_(True)
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type=task,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        modules_to_save=adapter.modules_to_save,
    )
    return get_peft_model(model, config)


def keep_trained_in_float32(model: "torch.nn.Module") -> None:
    """Undo a trainer's cast of trained parameters to 16 bits: small updates would vanish in rounding."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def num_trained(model: "torch.nn.Module") -> int:
    """Number of parameters that require gradients, those that DeepSpeed divided counted whole."""
    from transformers.trainer_pt_utils import get_model_param_count

    number: int = get_model_param_count(model, trainable_only=True)
    return number
