"""Tools and environments that come with tunekit."""

import random

import pytest

from tunekit.methods.environments.adventure import Adventure
from tunekit.methods.environments.guess_number import GuessNumber
from tunekit.methods.environments.priced_sums import PricedSums
from tunekit.methods.environments.tools import Python, Search, calculator
from tunekit.methods.rewards.answers import text_of


def test_the_calculator_is_pythons_arithmetic():
    rng = random.Random(0)

    def expression(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.choice([rng.randint(0, 99), rng.randint(1, 999) / 10]))
        operator = rng.choice(["+", "-", "*", "/", "//", "%"])
        return f"{rng.choice(['', '-'])}({expression(depth - 1)} {operator} {expression(depth - 1)})"

    num_values = 0
    for _ in range(300):
        text = expression(4)
        try:
            expected = eval(text)  # noqa: S307  (made above)
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                calculator(text)
            continue
        num_values += 1
        assert calculator(text) == (f"{expected:.10g}" if isinstance(expected, float) else str(expected))
    assert num_values > 150


@pytest.mark.parametrize(
    "expression",
    ["9**9**9", "2 ** 100000", "__import__('os')", "(1).real", "[1] * 9", "1 if 1 else 2", "x + 1", "1 +", "",
     "'a' * 3", "1" * 300, "(-8) ** 0.5", "True + 1", "1e400 ** 9e9"],
)  # fmt: skip
def test_the_calculator_refuses_what_is_no_arithmetic(expression):
    with pytest.raises((ValueError, OverflowError)):
        calculator(expression)


def test_python_returns_what_a_program_prints():
    run = Python(memory_mib=512, timeout_seconds=20.0)
    assert run("print(sum(range(10)))") == "45"
    assert run("print('half'); 1 / 0") == "half\nZeroDivisionError: division by zero"
    assert "PermissionError" in run("open('/etc/hostname')")
    assert "PermissionError" in run("import socket; socket.socket()")
    assert run("def broken(:").startswith("SyntaxError")
    assert run("print('x' * 10**6)").endswith("[more output was cut]")


def test_python_ends_a_program_in_time():
    run = Python(memory_mib=512, timeout_seconds=2.0)
    assert run("print('begun', flush=True)\nwhile True: pass") == "begun\nTimeoutError: ended after 2 s"


def test_the_search_finds_passages_by_rare_words(tmp_path):
    (tmp_path / "a.txt").write_text("The owl hunts at night.\n\nThe cat sleeps at night.\n")
    (tmp_path / "b.md").write_text("The sun shines by day.")
    (tmp_path / "c.bin").write_text("owl owl owl")
    search = Search(str(tmp_path), num_results=2)
    assert search("where is the OWL?").splitlines()[0] == "a.txt: The owl hunts at night."
    assert search("zebra") == "nothing found"
    with pytest.raises(ValueError, match=r"has no .txt or .md files"):
        Search(str(tmp_path / "none"), num_results=2)


def test_a_number_is_found_by_halving():
    for seed in range(40):
        game, low, high = GuessNumber(), 1, 15
        game.reset(seed=seed)
        answer = ""
        for _ in range(4):
            answer = game.guess((low + high) // 2)
            if answer == "right":
                break
            low, high = map(int, answer.partition(", ")[2].split(" to "))
        assert answer == "right"
        assert game.get_reward() >= 0.7 - 1e-9
        assert game.guess(1) == "the game is over"


def test_a_game_is_lost_after_the_last_guess():
    game = GuessNumber(highest=3, num_guesses=2)
    game.reset(seed=0)
    wrong = next(number for number in (1, 2, 3) if number != game._number)
    hint = game.guess(wrong)
    assert hint.startswith("higher, " if wrong < game._number else "lower, ")
    assert game.guess(wrong) == "wrong, the game is over"
    # The second guess was ruled out by the first.
    assert game.guess(game._number) == "the game is over"
    assert game.get_reward() == pytest.approx(-0.5)


def test_a_guess_that_the_hints_rule_out_costs_more():
    game = GuessNumber(highest=3, num_guesses=3)
    rewards = {}
    for guesses in ((2, 1), (1, 3, 2), (3, 2, 1), (1, 1, 1)):
        game.reset(seed=0)
        game._number = guesses[-1] if guesses != (1, 1, 1) else 3
        hints = [game.guess(number) for number in guesses]
        assert (hints[-1] == "right") == (guesses != (1, 1, 1))
        rewards[guesses] = round(game.get_reward(), 6)
    assert rewards == {(2, 1): 0.9, (1, 3, 2): 0.8, (3, 2, 1): 0.8, (1, 1, 1): -0.9}


def test_a_hint_contains_the_range_that_is_left_also_after_a_guess_outside_of_it():
    game = GuessNumber(highest=15, num_guesses=6)
    game.reset(seed=next(seed for seed in range(99) if random.Random(seed).randint(1, 15) == 6))
    assert [game.guess(number) for number in (8, 3, 2, 12, 6)] == [
        "lower, 1 to 7",
        "higher, 4 to 7",
        "higher, 4 to 7",
        "lower, 4 to 7",
        "right",
    ]


def test_each_use_of_the_calculator_is_paid():
    sums = PricedSums(price=0.25)
    sums.reset()
    assert (sums.calculator("1 + 2"), sums.calculator("3"), sums.get_reward()) == ("3", "3", -0.5)
    sums.reset()
    assert sums.get_reward() == 0


def test_each_adventure_can_be_left_by_what_it_says():
    for seed in range(30):
        house = Adventure(num_rooms=5, num_moves=40)
        view, out, direction = house.reset(seed=seed), "", "right"
        for _ in range(40):
            if "a key" in view:
                house.take_key()
            if "a locked door" in view and (out := house.open_door()) == "You are out.":
                break
            if f"{direction}" not in view.partition("You can go")[2]:
                direction = "left" if direction == "right" else "right"
            view = house.go(direction)
        assert out == "You are out.", seed
        assert 0 < house.get_reward() < 1
        assert house.go("left") == "The adventure is over."


def test_what_a_tool_said_is_not_the_answer():
    asked = {"role": "assistant", "content": "", "tool_calls": []}
    tool = {"role": "tool", "name": "calculator", "content": "7"}
    assert text_of([asked, tool]) == ""
    assert text_of([asked, tool, {"role": "assistant", "content": "It is 7."}]) == "It is 7."
