"""Suspicious values in a configuration of any tool: numbers far from those that others train with."""

from tunekit.migration.draft import Draft
from tunekit.migration.report import Suspicion
from tunekit.recipe.methods import is_rewarded
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import LoraAdapter

LOW_FOR_LORA = 1e-5
"""Below this LoRA hardly moves in supervised fine-tuning: it takes about ten times the rate of full fine-tuning
(arXiv 2106.09685 trains with 1e-4 to 2e-3)."""

HIGH_FOR_FULL = 2e-4
"""Above this full fine-tuning forgets what the model knew."""

HIGH_FOR_ANSWERS = 5e-5
"""Above this methods that hold a model to a reference leave it (arXiv 2305.18290 trains with 1e-6)."""

MANY_EPOCHS = 10


def suspects(draft: Draft, recipe: Recipe) -> None:
    """Note what is far from usual in a recipe, at the line that it comes from."""

    def note(target: str, words: str) -> None:
        keys = draft.origins.get(target, [])
        line = min((draft.line_of(key) for key in keys if draft.line_of(key)), default=0)
        draft.suspicious.append(Suspicion(line, words))

    rate = recipe.learning_rate
    is_lora, is_sft = isinstance(recipe.adapter, LoraAdapter), recipe.method.spec.trains_on == "tokens"
    if is_lora and is_sft and rate < LOW_FOR_LORA:
        note("train.learning_rate", f"learning rate {rate:g} is low for LoRA, which mostly trains with 1e-4 to 5e-4")
    if not is_lora and is_sft and rate > HIGH_FOR_FULL:
        note(
            "train.learning_rate", f"learning rate {rate:g} is high for full fine-tuning, which mostly trains with 1e-5"
        )
    if not is_sft and not recipe.method.spec.classifies and rate > HIGH_FOR_ANSWERS:
        note(
            "train.learning_rate",
            f"learning rate {rate:g} is high for {recipe.method.type}, which mostly trains below 1e-5",
        )
    if recipe.train.num_epochs is not None and recipe.train.num_epochs > MANY_EPOCHS:
        note(
            "train.num_epochs", f"{recipe.train.num_epochs:g} epochs: rows that are seen so often are learned by heart"
        )
    if isinstance(recipe.adapter, LoraAdapter) and recipe.adapter.rank > 256:
        note(
            "adapter.rank",
            f"rank {recipe.adapter.rank}: adapters are seldom so large; adapter: full may cost little more",
        )
    if is_rewarded(recipe.method) and not recipe.method.rewards:
        note("method.type", f"{recipe.method.type} has no rewards yet: training needs one at least (method.rewards)")
    if recipe.model.trust_remote_code:
        note("model.trust_remote_code", "code that comes with a model is run: read it first")
