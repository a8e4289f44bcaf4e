"""The chat model that ships with tunekit, and the scripts that make and measure it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "pico"
PICO = ROOT / "tunekit" / "models" / "pico"


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PICO)


def test_pico_fits_in_the_wheel():
    assert sum(file.stat().st_size for file in PICO.iterdir()) <= 8 * 10**6


def test_the_template_marks_what_the_assistant_says_and_its_end(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "2 + 2 = 4."},
        {"role": "user", "content": "Thank you."},
        {"role": "assistant", "content": "You are welcome!"},
    ]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    marked = tokenizer.decode([token for token, mask in pairs if mask])
    assert marked == "2 + 2 = 4.<|im_end|>You are welcome!<|im_end|>"
    assert tokenizer.decode(encoded["input_ids"]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_padding_is_not_the_end_of_a_turn(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize("text", ["naïve café", "3.14159 = π", "\ttabs\n\nand lines ", "日本語 🏴‍☠️"])
def test_any_text_survives_the_tokenizer(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.slow
def test_pico_leaves_room_for_improvement_on_arithmetic():
    """Between 20 and 60 percent of the card's held-out task, which asks 200 sums and 200 differences."""
    command = [sys.executable, SCRIPTS / "evaluate.py", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    shares = json.loads(answer.stdout)
    assert 0.2 <= shares["arithmetic"] <= 0.6
    assert shares["facts"] >= 0.9


@pytest.mark.slow
def test_the_pretraining_script_makes_a_model_that_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, SCRIPTS / "pretrain.py", "--output", tmp_path / "model", "--work", tmp_path / "work"]
    subprocess.run([*command, "--steps", "2"], capture_output=True, check=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    shipped = AutoModelForCausalLM.from_pretrained(PICO)
    assert model.config.to_diff_dict() == shipped.config.to_diff_dict()
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in shipped.named_parameters()}
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
