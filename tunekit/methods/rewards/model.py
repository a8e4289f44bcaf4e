"""The reward model: a sequence classifier with one output, which reads the prompt with the answer."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.errors import ModelError
from tunekit.methods.rewards.answers import Answers, Judge
from tunekit.models.load import load_tokenizer
from tunekit.probe.chat_template import template_in_time
from tunekit.probe.model import model_folder
from tunekit.probe.origin import ADAPTER_CONFIG, origin_of
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.rewards import ModelReward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BATCH = 8
"""Answers that are judged at once."""


def reward_model(section: ModelReward) -> Judge:
    """The output of a model for each prompt with its answer, in the model's own chat template.

    Raises:
        ModelError: Its tokenizer cannot be loaded.
    """
    try:
        tokenizer = load_tokenizer(section.model)
    except ModelError as error:
        raise ModelError(f"method.rewards: reward_model: {error.problem}", hint=error.hint) from error

    loaded: dict[str, PreTrainedModel] = {}

    def tokens(prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            end = tokenizer.eos_token or ""  # TRL's RewardTrainer ends texts so
            return list(tokenizer((prompt + completion).removesuffix(end) + end)["input_ids"])
        with template_in_time("an answer"):
            encoded = tokenizer.apply_chat_template([*prompt, *completion], tokenize=True, return_dict=True)
        return list(encoded["input_ids"])

    def score(answers: Answers) -> list[float]:
        import torch

        (model,) = loaded.values()
        rows = [tokens(*pair) for pair in zip(answers.prompts, answers.completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(rows), _BATCH):
            batch = tokenizer.pad(
                {"input_ids": rows[start : start + _BATCH]}, padding_side="right", return_tensors="pt"
            ).to(model.device)
            with torch.no_grad():
                scores += model(**batch).logits[:, 0].float().tolist()
        return scores

    def load(device: str) -> None:
        loaded[device] = _load(section.model, device, pad_token_id=tokenizer.pad_token_id)

    return Judge(score, load=load)


def _load(section: ModelSection, device: str, *, pad_token_id: int | None) -> "PreTrainedModel":
    """The model on a device, in evaluation mode."""
    from transformers import AutoModelForSequenceClassification

    folder = model_folder(section)
    how: dict[str, Any] = {
        "num_labels": 1,
        "dtype": section.dtype,
        "use_safetensors": True,
        "trust_remote_code": section.trust_remote_code,
    }
    if section.attn_implementation != "auto":
        how["attn_implementation"] = section.attn_implementation
    try:
        if origin_of(section) is not None and (Path(folder) / ADAPTER_CONFIG).is_file():
            from peft import AutoPeftModelForSequenceClassification

            model = AutoPeftModelForSequenceClassification.from_pretrained(folder, revision=section.revision, **how)
        else:
            model, loading_info = AutoModelForSequenceClassification.from_pretrained(
                folder, revision=section.revision, output_loading_info=True, **how
            )
            _refuse_untrained(section, loading_info["missing_keys"])
    except (OSError, ValueError, KeyError) as error:
        what = f"method.rewards: reward_model: {section.path!r} cannot be loaded: {str(error).strip().splitlines()[0]}"
        raise ModelError(what, hint="use a sequence classifier with one output, stored as safetensors") from error
    model.config.pad_token_id = pad_token_id
    model.requires_grad_(requires_grad=False)
    on_device: PreTrainedModel = model.eval().to(device)
    return on_device


def _refuse_untrained(section: ModelSection, missing: Any) -> None:
    """Refuse a language model, whose output as a judge would be random.

    Raises:
        ModelError: It lacks weights.
    """
    if missing:
        what = f"method.rewards: reward_model: {section.path!r} is not a reward model: it has no {sorted(missing)[0]}"
        raise ModelError(what, hint="train one with method reward, or use a sequence classifier with one output")
