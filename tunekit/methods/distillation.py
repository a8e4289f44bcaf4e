"""On-policy distillation through TRL's DistillationTrainer: a teacher scores each token of the model's answers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunekit.errors import ModelError
from tunekit.methods.arguments import Parts
from tunekit.methods.generation import generating_trainer, generation_arguments
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.distillation import DistillationMethod

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_tokens(tokenizer: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase", path: str) -> None:
    """Check that each token id means the same token to the teacher and to the model.

    Args:
        tokenizer: That of the model.
        teacher: That of the teacher.
        path: Where the teacher comes from.

    Raises:
        ModelError: Some are others.
    """
    own, its = tokenizer.get_vocab(), teacher.get_vocab()
    num_differing = sum(its.get(token) != number for token, number in own.items())
    if num_differing or len(own) != len(its):
        raise ModelError(
            f"method.teacher: {path!r} has a different tokenizer: {num_differing:,} of {len(own):,} tokens have "
            f"another id or are missing from its {len(its):,}",
            hint="use a larger model of the same family as the teacher: probabilities are compared token by token",
        )


def compute_under_autocast(trainer: RunTrainer) -> None:
    """Let a trainer compute its loss in the type of the products.

    Accelerate puts autocast around a model's `forward`, and TRL puts its loss in the place of that: all products of
    float32 weights would be float32, without a word (trl 1.16, `_ForwardRedirection`).
    """

    def compute_cast(compute: Callable[..., Any], *given: Any) -> Any:
        with trainer.accelerator.autocast():
            return compute(*given)

    trainer.wrap("compute_loss_of_answers", compute_cast)


def build(method: DistillationMethod, parts: Parts) -> RunTrainer:
    """A trainer over prompts.

    Args:
        method: The divergence, and what else goes to DistillationConfig.
        parts: All else. Rows have a column `prompt` of texts or messages.
    """
    from trl import DistillationConfig, DistillationTrainer

    trainer = generating_trainer(
        DistillationTrainer,
        method,
        parts,
        teacher_model=parts.load_teacher(method.teacher),
        args=DistillationConfig(
            **parts.arguments(),
            beta=method.beta,
            **{**method.trainer_args, **generation_arguments(method, parts.data, parts.plan)},
        ),
    )
    compute_under_autocast(trainer)
    return trainer
