"""Trained parameters: every weight, or low-rank updates through PEFT."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tunekit.errors import ModelError
from tunekit.probe.origin import ADAPTER_WEIGHTS
from tunekit.recipe.sections.model import FullAdapter, LoraAdapter

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


Task = Literal["CAUSAL_LM", "SEQ_CLS"]
"""PEFT's task type. With `SEQ_CLS` the score that replaces the head is trained and saved whole."""


def attach_adapter(
    model: "PreTrainedModel",
    adapter: FullAdapter | LoraAdapter,
    *,
    seed: int,
    trained: Path | None = None,
    task: Task = "CAUSAL_LM",
) -> "PreTrainedModel | torch.nn.Module":
    """The model with what is to be trained requiring gradients; adapters are seeded and kept in float32.

    Args:
        model: The model, whose own weights stay as they are beside an adapter.
        adapter: What is trained.
        seed: For the matrices of a new adapter.
        trained: Folder of the adapter that is trained further; None for a new one, and in processes that are given
            their weights by another one.
        task: What PEFT takes the model for.
    """
    from transformers import set_seed

    set_seed(seed)
    if isinstance(adapter, FullAdapter):
        model.requires_grad_(True)
        return model
    from peft import get_peft_model

    adapted = get_peft_model(model, lora_config(adapter, model, task=task))
    if trained is not None:
        read_adapter(adapted, trained)
    return adapted


def lora_config(adapter: LoraAdapter, model: "torch.nn.Module", *, task: Task = "CAUSAL_LM") -> "LoraConfig":
    """Return an adapter section as PEFT has it.

    Args:
        adapter: The section.
        model: The model, whose routers that are linear layers are left out: PEFT adapts every linear layer, and those
            of PhiMoE and Llama 4 return more than its product.
        task: What PEFT takes the model for.
    """
    from peft import LoraConfig
    from torch import nn

    # Linear layers of a class that the model's own code defines.
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    routers = [name for name, module in linears if type(module).__module__ == type(model).__module__]

    return LoraConfig(
        task_type=task,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        modules_to_save=adapter.modules_to_save,
        exclude_modules=routers or None,
    )


def read_adapter(model: "PeftModel", folder: Path, *, name: str = "default") -> None:
    """Give an adapter of a model the weights that a folder has, all of them.

    Args:
        model: The model, to which an adapter of this name is attached.
        folder: Where PEFT saved one.
        name: Name of the adapter.

    Raises:
        ModelError: The folder has no adapter any more, a damaged one, or other tensors than this one.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        raise ModelError(f"{file} is gone, which this run starts from", hint="put it back, or start from another model")
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged: {error}", hint="name a checkpoint, or put it back") from error
    needed = set(get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False))
    different = sorted(needed.symmetric_difference(weights))
    if not different:
        try:
            set_peft_model_state_dict(model, weights, adapter_name=name)
        except RuntimeError as error:
            raise ModelError(f"the adapter in {folder} does not fit its base model: {error}") from error
        return
    where = "the folder" if different[0] in weights else "the model"
    raise ModelError(
        f"the adapter in {folder} is not one of this model: {different[0]} is in {where} alone"
        f"{f', and {len(different) - 1} more' if len(different) > 1 else ''}",
        hint="the recipe must name the base model and the settings that the adapter was trained with",
    )


def merge_adapter(model: "PreTrainedModel", adapter: LoraAdapter, folder: Path) -> "PreTrainedModel":
    """The model with a trained adapter made part of its weights, in their type.

    Args:
        model: The base model. It is changed.
        adapter: How the adapter was trained.
        folder: Where it was saved.
    """
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.integrations import gather_params_ctx

    adapted = get_peft_model(model, lora_config(adapter, model))
    read_adapter(adapted, folder)
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            # ZeRO-3 has divided them already; elsewhere they are whole.
            with gather_params_ctx(list(cast("torch.nn.Module", module).parameters())):
                cast(Any, module).merge()
    return cast("PreTrainedModel", cast(Any, adapted).merge_and_unload())


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
