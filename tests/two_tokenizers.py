"""A teacher whose tokenizer, chat template and vocabulary are not those of `tests.tiny`'s models."""

from pathlib import Path

from tests.tiny import save_tiny_model

WORDS = [
    "it is twice as much",
    "double 12 是 24",
    "yes yes of course 🙂",
    "the answer 答案是 forty-two",
    "sure? yes it is",
] * 8

TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant:\n{% generation %}{{ message['content'] + '</s>' }}"
    "{% endgeneration %}{% else %}{{ message['role'].title() + ':\n' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
"""Other words around each turn than ChatML's, and one token more at the start."""


def make_other_tokenizer(vocab_size: int = 400):
    """A byte-level BPE with merges, whose tokens are words, parts of words, and parts of characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    merged = Tokenizer(models.BPE())
    merged.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merged.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    merged.train_from_iterator(WORDS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_other_model(folder: Path, *, hidden: int = 32, seed: int = 3, vocab_size: int = 400) -> Path:
    """Save a Llama of random weights with that tokenizer, and return its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_other_tokenizer(vocab_size)
    torch.manual_seed(seed)
    config = LlamaConfig(
        # Some rows of the head are of no token, as in many models.
        vocab_size=len(tokenizer) + 5,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_teachers(folder: Path) -> None:
    """Save teachers for tiny models: one with their tokenizer, and one with another."""
    save_tiny_model(folder / "teacher", seed=1)
    save_other_model(folder / "other")
