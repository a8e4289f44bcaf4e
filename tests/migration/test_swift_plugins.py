"""Reward classes of ms-swift's plugins: copied to functions that are called as TRL calls them."""

import json
import re
import sys
from pathlib import Path

import pytest

import tunekit
from tests.commands import run_command
from tests.tiny import save_tiny_model
from tunekit.migration.migration import migrate
from tunekit.recipe.functions import find_function

PLUGIN = '''
from __future__ import annotations

import math
import re as regex
from typing import List

from swift.plugin import ORM, orms, rm_plugins
from swift.utils import get_logger

try:
    import rapidjson as fast_json
except ImportError:
    fast_json = None

logger = get_logger()
SCALE, UNUSED = 2.0, math.inf
PATTERN = regex.compile(r"\\d+")


def twice(value: float) -> float:
    return SCALE * value


class Counts(ORM):
    def __init__(self, args=None, **kwargs):
        super().__init__(args, **kwargs)
        self.pattern = PATTERN


class Digits(Counts):
    """Counts digits."""

    def __call__(self, completions, solution, **kwargs) -> List[float]:
        return [twice(len(self.pattern.findall(one)) - len(gold)) for one, gold in zip(completions, solution)]


class Hinted(ORM):
    def __call__(self, completions, **kwargs):
        return [float(hint in one and fast_json is None) for one, hint in zip(completions, kwargs.get("hint"))]


class Logged(ORM):
    def __call__(self, completions, **kwargs):
        logger.info("called")
        return [0.0] * len(completions)


orms["digits"] = Digits
orms["hinted"] = Hinted
orms["logged"] = Logged
rm_plugins["other"] = Logged
'''
COMMAND = (
    "swift rlhf --rlhf_type grpo --model m --dataset rows.jsonl --external_plugins plugin.py --reward_funcs {} "
    "--num_generations 2 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --max_length 64 {}\n"
)


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plugin.py").write_text(PLUGIN)
    yield
    for name in [name for name in sys.modules if name.endswith("_sh_rewards")]:
        del sys.modules[name]


def made(rewards="digits", more=""):
    Path("run.sh").write_text(COMMAND.format(rewards, more))
    return migrate("run.sh")


def words(report, key):
    (line,) = (line for line in report.lines if line.key == key)
    return line.kind, line.words


def write(report):
    for name, text in report.files.items():
        Path(name).write_text(text)


def test_a_class_becomes_a_function_with_all_that_it_needs_of_its_file():
    report = made("digits hinted", "--reward_weights 1 0.5")
    assert report.is_whole and report.recipe.method.type == "grpo"
    assert [(one.path, one.weight) for one in report.recipe.method.rewards] == [
        ("run_sh_rewards:digits", 1.0),
        ("run_sh_rewards:hinted", 0.5),
    ]
    assert words(report, "external_plugins") == ("carried", "method.rewards")
    (text,) = report.files.values()
    assert "get_logger" not in text and "class Logged" not in text and "import swift" not in text
    write(report)
    digits, hinted = (find_function(one.path) for one in report.recipe.method.rewards)
    chats = [[{"role": "assistant", "content": "1 and 23"}], [{"role": "assistant", "content": "none"}]]
    others = {"prompts": ["a", "b"], "completion_ids": [[1], [2]], "trainer_state": None}
    # Chats and texts alike: two numbers less one letter, twice, and none less two.
    for answers in (chats, ["1 and 23", "none"]):
        assert digits(completions=answers, solution=["x", "yz"], **others) == [2.0, -4.0]
        assert hinted(completions=answers, hint=["and", "and"], **others) == [1.0, 0.0]


def test_rewards_read_the_columns_of_the_rows_by_their_names_in_the_file():
    report = made("digits accuracy", """--columns '{"answer": "solution", "question": "query"}'""")
    # `query` is a column of ms-swift's that tunekit has no counterpart of.
    assert words(report, "columns")[0] == "unsupported" and "solution" not in words(report, "columns")[1]
    report = made("digits accuracy", """--columns '{"answer": "solution"}'""")
    assert report.is_whole
    write(report)
    digits, accuracy = report.recipe.method.rewards
    assert accuracy.column == "answer"
    assert find_function(digits.path)(completions=["1"], answer=["abc"], prompts=["p"]) == [-4.0]


def test_columns_that_are_read_by_key_are_renamed_too():
    report = made("hinted", """--columns '{"clue": "hint"}'""")
    assert report.is_whole
    write(report)
    (hinted,) = report.recipe.method.rewards
    assert find_function(hinted.path)(completions=["ab", "c"], clue=["a", "a"], prompts=["p", "q"]) == [1.0, 0.0]
    assert "is no name of a parameter" in words(made("hinted", """--columns '{"a b": "hint"}'"""), "reward_funcs")[1]


def test_columns_of_a_file_in_yaml_are_renamed_too():
    Path("run.yaml").write_text(
        "rlhf_type: grpo\nmodel: m\ndataset: [rows.jsonl]\nexternal_plugins: [plugin.py]\nreward_funcs: [digits]\n"
        "columns:\n  answer: solution\nnum_generations: 2\nper_device_train_batch_size: 2\nmax_length: 64\n"
    )
    report = migrate("run.yaml", tool="ms-swift")
    assert words(report, "columns.answer")[0] == "carried"
    assert "def digits(completions, answer, **columns):" in report.files["run_yaml_rewards.py"]


