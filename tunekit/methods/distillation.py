"""On-policy distillation through TRL's DistillationTrainer: a teacher scores each token of the model's answers.

With images TRL gives the teacher what the model's processor makes of them, so both processors have to make the same.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.row_formats import counted
from tunekit.data.media.expand import MediaTokens
from tunekit.data.media.pictures import Picture
from tunekit.errors import ModelError
from tunekit.methods.arguments import Parts
from tunekit.methods.generation import generating_trainer, generation_arguments
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.distillation import DistillationMethod

if TYPE_CHECKING:
    from torch import Tensor
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
            hint="use a larger model of the same family as the teacher: probabilities are compared token by token; "
            "or use method gold",
        )


def check_images(own: MediaTokens, teacher: MediaTokens, pictures: Iterable[Picture], path: str) -> None:
    """Check that the teacher's processor makes the same tokens and pixels of pictures as the model's.

    Args:
        own: Tokens of pictures by the model's processor.
        teacher: The same by the teacher's.
        pictures: The pictures of all rows; of the first one all pixels are compared, of the others their number.
        path: Where the teacher comes from.

    Raises:
        ModelError: It makes others.
    """
    first: Picture | None = None
    for size, picture in {picture.size: picture for picture in pictures}.items():
        first = first or picture
        mine, its = own.of(picture), teacher.of(picture)
        of_size = f"an image of {size[0]:,} x {size[1]:,} pixels"
        if (mine.text, mine.num_tokens) != (its.text, its.num_tokens):
            counts = f"{counted(its.num_tokens, 'token')}, the model's {counted(mine.num_tokens, 'token')}"
            changed = "" if its.num_tokens != mine.num_tokens else ", and not the same ones"
            raise _other_images(path, f"makes {of_size} {counts}{changed}")
        if mine.num_values != its.num_values:
            counts = f"{its.num_values:,} values, the model's {mine.num_values:,}"
            raise _other_images(path, f"makes {of_size} {counts}")
    if first is not None:
        inputs, of_teacher = own.features(first), teacher.features(first)
        names = inputs.keys() | of_teacher.keys()
        differing = [name for name in names if not _equal(inputs.get(name), of_teacher.get(name))]
        if differing:
            raise _other_images(path, f"makes other {', '.join(sorted(differing))} of {first.path}")


def _equal(one: "Tensor | None", other: "Tensor | None") -> bool:
    return one is not None and other is not None and one.shape == other.shape and bool((one == other).all())


def _other_images(path: str, words: str) -> ModelError:
    problem = f"method.teacher: the processor of {path!r} {words}; both models read what the model's processor makes"
    return ModelError(problem, hint="use a teacher of the same family whose image processor has the same settings")


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
