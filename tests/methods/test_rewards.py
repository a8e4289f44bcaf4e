"""The rewards that come with tunekit: what each says of answers, beside other ways to say it, and what it refuses."""

import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.data.servers import serving
from tests.tiny import make_tokenizer, save_tiny_model
from tests.waiting import LIMIT_SECONDS
from tunekit.data.formats.row_formats import Row
from tunekit.data.sources.rows import Rows, RowStore
from tunekit.errors import DataError, DependencyError, ModelError, RecipeError, RunError
from tunekit.methods.rewards.code import program_in
from tunekit.methods.rewards.load import check_rows, load_rewards, reward_names
from tunekit.recipe.load import load_recipe
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.recipe.sections.rewards import Reward


def sections(*rewards: Any) -> list[Reward]:
    method = load_recipe(
        {"model": "pico", "data": {"train": "x.jsonl"}, "method": {"type": "grpo", "rewards": [*rewards]}}
    ).method
    assert isinstance(method, GRPOMethod)
    return method.rewards


def judged(reward: Any, answers: list[Any], prompts: list[Any] | None = None, **columns: Any) -> list[float | None]:
    (function,) = load_rewards(sections(reward), device="cpu")
    ids = columns.pop("completion_ids", [[1]] * len(answers))
    return function(prompts=prompts or ["q"] * len(answers), completions=answers, completion_ids=ids, **columns)


def score(reward: Any, answer: Any, expected: Any = None) -> float | None:
    return judged(reward, [answer], answer=[expected])[0]


# Text


@pytest.mark.parametrize(
    ("settings", "answer", "expected", "value"),
    [
        ({}, " Paris\n", "Paris", 1),
        ({}, "paris", "Paris", 0),
        ({"ignore_case": True}, "PARIS", "paris", 1),
        ({}, "It is Paris", "Paris", 0),
        ({}, "", "Paris", 0),
        ({}, "5", 5, 1),
        ({"extract": "last_line"}, "so\n\nParis\n \n", "Paris", 1),
        ({"extract": "last_line"}, "\n \n", "Paris", 0),
        ({"extract": "last_number"}, "first 3, then 1,234.50 in all", "1,234.50", 1),
        ({"extract": "last_number"}, "none", "3", 0),
        ({"extract": "boxed"}, r"\boxed{3} or \boxed{4}", "4", 1),
        ({"extract": "boxed"}, r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1),
        ({"extract": "boxed"}, r"\boxed{\boxed{7}}", "7", 1),
        ({"extract": "boxed"}, r"\boxed{\text{a \} b}}", r"\text{a \} b}", 1),
        ({"extract": "boxed"}, r"\boxed{3} and \boxed{4", "3", 1),
        ({"extract": "boxed"}, r"\boxed{4", "4", 0),
        ({"extract": "answer_tag"}, "<answer>3</answer> <answer> 4 </answer> 5", "4", 1),
        ({"extract": "answer_tag"}, "<answer>3</answer> <answer>4", "3", 1),
        ({"extract": "answer_tag"}, "<answer>4", "4", 0),
        ({"extract": "answer_tag"}, "4</answer>", "4", 0),
    ],
)
def test_exact_match(settings: dict[str, Any], answer: str, expected: Any, value: float) -> None:
    assert score({"type": "exact_match", **settings}, answer, expected) == value
    assert score({"type": "exact_match", **settings}, [{"role": "assistant", "content": answer}], expected) == value


@pytest.mark.parametrize("content", ["x", None, [{"type": "text", "text": "x"}]])
def test_answers_may_be_messages_of_any_content(content: Any) -> None:
    value = score({"type": "exact_match"}, [{"role": "assistant", "content": content}], "x")
    assert value == (0 if content is None else 1)


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [
        ("The answer is 42.", 42, 1),
        ("It is 42, not 41", 42, 0),
        ("41? No: 42", "42", 1),
        ("", 0, 0),
        ("no number", 0, 0),
        ("-0", 0, 1),
        ("nan", 0, 0),
        ("inf", 1e308, 0),
        ("1e999", 1e308, 0),
        ("1/2", 0.5, 1),
        (r"\boxed{\dfrac{1}{2}}", 0.5, 1),
        (r"$\frac12$", "1/2", 1),
        ("3 1/2", 3.5, 1),
        ("3 1/2", 0.5, 0),
        ("1/0", 1, 0),
        ("3/4/2020", Fraction(4, 2020).__float__(), 0),
        ("50%", 0.5, 1),
        ("50%", 50, 1),
        (r"50\%", "50%", 1),
        ("0.5", "50%", 1),
        ("5%", 50, 0),
        ("$1,234.00", 1234, 1),
        ("1{,}234", 1234, 1),
        ("1 234", 1234, 0),
        ("1\u202f234", 1234, 1),
        ("1_234", 1234, 1),
        ("1,23", 123, 0),
        ("\u22125", -5, 1),
        ("-$5", -5, 1),
        ("10-3", 3, 1),
        ("x=-3", -3, 1),
        ("1.5e3", 1500, 1),
        ("1.5 × 10^3", 1500, 1),
        (r"$1.5 \times 10^{-3}$", 0.0015, 1),
        ("**7**", 7, 1),
        (".5", 0.5, 1),
        ("3 km", "3 km", 1),
        ("3", "3 km", 0),
        ("3000 m", "3 km", 0),
        ("3 km", 3, 1),
        (r"$3\text{ km}$.", "3 km", 1),
        ("5 m/s", "5 m/s", 1),
        ("90°", "90°", 1),
        ("0.3333333", Fraction(1, 3).__float__(), 1),
        ("0.3333", Fraction(1, 3).__float__(), 0),
        ("9" * 300, "9" * 300, 1),
        ("9" * 100_000, 9, 0),
    ],
)
def test_numeric_match(answer: str, expected: Any, value: float) -> None:
    assert score("numeric_match", answer, expected) == value


def test_numbers_are_read_as_what_python_makes_of_them_however_they_are_written() -> None:
    rng = random.Random(0)
    answers, right, wrong = [], [], []
    for _ in range(500):
        top, bottom = rng.randrange(-(10**6), 10**6), rng.randrange(1, 1000)
        number = Fraction(top, bottom)
        written = [
            (f"{top}/{bottom}", number),
            (f"{top:,}", Fraction(top)),
            (f"{top:_}", Fraction(top)),
            (f"{top / 100:,.2f}", Fraction(f"{top / 100:.2f}")),
            (f"{float(number):.12e}", Fraction(f"{float(number):.12e}")),
            (f"{top} kg", Fraction(top)),
            (f"\\boxed{{{top}}}", Fraction(top)),
        ]
        for text, value in written:
            answers.append(f"So it is {text}.")
            right.append(f"{value.numerator}/{value.denominator}")
            wrong.append(f"{value.numerator + 1}/{value.denominator}")
    exact = {"type": "numeric_match", "tolerance": 0}
    assert judged(exact, answers, answer=right) == [1] * len(answers)
    assert judged(exact, answers, answer=wrong) == [0] * len(answers)


def test_a_tolerance_is_a_share_of_the_expected_number() -> None:
    near = {"type": "numeric_match", "tolerance": 0.01}
    assert [score(near, text, -200) for text in ("-198", "-202", "-197.9", "-202.1", "200")] == [1, 1, 0, 0, 0]
    assert [score(near, text, 0) for text in ("0", "0.001")] == [1, 0]


def test_a_unit_of_the_recipe_must_stand_behind_the_number() -> None:
    in_km = {"type": "numeric_match", "unit": "km"}
    assert [score(in_km, text, 3) for text in ("3 km", "3km", "3", "3 m")] == [1, 1, 0, 0]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "text", ["1", "1 ", "1,", "1/", "-", ".", "{", "\\boxed{", "\\frac{", "1 1/", "<answer>", "\\"]
)
def test_huge_answers_are_read(text: str) -> None:
    """In hours, were the time that it takes to grow with the square of the length."""
    for reward in ("numeric_match", {"type": "exact_match", "extract": "boxed"}, "repetition"):
        assert score(reward, text * 100_000, "3") is not None


def test_regex_matches_the_whole_answer_or_a_part() -> None:
    form = {"type": "regex", "pattern": "<think>.+</think>.*"}
    assert [score(form, text) for text in ("<think>a\nb</think> c\n", "x <think>a</think>", "")] == [1, 0, 0]
    assert score({**form, "where": "search"}, "x <think>a</think>") == 1


