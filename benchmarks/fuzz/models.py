"""Tiny models and tokenizers of a fuzzed recipe: several families, chat templates and vocabularies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tiny_models import tiny_model
from tests.tiny import TEMPLATE

TEMPLATES = {
    "chatml": TEMPLATE,
    "unmarked": TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start|>' + message['role'] + '<|end|>\n\n'"
        " + message['content'] | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ ' ' + message['content'] + eos_token }}{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% endif %}{% endfor %}"
    ),
}
"""Chat templates by name: with markers, and without."""

SPECIAL: dict[str, dict[str, Any]] = {
    "chatml": {"eos": "<|im_end|>", "more": ["<|im_start|>"]},
    "unmarked": {"eos": "<|im_end|>", "more": ["<|im_start|>"]},
    "llama3": {"eos": "<|eot|>", "bos": "<|begin|>", "more": ["<|start|>", "<|end|>"]},
    "gemma": {"eos": "<end_of_turn>", "bos": "<bos>", "more": ["<start_of_turn>"]},
    "mistral": {"eos": "</s>", "bos": "<s>", "more": ["[INST]", "[/INST]"]},
}
"""Special tokens of each template."""

WITHOUT_SYSTEM = ("gemma", "mistral")
"""Templates that take no system message."""

CORPUS = "the rain in spain stays mainly on the plain. what is the sum of two and three? the answer is five. " * 4


def make_tokenizer(template: str, *, bpe: bool, pads_with_end: bool) -> Any:
    """Return a tokenizer of bytes, or of pairs of bytes merged, with the special tokens of a template.

    Args:
        template: Name of the template.
        bpe: Merge frequent pairs, so that a token holds several characters.
        pads_with_end: Use the end token for padding.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if bpe:
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
        tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.decoder = decoders.ByteLevel()
    special = SPECIAL[template]
    names = {"eos_token": special["eos"], "pad_token": special["eos"] if pads_with_end else "<|pad|>"}
    if "bos" in special:
        names["bos_token"] = special["bos"]
        tokenizer.add_special_tokens([special["bos"]])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special['bos']} $A",
            pair=f"{special['bos']} $A $B",
            special_tokens=[(special["bos"], tokenizer.token_to_id(special["bos"]))],
        )
    more = list(special["more"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, additional_special_tokens=more)
    wrapped.chat_template = TEMPLATES[template]
    return wrapped


def save_model(folder: Path, drawn: Mapping[str, Any]) -> Path:
    """Save the model that a recipe starts from, with its tokenizer, and return its folder.

    Args:
        folder: Where to.
        drawn: The `model` of a drawn case.
    """
    tokenizer = make_tokenizer(drawn["template"], bpe=drawn["bpe"], pads_with_end=drawn["pads_with_end"])
    changes = {
        **drawn["changes"],
        "vocab_size": len(tokenizer) + drawn["num_unused"],
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    model = tiny_model(drawn["type"], seed=drawn["seed"], **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_adapter(folder: Path, model: Path, adapter: Mapping[str, Any], seed: int) -> Path:
    """Save a random adapter of a model, to be trained further, and return its folder.

    Args:
        folder: Where to.
        model: Folder of the model.
        adapter: The adapter section of the recipe.
        seed: Seed of its matrices.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {name: adapter[name] for name in ("use_rslora", "target_modules") if name in adapter}
    options.setdefault("target_modules", "all-linear")
    config = LoraConfig(r=adapter["rank"], lora_alpha=adapter["alpha"], task_type="CAUSAL_LM", **options)
    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    peft_model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder
