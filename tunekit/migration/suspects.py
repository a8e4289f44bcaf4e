"""Suspicious values of a configuration of any tool: far from those that others train with."""

from tunekit.migration.draft import Draft
from tunekit.migration.report import Suspicion
from tunekit.recipe.methods import is_rewarded
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import LoraAdapter

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
        lines = [draft.line_of(key) for key in draft.origins.get(target, [])]
        draft.suspicious.append(Suspicion(min(filter(None, lines), default=0), words))

    rate, adapter, method, epochs = recipe.learning_rate, recipe.adapter, recipe.method, recipe.train.num_epochs or 0
    is_lora, is_sft = isinstance(adapter, LoraAdapter), method.spec.trains_on == "tokens"
    if is_lora and is_sft and rate < LOW_FOR_LORA:
        note("train.learning_rate", f"learning rate {rate:g} is low for LoRA (typical: 1e-4 to 5e-4)")
    if not is_lora and is_sft and rate > HIGH_FOR_FULL:
        note("train.learning_rate", f"learning rate {rate:g} is high for full fine-tuning (typical: 1e-5)")
    if not is_sft and not method.spec.classifies and rate > HIGH_FOR_ANSWERS:
        note("train.learning_rate", f"learning rate {rate:g} is high for {method.type} (typical: below 1e-5)")
    if epochs > MANY_EPOCHS:
        note("train.num_epochs", f"{epochs:g} epochs: the model may memorize the rows")
    if isinstance(adapter, LoraAdapter) and adapter.rank > 256:
        note("adapter.rank", f"rank {adapter.rank}: unusually large; adapter: full may cost little more")
    if is_rewarded(method) and not method.reward_weights:
        note("method.type", f"{method.type} has no rewards yet: training needs at least one (method.rewards)")
    if recipe.model.trust_remote_code:
        note("model.trust_remote_code", "the model's own code will run: read it first")
