"""Schema of recipes: every section, every field, every default, and the sentence that explains it.

A recipe holds intent in machine-free units; how it is carried out on a machine is the plan's. The string under a
field is its only description: `tunekit explain`, the JSON schema for editors and the reference page show that string.
A default lives here and nowhere else.

Values are strict: a number in quotes is not a number, and 2.5 is not a count. Unknown keys are errors.
"""

from pydantic import model_validator

from tunekit.recipe.methods import METHODS, Method
from tunekit.recipe.methods.sft import SFTMethod
from tunekit.recipe.sections.data import DataSection
from tunekit.recipe.sections.model import Adapter, LoraAdapter, ModelSection
from tunekit.recipe.sections.section import Conflict, Conflicts, Section
from tunekit.recipe.sections.train import OutputSection, ParallelSection, TrainSection


def has_choice(key: tuple[str, ...], method: str) -> bool:
    """Return whether a field may differ from its default with a method; a form leaves out those that may not.

    Args:
        key: The field's key without positions in lists.
        method: `method.type`.
    """
    return key != ("data", "eval", "weight") and (method not in METHODS or METHODS[method].offers(key))


class Recipe(Section):
    """What the user wants, with no machine in it."""

    model: ModelSection
    """The model to start from."""

    data: DataSection
    """The rows, and how they become tokens."""

    method: Method = SFTMethod()
    """The training method."""

    adapter: Adapter = LoraAdapter()
    """What is trained: all weights (`full`), or low-rank updates (`lora`, `qlora`)."""

    train: TrainSection = TrainSection()
    """The optimisation."""

    parallel: ParallelSection = ParallelSection()
    """How the run is spread over devices."""

    output: OutputSection = OutputSection()
    """What is written, and where."""

    @property
    def learning_rate(self) -> float:
        """Peak learning rate: the one given, or the default of the method and the adapter."""
        return self.train.learning_rate or self.method.default_learning_rate(self.adapter.type)

    @model_validator(mode="after")
    def _method_and_data_agree(self) -> "Recipe":
        conflicts = list(self.method.conflicts(self.data, self.train, self.adapter, self.output))
        if conflicts:
            raise Conflicts(conflicts)
        return self

    @model_validator(mode="after")
    def _a_stream_has_an_end(self) -> "Recipe":
        if not self.data.streaming:
            return self
        if self.train.num_epochs is not None:
            what = "means nothing with data.streaming: nobody knows how many rows an epoch has"
            raise Conflicts([Conflict(("train", "num_epochs"), what, "give train.max_steps instead")])
        if self.train.max_steps is None:
            what = "needs train.max_steps: nobody knows how many rows an epoch has"
            raise Conflicts([Conflict(("data", "streaming"), what, "say how many steps to train")])
        return self
