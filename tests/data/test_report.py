"""The data report, against numbers worked out by hand.

With the byte-level tokenizer a chat of a question q and an answer a has 21 + len(q) + len(a) tokens, of which
len(a) + 1 count: the answer and the end of its turn.
"""

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import make_tokenizer, save_chats, save_tiny_model
from tunekit.api import verbs
from tunekit.data.prepare import prepare_data
from tunekit.data.reports.measure import histogram, padded_share, quantile, report_data
from tunekit.data.reports.report import Bin, Quantiles, Repeats, visible
from tunekit.data.sources.load import load_data
from tunekit.display.data import sample_text
from tunekit.recipe.sections.data import DataSection

CHATS = [("ab", "c"), ("ab", "c"), ("abc", "def"), ("x" * 10, "y" * 9)]
"""24, 24, 27 and 40 tokens."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(section, tokenizer=None, *, batch_size=2, num_samples=3):
    section = DataSection.model_validate({"max_length": 64} | section)
    data, tokenizer = load_data(section), tokenizer or make_tokenizer()
    return report_data(
        prepare_data(section, data, tokenizer),
        tokenizer,
        max_length=section.max_length,
        packing=section.packing,
        batch_size=batch_size,
        num_samples=num_samples,
        notes=data.notes,
        skipped=data.skipped,
    )


def report(folder, train, held_out=None, *, num_samples=3, **section):
    save_chats(folder / "train.jsonl", train)
    section["train"] = "train.jsonl"
    if held_out is not None:
        save_chats(folder / "eval.jsonl", held_out)
        section["eval"] = "eval.jsonl"
    return measured(section, num_samples=num_samples)


def text(pieces):
    return "".join(piece.text for piece in pieces)


def test_rows_tokens_and_lengths_are_counted(folder):
    (train,) = report(folder, CHATS).sources
    assert (train.num_rows, train.num_sequences, train.num_dropped, train.num_truncated) == (4, 4, 0, 0)
    assert (train.num_tokens, train.num_trained) == (24 + 24 + 27 + 40, 2 + 2 + 4 + 10)
    assert train.trained_share == pytest.approx(18 / 115)
    assert train.lengths == Quantiles(min=24, median=24, p95=40, max=40)
    assert train.histogram == (Bin(21, 25, 2), Bin(26, 30, 1), Bin(31, 35, 0), Bin(36, 40, 1))


def test_rows_that_are_cut_or_left_out_are_counted_and_their_whole_length_is_shown(folder):
    found = report(folder, CHATS, max_length=24)
    (train,) = found.sources
    # 27 tokens lose one letter of the answer and its end; of 40 tokens the first 24 are all prompt.
    assert (train.num_rows, train.num_truncated, train.num_dropped, train.num_sequences) == (4, 2, 1, 3)
    assert (train.num_tokens, train.num_trained) == (72, 2 + 2 + 2)
    assert train.lengths.max == 40
    assert Bin(21, 24, 2) in train.histogram
    rows = dict(train.facts(24, is_packed=False))["rows"]
    assert rows == "4 read, 3 used; 1 skipped without a token in the loss; 2 truncated at 24 tokens"
    assert any("50.0% of rows truncated" in warning for warning in found.warnings())


def test_rows_that_are_too_long_are_told_apart_from_those_without_an_answer(folder):
    (train,) = report(folder, CHATS, max_length=24, too_long="drop").sources
    rows = dict(train.facts(24, is_packed=False))["rows"]
    assert rows == "4 read, 2 used; 2 dropped, longer than 24 tokens"


def test_packing_fills_sequences_and_padding_costs_what_random_batches_waste(folder):
    packing = report(folder, CHATS).sources[0].packing
    # 40 + 24 and 27 + 24 fit into 64. Of the six pairs, three are 40 wide, two 27 and one 24: 33 on average.
    assert packing.num_packed == 2
    assert packing.packed_share == pytest.approx(115 / 128)
    assert packing.padded_share == pytest.approx(115 / (4 * 33))


def test_padding_costs_nothing_one_by_one_and_the_longest_width_all_together():
    assert padded_share([3, 5, 10], 1) == pytest.approx(1)
    assert padded_share([3, 5, 10], 3) == pytest.approx(18 / 30)
    assert padded_share([7], 1) == pytest.approx(1)


def test_quantiles_are_lengths_of_rows():
    assert [quantile(range(1, 21), part) for part in (0, 0.5, 0.95, 1)] == [1, 10, 19, 20]
    assert quantile([8], 0.95) == 8


def test_histogram_has_an_edge_at_the_longest_sequence():
    assert histogram([24, 24, 27, 40], 32) == (
        Bin(21, 25, 2),
        Bin(26, 30, 1),
        Bin(31, 32, 0),
        Bin(33, 35, 0),
        Bin(36, 40, 1),
    )


def test_histogram_keeps_its_edge_where_every_row_is_longer():
    assert histogram([90, 95], 50)[0] == Bin(41, 50, 0)


@pytest.mark.parametrize("lengths", [[1], [5] * 9, list(range(1, 1000)), [10] * 99 + [100_000], [1, 10**6]])
def test_histogram_has_every_row_once_in_few_bars(lengths):
    bars = histogram(sorted(lengths), 512)
    assert sum(bar.num_rows for bar in bars) == len(lengths)
    assert len(bars) <= 14
    assert all(before.high + 1 == after.low for before, after in itertools.pairwise(bars))


def test_duplicates_and_rows_of_eval_in_train_are_found_with_their_places(folder):
    found = report(folder, CHATS, [("new", "row"), ("ab", "c")])
    assert found.sources[0].duplicates == Repeats(1, ("train.jsonl:2", "train.jsonl:1"))
    assert found.sources[1].duplicates == Repeats(0)
    assert found.leaked == Repeats(1, ("eval.jsonl:2", "train.jsonl:1"))
    assert any(w.startswith("1 row of eval also in train (eval.jsonl:2 = train.jsonl:1)") for w in found.warnings())


def test_bad_rows_that_the_recipe_allows_are_named(folder):
    save_chats(folder / "rows.jsonl", CHATS)
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    found = measured({"train": "rows.jsonl", "max_bad_rows": 1})
    assert [bad.place.split(":")[:2] for bad in found.skipped] == [["rows.jsonl", "5"]]
    assert found.sources[0].num_rows == 4
    assert any("1 invalid row skipped" in note for note in found.notes)


def test_special_tokens_are_counted_and_the_end_token_is_named(folder):
    (train,) = report(folder, CHATS).sources
    counts = {token.text: (token.roles, token.num_tokens, token.num_trained) for token in train.special_tokens}
    assert counts == {
        "<|im_end|>": (("eos",), 8, 4),
        "<|endoftext|>": (("pad",), 0, 0),
        "<|im_start|>": ((), 8, 0),
    }
    assert (train.end_token.text, train.end_token.num_sequences_trained) == ("<|im_end|>", 4)


def test_an_end_that_is_never_trained_is_a_warning(folder):
    found = report(folder, CHATS)
    silent = replace(found.sources[0], special_tokens=())
    assert any("does not learn to stop" in w for w in replace(found, sources=(silent,)).warnings())
    assert not any("answers end" in warning for warning in found.warnings())


def test_samples_are_what_the_model_sees_with_what_counts(folder):
    first, second = report(folder, CHATS[1:], num_samples=2).sources[0].samples
    assert text(first.pieces) == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    assert text(piece for piece in first.pieces if piece.trained) == "c<|im_end|>"
    assert (first.num_tokens, first.num_trained) == (24, 2)
    assert text(piece for piece in second.pieces if piece.trained) == "def<|im_end|>"
    assert {piece.text for piece in second.pieces if piece.special} == {"<|im_start|>", "<|im_end|>"}


def test_a_character_of_several_tokens_is_one_piece(folder):
    (sample,) = report(folder, [("é", "日本")]).sources[0].samples
    assert [(piece.text, len(piece.ids)) for piece in sample.pieces if piece.trained] == [
        ("日", 3),
        ("本", 3),
        ("<|im_end|>", 1),
    ]


def test_the_space_before_a_word_is_kept_where_the_tokenizer_takes_it_from_a_texts_first_word(folder):
    words = {"▁hello": 0, "▁world": 1, "<unk>": 2, "</s>": 3}
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>")
    assert tokenizer.decode([1]) == "world"
    (folder / "rows.txt").write_text("hello world moon", encoding="utf-8")
    found = measured({"train": "rows.txt"}, tokenizer)
    assert [piece.text for piece in found.sources[0].samples[0].pieces] == ["hello", " world", "<unk>", "</s>"]
    assert "train: 1 unknown token (<unk>), text outside the tokenizer's vocabulary" in found.warnings()


def test_a_long_sample_is_shown_without_its_middle(folder):
    (sample,) = report(folder, [("q", "a" * 1000)], max_length=2000).sources[0].samples
    shown = sample_text(sample, in_colour=False).plain
    # 1,022 tokens: the prompt of 20, 1,000 letters, the end and a line break; 600 are shown.
    assert shown.startswith("<|im_start|>user↵\nq<|im_end|>↵\n<|im_start|>assistant↵\n⟦" + "a" * 380 + "⟧")
    assert "\n[422 more, 422 in the loss]\n⟦" in shown
    assert shown.endswith("]\n⟦" + "a" * 198 + "<|im_end|>⟧↵")


def test_line_breaks_and_control_characters_are_shown():
    assert visible("a\n\tb\x1b[31m\x7f") == "a↵\n\tb␛[31m␡"


class Page(HTMLParser):
    """Collects tags with their attributes, and the text outside of styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.words = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words += data


