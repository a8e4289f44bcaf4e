"""Axolotl's energy-based fine-tuning, `rl: ebft` -> method ebft, by its sections `ebft` and `trl`.

Axolotl 0.21 has it in two forms (`core/trainers/ebft/`). The structured one takes prompts with an answer through TRL's
GRPOTrainer, and is method ebft. The strided one takes texts without either, generates at many places of them at once,
and is not there.
"""

from typing import Any

from tunekit.errors import RecipeError
from tunekit.migration import training as hf
from tunekit.migration.draft import Draft, UnfitError, truth, whole
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate

_OPENCODE = "ebft_opencode.transform"
"""Type of rows whose columns `input` and `output` are a question and its answer."""

_MAX_TOKENS = 2048
"""Length at which Axolotl cuts the sequences that it embeds, in tokens."""


def check_mode(draft: Draft) -> None:
    """Refuse the strided form.

    Raises:
        RecipeError: The configuration has it.
    """
    if draft.get("ebft.mode", "structured") == "strided":
        where = f"{draft.original.path}:{draft.line_of('ebft.mode')}"
        problem = f"{where}: ebft.mode: strided generates at many places of a text, which method ebft does not"
        raise RecipeError(problem, hint="use mode structured, with rows of prompt and answer")


def format_of(kind: str) -> tuple[str | None, dict[str, str]]:
    """Return the format of rows by their type, and their columns by tunekit's names."""
    return ("alpaca", {"instruction": "input"}) if kind == _OPENCODE else (None, {})


def row_type(kind: str) -> Fate:
    """Return the fate of a type of rows."""
    if kind == _OPENCODE:
        return Fate("carried", "data.format: alpaca, data.columns: {instruction: input}")
    if kind.startswith("ebft_chat_multiturn.transform_last_turn"):
        return Fate("decided", "the last answer of a conversation is matched")
    words = f"{kind} is a function of Axolotl or your own: set data.format to module:function"
    return Fate("unsupported", f"{words}, which returns prompt and ground_truth")


def finish(draft: Draft) -> None:
    """Note what Axolotl does otherwise."""
    hf.room_for_answers(draft, prompt=0)
    words = f"Axolotl cuts prompts with answers at {_MAX_TOKENS} tokens before it compares features; tunekit skips "
    draft.differ("sequence_len", draft.get("sequence_len"), f"{words}rows that are longer than data.max_length")
    words = (
        "Axolotl compares features of decoded texts, and rounds embeddings to the model's type; tunekit those of the "
    )
    draft.differ("ebft", "features", f"{words}generated tokens, in float32")
    if _limits_tokens(draft) and draft.get("ebft.adaptive_max_tokens", True) is not False:
        times = draft.get("ebft.gt_length_multiplier", 1.5)
        words = f"Axolotl limits the completions of a batch to {times} times its longest answer; the recipe to "
        draft.differ("ebft.adaptive_max_tokens", True, f"{words}method.max_completion_length")


def _limits_tokens(draft: Draft) -> bool:
    """Return whether Axolotl's asynchronous trainer generates, which alone reads the length of answers."""
    return any(draft.get(f"trl.{key}") is True for key in ("async_prefetch", "use_data_producer"))


# Single keys


def setting(draft: Draft, entry: Entry) -> Fate:
    """A setting of the features."""
    name = entry.key.partition(".")[2]
    if draft.method != "ebft":
        return Fate("silent", "only used with rl: ebft")
    return draft.carry(entry, f"method.{name}", entry.value)


def of_other_mode(draft: Draft, entry: Entry) -> Fate:
    """A setting of the strided form."""
    return Fate("silent", "only used with mode: strided")


def completion_limit(draft: Draft, entry: Entry) -> Fate:
    """The limit of completions by the length of answers."""
    if not _limits_tokens(draft):
        return Fate("silent", "only used with trl.async_prefetch or trl.use_data_producer")
    if draft.get("ebft.adaptive_max_tokens", True) is False:
        return Fate("silent", "is off")
    return Fate("different", "completions are limited by method.max_completion_length alone")


def template_arguments(draft: Draft, entry: Entry) -> Fate:
    """Arguments of the chat template, for prompts."""
    return _trainer_arg(draft, entry, "chat_template_kwargs")


def generation_arguments(draft: Draft, entry: Entry) -> Fate:
    """Arguments of the generation, by the names of what generates."""
    if entry.key.endswith("stop_token_ids") and not truth(draft.get("trl.use_vllm", False)):
        raise UnfitError("is an argument of vLLM, which does not generate here")
    return _trainer_arg(draft, entry, "generation_kwargs")


def _trainer_arg(draft: Draft, entry: Entry, name: str) -> Fate:
    if draft.method not in ("grpo", "ebft"):
        return Fate("silent", "only used with grpo and ebft")
    value: Any = draft.get(f"trl.{name}")
    return draft.carry(entry, f"method.trainer_args.{name}", value)


def generates_ahead(draft: Draft, entry: Entry) -> Fate:
    """The wish to generate the next completions while a step is trained."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    if draft.method != "ebft":
        raise UnfitError("method.max_staleness generates ahead with a vLLM server: set it")
    words = "Axolotl generates the next completions while a step is trained, by the model before it; the recipe "
    return Fate("different", f"{words}generates them by the model of each step")


def sync_interval(draft: Draft, entry: Entry) -> Fate:
    """The number of steps after which vLLM gets the weights."""
    if whole(entry.value) == 1:
        return Fate("silent", "is the same here")
    return Fate("different", f"Axolotl sends weights to vLLM every {entry.value} steps; tunekit every step")


def rewards(draft: Draft, entry: Entry) -> Fate:
    """The rewards by their names."""
    if draft.method == "ebft":
        return Fate("silent", "Axolotl's ebft has the reward of features alone")
    return hf.rewards(draft, entry)