def test_a_pattern_that_never_ends_has_not_matched() -> None:
    assert score({"type": "regex", "pattern": "(a+)+"}, "a" * 60 + "b") == 0


def test_repetition_is_trls_on_any_text() -> None:
    from trl.rewards import get_repetition_penalty_reward

    rng = random.Random(1)
    for size in (1, 2, 3):
        texts = ["", "a", *(" ".join(rng.choices("abC", k=rng.randrange(30))) for _ in range(100))]
        ids = [[ord(word) for word in text.split()] for text in texts]  # TRL counts tokens, and here words are some
        wanted = get_repetition_penalty_reward(size, -1.0)(ids)
        assert judged({"type": "repetition", "ngram_size": size}, texts) == pytest.approx(wanted)
    assert score({"type": "repetition", "ngram_size": 1}, "a A") == -0.5


def test_length_is_trls_on_any_length() -> None:
    from trl.rewards import get_soft_overlong_punishment

    for most, free in ((16, 8), (100, 0), (5, 4)):
        ids = [[0] * length for length in range(120)]
        wanted = get_soft_overlong_punishment(most, most - free)(ids)
        given = judged({"type": "length", "max_tokens": most, "free_tokens": free}, ["x"] * 120, completion_ids=ids)
        assert given == pytest.approx(wanted)


# Structure


