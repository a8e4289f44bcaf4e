"""liger-kernel's kernels in a model, as its own authors put them there.

Modules of the model that is held are given Liger's forward methods. Its rotary embedding cannot be given to a module:
Liger puts it into transformers' module of that type, for all models of it in the process. The loss stays as it is.
"""

from typing import TYPE_CHECKING

from tunekit.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_liger(model: "PreTrainedModel") -> None:
    """Give a model Liger's norms, gated MLPs and rotary embedding, before an adapter is attached to it.

    Raises:
        ModelError: liger-kernel does not know its type.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelError(
            f"model.kernels: liger-kernel has none for {model.config.model_type}", hint="leave model.kernels out"
        )
    # TRL has its own head, and refuses one that is fused already.
    _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)