def test_page_escapes_what_is_in_the_rows_and_loads_nothing(folder):
    page = report(folder, [("<script>alert(1)</script>", "<b>&amp;")]).to_html()
    seen = Page(page)
    assert "<script>alert(1)</script>" in seen.words and "<b>&amp;" in seen.words
    assert not {tag for tag, _ in seen.tags} & {"script", "b", "link", "img", "iframe"}
    assert not {name for _, attributes in seen.tags for name in attributes} & {"src", "href"}
    assert not re.search(r"https?:|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page


def test_report_is_plain_data_readable_text_and_a_notebook_table(folder):
    found = report(folder, CHATS, CHATS)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["sources"][0]["packing"]["num_packed"] == 2
    assert plain["sources"][0]["samples"][0]["pieces"][0] == {
        "text": "<|im_start|>",
        "ids": [make_tokenizer().convert_tokens_to_ids("<|im_start|>")],
        "trained": False,
        "special": True,
        "medium": None,
    }
    assert plain["warnings"] == found.warnings()
    assert "4 read, 4 used" in str(found)
    assert "<html" not in found._repr_html_() and "max_length 64" in found._repr_html_()


def test_the_shares_of_a_mixture_are_told_and_each_source_is_measured(folder):
    save_chats(folder / "a.jsonl", CHATS)
    save_chats(folder / "b.jsonl", [("abc", "def")] * 2)
    sources = [{"path": "a.jsonl", "weight": 1.0}, {"path": "b.jsonl", "weight": 1.0}]
    found = measured({"train": sources, "stopping_strategy": "all_exhausted", "packing": True})
    assert [(part.source, part.num_available, part.num_taken, part.num_tokens) for part in found.mixture] == [
        ("a.jsonl", 4, 4, 115),
        ("b.jsonl", 2, 4, 108),
    ]
    assert [part.token_share for part in found.mixture] == [pytest.approx(115 / 223), pytest.approx(108 / 223)]
    assert [source.title for source in found.sources] == ["train: a.jsonl", "train: b.jsonl"]
    assert [source.num_tokens for source in found.sources] == [115, 54]
    # 40 + 24, 27 + 27, 27 + 27 and 27 + 24.
    assert found.num_train == 4
    assert found.mixture_words == "4 packed sequences per epoch, 87.1% of positions hold tokens"
    assert "b.jsonl" in found.to_html() and "48.4%" in found.to_html()


def pair(question, chosen, rejected):
    return json.dumps({"prompt": question, "chosen": chosen, "rejected": rejected})


def test_pairs_are_measured_by_their_longer_answer_and_cut_and_left_out_as_in_a_run(folder):
    (folder / "pairs.jsonl").write_text(
        "\n".join([pair("ab", "c", "defg"), pair("ab", "c" * 30, "d"), pair("a" * 40, "b", "c")])
    )
    save_tiny_model(folder / "model")
    given = {"model": str(folder / "model"), "data": {"train": "pairs.jsonl", "max_length": 20}, "method": "dpo"}
    (source,) = (report := verbs.data_report(given, num_samples=1)).sources
    assert (source.num_rows, source.num_dropped, source.num_truncated, source.num_sequences) == (3, 1, 1, 2)
    assert source.lengths == Quantiles(7, 33, 42, 42)
    assert source.num_tokens == (2 + 1 + 1) + (2 + 4 + 1) + 20 + (2 + 1 + 1)
    assert source.num_trained == source.num_tokens - 4 * 2
    assert sum(bar.num_rows for bar in source.histogram) == 3
    assert any(bar.high == 20 for bar in source.histogram)
    assert [text(sample.pieces) for sample in source.samples] == ["abc<|im_end|>", "abdefg<|im_end|>"]
    assert [text(piece for piece in sample.pieces if piece.trained) for sample in source.samples] == [
        "c<|im_end|>",
        "defg<|im_end|>",
    ]
    assert report.warnings() == ["train: 33.3% of rows truncated at data.max_length=20; their ends are not trained on"]
    assert "packed" not in dict(source.facts(20, is_packed=False))
    assert "Special tokens" not in report.to_html()


def test_prompts_are_measured_alone():
    given = {
        "model": "pico",
        "data": {"train": "example:sums.jsonl", "max_length": 64},
        "method": {"type": "grpo", "max_completion_length": 24},
    }
    (source,) = verbs.data_report(given).sources
    assert (source.num_trained, source.samples) == (0, ())
    assert dict(source.facts(64, is_packed=False))["tokens"] == f"{source.num_tokens:,} in prompts"
