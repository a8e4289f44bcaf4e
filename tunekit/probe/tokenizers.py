"""Tokenizers as they are stored, those in Mistral's own format among them.

Some of Mistral's models, such as Voxtral, have one file of their own, `tekken.json`, in place of transformers' files.
Transformers reads it by mistral-common where that package is installed, and by its own code otherwise. By the package
a tokenizer has no chat template and does not report the characters of its tokens. So tunekit always has transformers'
own code read the file: the tokens are the same, and so is what is trained on, whatever is installed.
"""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from tunekit.recipe.chat_templates import template_of_type

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEKKEN = "tekken.json"
"""File of a tokenizer in Mistral's own format."""

TEKKEN_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""Special tokens of such a file by their roles, which it does not name; as in mistral-common (`SpecialTokens`)."""


def stored_tokenizer(path: str, revision: str | None, *, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    """Return a tokenizer as it is stored; with the chat template of the model's type where it has none.

    Args:
        path: Folder of the model, or its hub name.
        revision: Its revision there.
        trust_remote_code: Run code that comes with the tokenizer.

    Raises:
        Exception: What transformers raises where it cannot load it, as `tunekit.errors.loading_errors` lists.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        path, revision=revision, trust_remote_code=trust_remote_code, mistral_format=False
    )
    # Of a tokenizer.json transformers keeps no other file.
    if Path(tokenizer.init_kwargs.get("vocab_file") or "").name == TEKKEN:
        for role, token in TEKKEN_TOKENS.items():
            if getattr(tokenizer, role) is None:
                setattr(tokenizer, role, token)
        # What is no chat begins with a token in Mistral's format.
        tokenizer.add_bos_token = True
    if tokenizer.chat_template is None:
        template = template_of_type(_model_type(path, revision))
        tokenizer.chat_template = None if template is None else template.text()
    return cast("PreTrainedTokenizerBase", tokenizer)


def _model_type(path: str, revision: str | None) -> str | None:
    """Return the type of a model by its config.json; None where it has none."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    except OSError:
        return None
    return cast("str | None", config.get("model_type"))