def test_a_column_with_a_default_may_be_missing():
    Path("plugin.py").write_text(
        "from swift.plugin import ORM, orms\n\nclass A(ORM):\n"
        "    def __call__(self, completions, gold=None, *, scale=3, **kwargs):\n"
        "        return [0 if gold is None else scale] * len(completions)\n\norms['digits'] = A\n"
    )
    report = made()
    write(report)
    digits = find_function(report.recipe.method.rewards[0].path)
    assert digits(completions=["a"]) == [0] and digits(completions=["a"], gold=["b"]) == [3]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("class A(ORM):\n    def __call__(self, completions, messages, **kwargs): ...", "reads messages"),
        ("class A(ORM):\n    def __call__(self, completions, **kw): return kw['request_id']", "reads request_id"),
        ("class A(ORM):\n    def __call__(self, completions, **kw): return self.args.beta", "self.args, line 4"),
        (
            "class A(ORM):\n    def __init__(self, args): self.beta = args.beta\n    def __call__(self, c): ...",
            "line 4",
        ),
        ("class A(ORM):\n    def __init__(self, n): super().__init__(n)\n    def __call__(self, c): ...", "arguments"),
        ("class A(AsyncORM):\n    async def __call__(self, completions, **kwargs): ...", "needs AsyncORM of ms-swift"),
        ("class A(ORM):\n    async def __call__(self, completions, **kwargs): ...", "asynchronous"),
        ("class A(ORM): ...", "no __call__"),
        ("from .near import B\nclass A(B): ...", "a file next to near/plugin.py (line 3)"),
        ("import helper\nclass A(ORM):\n    def __call__(self, c, **k): helper.x()", "helper of a file next to"),
        ("import swift.utils\nclass A(ORM):\n    def __call__(self, c, **k): swift.utils.x()", "plugin.py:3"),
        ("class A(ORM):\n    def __call__(self, c, **k): return nowhere(c)", "does not define nowhere"),
        ("A = print", "not a class"),
    ],
)
def test_a_class_that_needs_ms_swift_is_refused_with_the_place(code, why):
    head = "from swift.plugin import ORM, AsyncORM, orms\n\n"
    Path("near").mkdir()
    Path("near/helper.py").touch()
    Path("near/plugin.py").write_text(f"{head}{code}\norms['digits'] = A\n")
    report = made("digits format", "--external_plugins near/plugin.py")
    kind, said = words(report, "reward_funcs")
    assert kind == "unsupported" and why in said and said.startswith("digits: ")
    # The other one is carried over.
    assert [one.type for one in report.recipe.method.rewards] == ["regex"] and not report.files


def test_a_plugin_that_cannot_be_read_or_does_more_is_named():
    assert "a reward" not in words(made("format"), "external_plugins")[1]
    assert words(made("format"), "external_plugins")[0] == "silent"
    Path("plugin.py").write_text(PLUGIN + "\nprint('patched')\n")
    assert "registers none of reward_funcs" in words(made("format"), "external_plugins")[1]
    Path("plugin.py").write_text("class :\n")
    assert "is not Python" in words(made(), "external_plugins")[1]
    Path("plugin.py").unlink()
    assert "no file 'plugin.py'" in words(made(), "external_plugins")[1]


def test_rewards_that_ms_swift_brings_have_its_settings():
    report = made("soft_overlong repetition react_format", "--soft_cache_length 64 --repetition_n_grams 4 --delta 1.5")
    assert report.is_whole
    long, again, reacts = report.recipe.method.rewards
    # 512 tokens are ms-swift's default length of an answer.
    assert (long.max_tokens, long.free_tokens, again.ngram_size, reacts.type) == (512, 448, 4, "regex")
    assert report.recipe.method.trainer_args["delta"] == 1.5
    assert words(made("format", "--soft_cache_length 64"), "soft_cache_length")[0] == "silent"
    assert words(made("soft_overlong"), "reward_funcs")[0] == "unsupported"


def test_the_functions_reward_what_a_model_generates():
    """Answers of a tiny model, in chats, by the numbers that the class would give them."""
    save_tiny_model(Path("model"))
    rows = [{"prompt": [{"role": "user", "content": f"double {n}"}], "answer": str(n)} for n in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = """--model model --max_completion_length 8 --tuner_type full --columns '{"answer": "solution"}'"""
    Path("run.sh").write_text(COMMAND.format("digits", more))
    written = run_command("migrate", "run.sh", "-o", "mine.yaml")
    assert written.returncode == 0 and "run_sh_rewards.py: written" in written.stdout
    trial = tunekit.try_rewards("mine.yaml", num_prompts=4)
    answers = [answer for group in trial.groups for answer in group.answers]
    expected = [2.0 * (len(re.findall(r"\d+", answer.text)) - 1) for answer in answers]
    assert [answer.values for answer in answers] == [(value,) for value in expected]
    assert len(set(expected)) > 1


def test_files_are_written_next_to_the_recipe_or_nothing_is():
    Path("run.sh").write_text(COMMAND.format("digits", ""))
    Path("new_sh_rewards.py").write_text("mine = 1\n")
    Path("run.sh").rename("new.sh")
    refused = run_command("migrate", "new.sh", "-o", "mine.yaml")
    assert refused.returncode != 0 and "'new_sh_rewards.py' already exists" in refused.stderr
    assert not Path("mine.yaml").exists() and Path("new_sh_rewards.py").read_text() == "mine = 1\n"
    assert run_command("migrate", ".", "-o", "out").returncode == 0
    assert (Path("out") / "new_sh_rewards.py").is_file()
    printed = json.loads(run_command("migrate", "new.sh", "--json").stdout)
    assert "def digits(" in printed["files"]["new_sh_rewards.py"]
