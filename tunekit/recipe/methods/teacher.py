"""Common half of methods that learn the probabilities of another model, the teacher."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tunekit.recipe.methods.on_policy import OnPolicyMethod
from tunekit.recipe.sections.adapters import Adapter
from tunekit.recipe.sections.data import DataSection
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.output import OutputSection
from tunekit.recipe.sections.section import Conflict
from tunekit.recipe.sections.train import TrainSection

AS_THE_MODEL = ("dtype", "attn_implementation", "kernels")
"""Settings of a teacher that are those of the model that learns from it."""


class TeacherMethod(OnPolicyMethod):
    """A method whose answers a teacher says the probabilities of, token by token."""

    if TYPE_CHECKING:
        teacher: ModelSection

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        choice = f"{self.type}, an answer of up to {self.max_completion_length} tokens"
        return choice, f"{self.teacher.path} says how likely each of its tokens is; the teacher is a second model"

    def conflicts(
        self, data: DataSection, train: TrainSection, adapter: Adapter, output: OutputSection
    ) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and settings of the teacher that are the model's."""
        yield from super().conflicts(data, train, adapter, output)
        for name, value in zip(AS_THE_MODEL, _as_the_model(self.teacher), strict=True):
            if value != "auto":
                what = "cannot be given: the teacher is computed like the model"
                yield Conflict(("method", "teacher", name), what, f"use model.{name}")

    @classmethod
    def offers(cls, key: tuple[str, ...]) -> bool:
        """Return whether a field of the recipe may differ from its default with the method."""
        return super().offers(key) and not (key[:2] == ("method", "teacher") and key[-1] in AS_THE_MODEL)


def _as_the_model(teacher: ModelSection) -> tuple[str, ...]:
    return teacher.dtype, teacher.attn_implementation, teacher.kernels
