"""Trained text of each chat template that recipes take by name, kept in a file, so that a change of any shows.

    python -m tests.data.chat_templates

writes it anew; read the difference before you keep it. ⟦ ⟧ hold the pieces that count in the loss.
"""

import re
from itertools import groupby
from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerFast

from tests.data.test_families import TOOLS, TWO_TURNS, WITHOUT_SYSTEM, rows
from tests.data.tokenised import tokenised
from tests.data.tokenizers import byte_tokenizer
from tunekit.errors import DataError
from tunekit.probe.chat_template import end_answers, template_text
from tunekit.recipe.chat_templates import NamedTemplate, named_templates
from tunekit.recipe.sections.model import ModelSection

GOLDEN = Path(__file__).with_suffix(".yaml")

CONVERSATIONS = {"two turns": TWO_TURNS, "without a system message": WITHOUT_SYSTEM, "a call of a tool": TOOLS}


def tokenizer_for(template: NamedTemplate) -> PreTrainedTokenizerFast:
    """One token a byte, and the tokens of a template; its answers end as in a run."""
    tokenizer = byte_tokenizer(template_text(template.name), eos="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(template.markers)})
    end_answers(tokenizer, ModelSection(path="pico", chat_template=template.name))
    return tokenizer


def trained_text(row: dict, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text of a row as it is tokenised, with marks around what is learned."""
    sequence = tokenised(rows(row), tokenizer, max_length=20_000).sequences[0]
    pairs = zip(sequence["input_ids"], sequence["labels"], strict=True)
    text = ""
    for learned, group in groupby(pairs, key=lambda pair: pair[1] != -100):
        piece = tokenizer.decode([token for token, _ in group])
        text += f"⟦{piece}⟧" if learned else piece
    # Some write the date of today.
    return re.sub(r"(Current date: |Today Date: )(?!26 Jul 2024)[\w -]+", r"\1TODAY", text)


def recorded(template: NamedTemplate) -> dict[str, str]:
    """Return what each conversation becomes, or why it is refused."""
    texts = {}
    for name, row in CONVERSATIONS.items():
        try:
            texts[name] = trained_text(row, tokenizer_for(template))
        except DataError as error:
            texts[name] = f"refused: {error.problem}"
    return texts


def main() -> None:
    texts = {name: recorded(template) for name, template in named_templates().items()}
    text = yaml.safe_dump(texts, sort_keys=False, allow_unicode=True, width=10**9, default_style='"')
    GOLDEN.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