def test_json_schema_agrees_with_the_validator_of_jsonschema(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": [1, "x"]}}, "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    rng = random.Random(2)
    values = [
        {name: rng.choice([1, 1.5, "x", None, [1]]) for name in rng.sample(["a", "b", "c"], rng.randrange(4))}
        for _ in range(200)
    ]
    wanted = [1.0 if jsonschema.Draft202012Validator(schema).is_valid(value) else 0.25 for value in values]
    assert len(set(wanted)) == 2
    answers = [f" {json.dumps(value)}\n" for value in values]
    assert judged({"type": "json_schema", "path": str(tmp_path / "schema.json")}, answers) == wanted
    in_rows = judged({"type": "json_schema", "column": "schema"}, answers, schema=[schema, json.dumps(schema)] * 100)
    assert in_rows == wanted


@pytest.mark.parametrize(
    "answer", ["", "{", "```json\n{}\n```", "NaN", "[Infinity]", "{} {}", "[" * 100_000, "1" * 10_000, "{'a': 1}"]
)
def test_what_is_no_json_gets_nothing(answer: str) -> None:
    assert judged({"type": "json_schema", "column": "schema"}, [answer], schema=[True]) == [0]


def test_a_schema_elsewhere_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("true")
    schema = {"$ref": (tmp_path / "schema.json").as_uri()}
    with pytest.raises(RunError, match=r"json_schema raised .*Unresolvable"):
        judged({"type": "json_schema", "column": "schema"}, ["{}"], schema=[schema])


# Mathematics


MATHS = [
    (r"\boxed{\frac{1}{2}}", "$0.5$", 1),
    (r"\boxed{\frac{1}{2}}", r"$\frac{2}{4}$", 1),
    (r"\boxed{1 + 2y}", "$2y+1$", 1),
    (r"\boxed{(1, 2)}", "$(1,2)$", 1),
    (r"\boxed{(1, 2)}", "$(2,1)$", 0),
    (r"\boxed{\{1,2\}}", r"$\{2,1\}$", 1),
    (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", 1),
    (r"\boxed{41}", "$42$", 0),
    ("nothing", "$42$", 0),
    ("", "$42$", 0),
]


def test_mathematics_agrees_with_trls_accuracy_reward() -> None:
    from trl.rewards import accuracy_reward

    answers, expected, values = [list(each) for each in zip(*MATHS, strict=True)]
    assert accuracy_reward([[{"role": "assistant", "content": one}] for one in answers], expected) == values
    assert judged("math", answers, answer=expected) == values


def test_mathematics_without_delimiters_is_read_too() -> None:
    answers, expected = (
        [r"\boxed{\frac12}", "It is 42.", r"so $x = 1 + 2y$", "0.5"],
        [r"\frac{2}{4}", 42, "2y+1", "1/2"],
    )
    assert judged("math", answers, answer=expected) == [1, 1, 1, 1]


def test_an_expression_without_end_gets_nothing_and_the_next_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunekit.methods.rewards import maths

    monkeypatch.setattr(maths, "_SECONDS", 2.0)
    answers = [r"\boxed{9^{9^{9^9}}}", r"\boxed{2}", r"\boxed{10000000!!}"]
    assert judged("math", answers, answer=["2", "2", "3"]) == [0, 1, 0]


def test_an_expected_expression_that_is_none_is_named_with_its_row() -> None:
    with pytest.raises(
        RunError, match=r"math: the column 'answer' has no mathematical expression: '\?', for prompt 'b'"
    ):
        judged("math", ["1", "1"], ["a", "b"], answer=["1", "?"])


# Code


def test_code_gets_the_share_of_its_tests() -> None:
    answers = [
        "Here:\n```python\ndef f(x): return x * 2\n```\nDone.",
        "```py\ndef f(x): return 4\n```",
        "def f(x): return x * 2",
        "",
        "I cannot.",
        "```python\ndef f(x): return x * 2",
    ]
    tests = ["assert f(2) == 4", "assert f(3) == 6"]
    assert judged("code", answers, tests=[tests] * 6) == [1, 0.5, 1, 0, 0, 0]


def test_the_last_closed_block_is_the_program() -> None:
    text = "```python\nfirst\n```\nno:\n```\nsecond\n```\n```python\nthird"
    assert program_in(text) == "second\n"
    assert program_in("just code") == "just code"


# Reward models


@pytest.fixture(scope="module")
def judge_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("judge")
    tokenizer = make_tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id, initializer_range=0.5,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CHATS = [[{"role": "user", "content": f"question {number}" * (number + 1)}] for number in range(11)]


def test_a_reward_model_says_in_batches_what_it_says_of_each_alone(judge_model: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(judge_model)
    model = LlamaForSequenceClassification.from_pretrained(judge_model).eval()
    replies = [[{"role": "assistant", "content": f"answer {number**3}"}] for number in range(11)]
    wanted = []
    for prompt, reply in zip(CHATS, replies, strict=True):
        ids = tokenizer.apply_chat_template(prompt + reply, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            wanted.append(model(input_ids=ids).logits.item())
    given = judged({"type": "reward_model", "model": str(judge_model)}, replies, CHATS)
    assert given == pytest.approx(wanted, abs=1e-5)
    assert max(wanted) - min(wanted) > 0.1
    plain = judged({"type": "reward_model", "model": str(judge_model)}, ["yes", "no"], ["a", "a"])
    with torch.no_grad():
        ids = tokenizer("ayes" + tokenizer.eos_token, return_tensors="pt")["input_ids"]
        assert plain[0] == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-5)


def test_a_reward_model_may_be_an_adapter(judge_model: Path, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    base = LlamaForSequenceClassification.from_pretrained(judge_model)
    config = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(base, config).eval()
    torch.nn.init.normal_(adapted.base_model.model.score.modules_to_save["default"].weight)
    adapted.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(judge_model)
    tokenizer.save_pretrained(tmp_path)
    with torch.no_grad():
        ids = tokenizer("ab" + tokenizer.eos_token, return_tensors="pt")["input_ids"]
        wanted = adapted(input_ids=ids).logits.item()
    reward = {"type": "reward_model", "model": str(tmp_path)}
    assert judged(reward, ["b"], ["a"]) == [pytest.approx(wanted, abs=1e-5)]


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    with pytest.raises(ModelError, match=r"is not a reward model: it has no score.weight"):
        judged({"type": "reward_model", "model": str(tmp_path / "model")}, ["b"], ["a"])
    with pytest.raises(ModelError, match=r"method.rewards: reward_model: .*nowhere"):
        judged({"type": "reward_model", "model": str(tmp_path / "nowhere")}, ["b"], ["a"])


# Judges


class Endpoint:
    """A server that speaks as OpenAI's does, with replies that a test chooses.

    Attributes:
        replies: A text, or a status, for the next requests; then `{"score": 5}`.
        asked: The bodies of the requests.
        keys: Their `Authorization`.
        least_at_once: Requests that have to be there together before any is answered.
    """

    def __init__(self) -> None:
        self.replies: list[str | int] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_at_once = self.most_at_once = 0
        self.least_at_once = 1
        self.lock = threading.Condition()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        with self.lock:
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
            self.lock.notify_all()
            assert self.lock.wait_for(lambda: self.most_at_once >= self.least_at_once, LIMIT_SECONDS)
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.asked.append(body)
            self.keys.append(handler.headers["Authorization"])
            reply = self.replies.pop(0) if self.replies else '{"score": 5}'
            self.num_at_once -= 1
        status = reply if isinstance(reply, int) else 200
        message = {"role": "assistant", "content": reply if isinstance(reply, str) else "no"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        said = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(said)))
        handler.end_headers()
        handler.wfile.write(said.encode())


@contextmanager
def an_endpoint() -> Iterator[tuple[Endpoint, str]]:
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            endpoint.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Handler) as address:
        yield endpoint, f"{address}/v1"


def judging(base_url: str, **settings: Any) -> dict[str, Any]:
    return {"type": "judge", "base_url": base_url, "model": "m", "instruction": "Be strict.", **settings}


@pytest.fixture
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunekit.methods.rewards import judge

    monkeypatch.setattr(judge, "_WAITS_SECONDS", (0.0, 0.0, 0.0))


def test_a_judge_is_asked_about_each_answer_at_once_and_its_score_is_a_share() -> None:
    with an_endpoint() as (endpoint, url):
        endpoint.replies, endpoint.least_at_once = ['{"score": 10}'] * 4, 2
        answers = [[{"role": "assistant", "content": f"answer {number}"}] for number in range(8)]
        given = judged(judging(url, num_parallel=4), answers, CHATS[:8])
    assert sorted(given) == [0.5] * 4 + [1.0] * 4
    assert 2 <= endpoint.most_at_once <= 4
    texts = [body["messages"][1]["content"] for body in endpoint.asked]
    assert {json.loads(text)["answer"] for text in texts} == {f"answer {number}" for number in range(8)}
    assert all(
        body["model"] == "m" and body["messages"][0]["content"].startswith("Be strict.") for body in endpoint.asked
    )


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize(
    "reply", [500, 429, "yes", '{"score": 11}', '{"score": true}', '{"score": NaN}', '{"score": 1, "x": 2}']
)
def test_a_judge_is_asked_again_where_that_may_help(reply: Any) -> None:
    with an_endpoint() as (endpoint, url):
        endpoint.replies = [reply, '```json\n{"score": 2.5}\n```']
        assert judged(judging(url), ["b"]) == [0.25]
        assert len(endpoint.asked) == 2


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize(
    ("reply", "num_asked", "what"),
    [(500, 4, "responded with status 500"), (401, 1, "responded with status 401"), ("9 of 10", 4, "replied '9 of 10'")],
)
def test_a_judge_that_fails_is_named_with_endpoint_and_row(reply: Any, num_asked: int, what: str) -> None:
    with an_endpoint() as (endpoint, url):
        endpoint.replies = [reply] * num_asked
        with pytest.raises(RunError) as error:
            judged(judging(url), ["b"], ["the prompt"])
        assert len(endpoint.asked) == num_asked
    assert f"judge: m at {url} {what}" in str(error.value)
    assert "for prompt 'the prompt', completion 'b'" in str(error.value)


@pytest.mark.usefixtures("_no_waits")
def test_a_judge_that_is_not_there_is_named() -> None:
    with pytest.raises(RunError, match=r"judge: m at http://127.0.0.1:9/v1 did not respond"):
        judged(judging("http://127.0.0.1:9/v1"), ["b"])


def test_the_key_comes_from_the_environment_and_no_other_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_hub")
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with an_endpoint() as (endpoint, url):
        judged(judging(url, api_key_env="JUDGE_KEY"), ["b"])
        judged(judging(url), ["b"])
    assert endpoint.keys[0] == "Bearer s3cret"
    assert "hf_of_the_hub" not in str(endpoint.keys[1])
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(RecipeError, match="the environment variable JUDGE_KEY is not set; export JUDGE_KEY"):
        judged(judging("http://x", api_key_env="JUDGE_KEY"), ["b"])


# What is refused, and names


def rows(*given: Row) -> Rows:
    return Rows("prompts", RowStore(given), "math.jsonl", range(1, len(given) + 1))


@pytest.mark.parametrize(
    ("reward", "row", "problem"),
    [
        (
            "exact_match",
            {},
            r"exact_match reads the column 'answer', which the row lacks; the row has only a prompt",
        ),
        (
            "math",
            {"anwser": 1},
            "math reads the column 'answer', .*; set its column; available besides the prompt: anwser",
        ),
        ("exact_match", {"answer": None}, "cannot use the column 'answer': 'None' is not text"),
        ("exact_match", {"answer": " "}, "is empty"),
        ("numeric_match", {"answer": "seven"}, "'seven' does not end with a number"),
        ("numeric_match", {"answer": "3 is it, or so"}, "does not end with a number"),
        ("numeric_match", {"answer": True}, "is neither a number nor text that ends with one"),
        (
            {"type": "json_schema", "column": "s"},
            {"s": {"type": "objekt"}},
            "is not a JSON schema: 'objekt' is not valid",
        ),
        ({"type": "json_schema", "column": "s"}, {"s": "{"}, "is not JSON"),
        ("code", {"tests": []}, "is not a list of Python statements"),
        ("code", {"tests": ["assert ("]}, r"is not a list of Python statements: '\(' was never closed"),
    ],
)
def test_a_row_without_what_a_reward_reads_is_named_before_training(reward: Any, row: Row, problem: str) -> None:
    good = {"answer": "3", "s": {}, "tests": ["pass"]}
    with pytest.raises(DataError, match=rf"math.jsonl:2: method.rewards: .*{problem}"):
        check_rows(sections(reward), [rows({"prompt": "a", **good}, {"prompt": "b", **row})])


def test_rewards_that_read_no_column_look_at_no_row() -> None:
    check_rows(sections("repetition", "tests.rows:row_for"), [rows({"prompt": "a"})])


def test_rewards_have_names_of_their_own_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEKIT_TRUSTED_MODULES", "os, posixpath")
    named = sections("exact_match", "os.path:join", "math", "posixpath:join", "exact_match", "os.path:split")
    assert reward_names(named) == ["exact_match_1", "os.path:join", "math", "posixpath:join", "exact_match_2", "split"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "reward"),
    [("jsonschema", {"type": "json_schema", "column": "s"}), ("math_verify", "math"), ("pyseccomp", "code")],
)
def test_a_missing_package_is_told_before_training(package: str, reward: Any) -> None:
    method = {"type": "grpo", "rewards": [reward]}
    code = (
        "import sys, importlib.util\n"
        f"sys.modules[{package!r}] = None\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *a: None if name == {package!r} else found(name, *a)\n"
        "from tunekit.recipe.load import load_recipe\n"
        "from tunekit.methods.rewards.load import check_rows\n"
        f"recipe = load_recipe({{'model': 'pico', 'data': {{'train': 'x.jsonl'}}, 'method': {method!r}}})\n"
        "check_rows(recipe.method.rewards, [])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ})
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"tunekit.errors.{DependencyError.__name__}: method.rewards: "), done.stderr
    assert last.endswith("pip install 'tunekit[rewards]'")


def test_every_value_is_a_finite_number() -> None:
    texts = ["", "nan", "inf", "-inf", "1e999", "1/0", "\\boxed{}", "<answer></answer>", "∞", "\x00", "\ud800", "0/0%"]
    for reward in ("exact_match", "numeric_match", "repetition", {"type": "regex", "pattern": "x"}):
        values = judged(reward, texts, answer=["1"] * len(texts))
        assert all(value is not None and math.isfinite(value) for value in values)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([1.0, math.inf], r"returned inf for prompt 'b', completion '2'"),
        ([-math.inf, 1.0], r"returned -inf for prompt 'a', completion '1'"),
        ([1.0, math.nan], r"returned nan for prompt 'b'"),
        ([1.0, "much"], r"returned much for prompt 'b'"),
        ([1.0, 10**400], r"returned an integer of 1,329 bits for prompt 'b'"),
        ([1.0, [1.0]], r"returned a value of type list for prompt 'b'"),
        ([1.0], r"returned 1 values for 2 completions"),
        (1.0, r"returned a value of type float, not a list"),
    ],
)
def test_a_reward_that_returns_no_finite_number_for_each_answer_is_named(
    returned: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "own_reward", lambda **columns: returned)
    with pytest.raises(RunError, match=rf"method.rewards: {__name__}:own_reward {problem}"):
        judged(f"{__name__}:own_reward", ["1", "2"], ["a", "b"])
