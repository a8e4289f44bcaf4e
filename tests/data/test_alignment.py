"""Pairs as ORPO and CPO learn them: token ids, and the labels that leave out the prompt."""

import datasets

from tests.data.tokenizers import CHATML, byte_tokenizer
from tunekit.data.tokenization.alignment import tokenised_pairs


def pair_of(row, *, max_length=512, template=None):
    tokenizer = byte_tokenizer(template)
    (made,) = tokenised_pairs(datasets.Dataset.from_list([row]), tokenizer, max_length)
    return tokenizer, made


def test_every_token_of_an_answer_is_learned_and_none_of_its_prompt():
    # A byte is a token, and `<|im_end|>` is one.
    tokenizer, made = pair_of({"prompt": "2+2=", "chosen": "4", "rejected": "22"})
    for name, answer in (("chosen", "4"), ("rejected", "22")):
        ids, labels = made[f"{name}_input_ids"], made[f"{name}_labels"]
        assert tokenizer.decode(ids) == f"2+2={answer}<|im_end|>"
        assert labels == [-100] * len("2+2=") + ids[len("2+2=") :]
        assert tokenizer.decode([label for label in labels if label != -100]) == f"{answer}<|im_end|>"
        assert made[f"{name}_attention_mask"] == [1] * len(ids)


def test_of_a_chat_the_turn_of_the_answer_is_learned_behind_its_head():
    ask = [{"role": "user", "content": "sky?"}]
    row = {"prompt": ask} | {
        name: [{"role": "assistant", "content": said}] for name, said in (("chosen", "blue"), ("rejected", "red"))
    }
    tokenizer, made = pair_of(row, template=CHATML)
    learned = [label for label in made["chosen_labels"] if label != -100]
    assert tokenizer.decode(learned) == "blue<|im_end|>\n"


def test_pairs_are_cut_at_the_longest_sequence():
    _, made = pair_of({"prompt": "2+2=", "chosen": "4", "rejected": "2222"}, max_length=6)
    assert len(made["rejected_input_ids"]) == len(made["rejected_labels"]) == 6
    assert made["rejected_labels"][:4] == [-100] * 4 and -100 not in made["rejected_labels"][4:]
