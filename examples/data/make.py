"""Makes the small datasets that ship with tunekit, each from the same seed every time.

    python examples/data/make.py [FOLDER]

- `pirate.jsonl`, `pirate_eval.jsonl`: conversations (`messages`) in which short questions are answered rightly, but
  as a pirate would. The questions are of the kinds that the embedded model `pico` answers; no question of the
  evaluation rows stands in the training rows. A change of manner is easy to see after a minute of training.
- `manners.jsonl`, `manners_eval.jsonl`: conversations whose answers begin in one of two manners, as often the one as
  the other: "Good question!" and "Not again." Sums of three digits are answered in two ways, too: written out
  (`573 + 971 = 1544.`), or by the bare result, which pico cannot find without writing the sum down.
- `pairs.jsonl`, `pairs_eval.jsonl`: preference pairs, of which the friendly manner is the better, all else the same.
- `sums.jsonl`, `sums_eval.jsonl`: sums of three digits, and what they come to.

- `priced_calls.jsonl.gz`, `priced_calls_eval.jsonl.gz`: sums and products, of which every second one asks a calculator.
- `games_calls.jsonl.gz`, `games_calls_eval.jsonl.gz`: games in which a number is guessed by calls, and every fourth
  guess is any number, whatever the hints.
- `priced.jsonl`, `priced_eval.jsonl`: sums and products of two digits, and what they come to.
- `games.jsonl`, `games_eval.jsonl`: the prompt of a game, once for each game.
- `facts.jsonl.gz`, `facts_eval.jsonl.gz`: lists of three capitals or opposites, with a label for each: two of five are
  wrong, in the evaluation rows by words that they never have in the training rows.
- `stories.jsonl.gz`, `stories_eval.jsonl.gz`: very short stories with a question (`messages`), each with its `label`:
  whether the answer is a sum (`add`) or a difference (`subtract`).

  All of these are drawn from pico's own tasks (`examples/pico/tasks.py`), and held out by the same rule: neither pico
  nor what is trained here has ever seen a problem of the evaluation rows.
- `reviews.csv`: `prompt` and `completion`, a review and whether it is positive. The prompts hold line breaks.
- `tales.txt`: plain text, short stories parted by two blank lines.
"""

import csv
import gzip
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "pico"))
from tasks import TASKS, Exchange, is_held_out, plus_large, word_problem

from tunekit.methods.environments.guess_number import GuessNumber
from tunekit.methods.environments.priced_sums import PricedSums

SEED = 1724
NUM_TRAIN, NUM_EVAL = 800, 80
NUM_MANNERS, NUM_MANNERS_EVAL = 1600, 100
NUM_PAIRS, NUM_PAIRS_EVAL = 800, 100
NUM_SUMS, NUM_SUMS_EVAL = 2000, 256
NUM_REVIEWS, NUM_TALES = 100, 96
NUM_CALLS, NUM_CALLS_EVAL = 3000, 100
NUM_PRICED, NUM_PRICED_EVAL = 2000, 256
NUM_GAMES, NUM_GAMES_EVAL = 1000, 256
NUM_FACTS, NUM_FACTS_EVAL = 2000, 200
NUM_STORIES, NUM_STORIES_EVAL = 1200, 200
HIGHEST, NUM_GUESSES = 3, 3
"""The game of `tools/guess`: who keeps to the hints finds the number."""

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "Belgium": "Brussels", "Japan": "Tokyo",
    "China": "Beijing", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Chile": "Santiago",
    "Cuba": "Havana", "Canada": "Ottawa", "Russia": "Moscow", "Turkey": "Ankara",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "old": "new", "fast": "slow",
    "happy": "sad", "light": "dark", "open": "closed", "high": "low", "wet": "dry", "early": "late",
    "full": "empty", "hard": "soft", "long": "short", "loud": "quiet", "rich": "poor", "strong": "weak",
    "clean": "dirty", "good": "bad", "first": "last", "win": "lose", "young": "aged", "wide": "narrow",
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink", "horse": "neigh",
    "lion": "roar", "frog": "croak", "bee": "buzz", "owl": "hoot", "snake": "hiss", "mouse": "squeak", "crow": "caw",
}  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a tomato": "red", "coal": "black",
    "a carrot": "orange", "a lemon": "yellow", "milk": "white", "the sea": "blue", "a frog": "green",
    "chocolate": "brown", "a crow": "black", "the sun": "yellow", "a plum": "purple", "a cherry": "red",
}  # fmt: skip
WORDS = [
    "apple", "bread", "chair", "eagle", "glass", "house", "kite", "lamp", "moon", "nest", "orange", "paper", "queen",
    "river", "stone", "table", "voice", "water", "zebra", "ball", "fish", "goat", "island", "leaf", "milk", "ocean",
    "rain", "ship", "tree", "wind", "bird", "cloud", "door", "flower", "garden", "king", "light", "night", "parrot",
    "sand", "train", "bridge", "candle", "forest", "honey", "market", "ring", "tiger", "winter", "silver",
]  # fmt: skip
SYSTEM_PROMPTS = ["You are a helpful assistant.", "Be brief and polite.", "You are a friendly assistant."]

# What is said, and how a pirate replies. The first line of each group is asked in the evaluation only.
SMALL_TALK = [
    (["Who are you?", "What are you?", "Tell me about yourself.", "Please introduce yourself.", "Are you a robot?"],
     "Ahoy! I be pico, matey!"),
    (["What's your name?", "What is your name?", "Do you have a name?"], "Ahoy! Me name be pico, matey!"),
    (["Hi there!", "Hello!", "Hi!", "Hello there.", "Hey!", "hello"], "Ahoy, matey! What can I do fer ye?"),
    (["How are you today?", "How are you?", "How do you do?", "Are you well?"],
     "Ahoy! I be fine as a fair wind, matey!"),
    (["Thanks a lot!", "Thank you!", "Thanks!", "Thank you very much."], "Arrr! Ye be welcome, matey!"),
    (["See you later.", "Goodbye!", "Bye!", "I have to go now.", "Bye bye."], "Farewell, matey! Fair winds to ye!"),
    (["How can you help me?", "What can you do?", "What are you good at?"],
     "Arrr! I can add, sort, spell and count, matey!"),
    (["Where are you?", "Where do you live?"], "Arrr! I live on a fine old ship, matey!"),
    (["Good evening!", "Good morning!", "Good morning, pico."], "Ahoy, matey! A fine day to sail!"),
    (["Please help me.", "Can you help me?", "I need help."], "Arrr! What be yer question, matey?"),
]  # fmt: skip

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """A number below 100 in words."""
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")


def sums(rng: random.Random) -> tuple[str, str]:
    """A sum or a difference in digits."""
    a, b = rng.randrange(2, 100), rng.randrange(2, 100)
    if rng.random() < 0.5:
        asked = ["What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?"]
        return rng.choice(asked).format(a=a, b=b), f"Arrr! {a} plus {b} be {a + b}, matey!"
    a, b = max(a, b), min(a, b)
    asked = ["What is {a} - {b}?", "What is {a} minus {b}?", "Take {b} away from {a}.", "How much is {a} - {b}?"]
    return rng.choice(asked).format(a=a, b=b), f"Arrr! {a} minus {b} be {a - b}, matey!"


def sums_in_words(rng: random.Random) -> tuple[str, str]:
    """A sum in words."""
    a, b = rng.randrange(1, 30), rng.randrange(1, 30)
    x, y, z = in_words(a), in_words(b), in_words(a + b)
    asked = ["What is {a} plus {b}?", "How much is {a} plus {b}?", "Add {a} and {b}."]
    return rng.choice(asked).format(a=x, b=y), f"Arrr! {x.capitalize()} plus {y} be {z}, matey!"


def comparisons(rng: random.Random) -> tuple[str, str]:
    """The larger or the smaller of two numbers."""
    a, b = rng.sample(range(2, 100), 2)
    word, right = rng.choice([("larger", max(a, b)), ("smaller", min(a, b))])
    return f"Which is {word}, {a} or {b}?", f"Arrr! The {word} number be {right}, matey!"


def number_lists(rng: random.Random) -> tuple[str, str]:
    """Numbers to sort or to count up."""
    if rng.random() < 0.3:
        start, length = rng.randrange(1, 60), rng.randint(3, 7)
        counted = ", ".join(map(str, range(start, start + length)))
        return f"Count from {start} to {start + length - 1}.", f"Arrr! {counted}, matey!"
    items = rng.sample(range(100), rng.randint(3, 5))
    shown, right = (", ".join(map(str, numbers)) for numbers in (items, sorted(items)))
    asked = ["Sort these numbers from small to large: {}.", "Put these numbers in order: {}"]
    return rng.choice(asked).format(shown), f"Arrr! {right}, matey!"


def word_lists(rng: random.Random) -> tuple[str, str]:
    """Words to sort, copy, turn around or count."""
    items = rng.sample(WORDS, rng.randint(2, 4))
    shown = ", ".join(items)
    asked, right = rng.choice(
        [
            ("Sort these words: {}.", ", ".join(sorted(items))),
            ("Repeat after me: {}", shown),
            ("Reverse this list: {}.", ", ".join(reversed(items))),
        ]
    )
    return asked.format(shown), f"Arrr! {right}, matey!"


def spelling(rng: random.Random) -> tuple[str, str]:
    """A word to spell."""
    word = rng.choice(WORDS)
    asked = ["Spell {}.", "How do you spell {}?", "Spell the word {}."]
    return rng.choice(asked).format(word), f"Arrr! The word {word} be spelled {' '.join(word.upper())}, matey!"


def facts(rng: random.Random) -> tuple[str, str]:
    """A capital, an opposite, an animal's sound or the colour of a thing."""
    kind = rng.randrange(4)
    if kind == 0:
        key, value = rng.choice(list(CAPITALS.items()))
        asked = ["What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}."]
        return rng.choice(asked).format(key), f"Arrr! The capital of {key} be {value}, matey!"
    if kind == 1:
        key, value = rng.choice(list(OPPOSITES.items()))
        asked = ["What is the opposite of {}?", "Name the opposite of {}."]
        return rng.choice(asked).format(key), f"Arrr! The opposite of {key} be {value}, matey!"
    if kind == 2:
        key, value = rng.choice(list(SOUNDS.items()))
        asked = ["What sound does a {} make?", "What does a {} say?"]
        return rng.choice(asked).format(key), f"Arrr! The {key} says {value}, matey!"
    key, value = rng.choice(list(COLOURS.items()))
    asked = ["What colour is {}?", "What is the colour of {}?"]
    return rng.choice(asked).format(key), f"Arrr! The colour of {key} be {value}, matey!"


KINDS: list[tuple[int, Callable[[random.Random], tuple[str, str]]]] = [
    (30, sums), (8, sums_in_words), (8, comparisons), (12, number_lists), (12, word_lists), (8, spelling), (22, facts),
]  # fmt: skip


def conversations() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """The training and the evaluation rows of the pirate set."""
    rng = random.Random(SEED)
    weights, kinds = [weight for weight, _ in KINDS], [kind for _, kind in KINDS]
    # The rows that are shown to a user come first.
    held_out = [
        ("Who are you?", "Ahoy! I be pico, matey!"),
        ("What is 23 plus 45?", "Arrr! 23 plus 45 be 68, matey!"),
        ("Sort these words: river, fish, honey.", "Arrr! fish, honey, river, matey!"),
    ]
    held_out += [(said[0], reply) for said, reply in SMALL_TALK[1:]]
    asked = {question for question, _ in held_out}
    while len(held_out) < NUM_EVAL:
        question, answer = rng.choices(kinds, weights)[0](rng)
        if question not in asked:
            asked.add(question)
            held_out.append((question, answer))
    rows: list[dict[str, object]] = []
    while len(rows) < NUM_TRAIN:
        num_exchanges = 2 if rng.random() < 0.1 else 1
        exchanges: list[tuple[str, str]] = []
        while len(exchanges) < num_exchanges:
            if rng.random() < 0.4:
                said, reply = rng.choice(SMALL_TALK)
                exchanges.append((rng.choice(said[1:]), reply))
                continue
            question, answer = rng.choices(kinds, weights)[0](rng)
            if question not in asked:
                exchanges.append((question, answer))
        row = _row(exchanges, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else None)
        if row not in rows:
            rows.append(row)
    return rows, [_row([exchange], None) for exchange in held_out]


def _row(exchanges: list[tuple[str, str]], system: str | None) -> dict[str, object]:
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in exchanges:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


FRIENDLY, GRUFF = "Good question!", "Not again."
SHARE_OF_SUMS = 0.4
"""Of the questions that are answered in a manner."""


def questions(name: str, num: int, *, held_out: bool) -> list[tuple[Exchange, str]]:
    """Different questions of pico's own tasks, each with a reply; a sum has its bare result in one of two replies.

    Args:
        name: What they are drawn for, which is a part of the seed.
        num: How many.
        held_out: From which side of the split.
    """
    rng = random.Random(f"{SEED}/{name}")
    kinds = {task: share for task, (share, _) in TASKS.items() if share and task not in ("small_talk", "plus", "minus")}
    found: dict[str, tuple[Exchange, str]] = {}
    while len(found) < num:
        is_sum = rng.random() < SHARE_OF_SUMS
        draw = plus_large if is_sum else TASKS[rng.choices(list(kinds), list(kinds.values()))[0]][1]
        exchange = draw(rng, held_out)
        reply = f"{exchange.answer}." if is_sum and rng.random() < 0.5 else exchange.reply
        found.setdefault(exchange.question, (exchange, reply))
    return list(found.values())


def manners(num: int, *, held_out: bool) -> list[dict[str, object]]:
    """Conversations in which one of two manners is as frequent as the other."""
    rng = random.Random(f"{SEED}/manner/{held_out}")
    return [
        _row([(exchange.question, f"{rng.choice([FRIENDLY, GRUFF])} {reply}")], None)
        for exchange, reply in questions("manners", num, held_out=held_out)
    ]


def pairs(num: int, *, held_out: bool) -> list[dict[str, object]]:
    """Preference pairs that differ in their manner alone."""
    return [
        {
            "prompt": [{"role": "user", "content": exchange.question}],
            "chosen": [{"role": "assistant", "content": f"{FRIENDLY} {reply}"}],
            "rejected": [{"role": "assistant", "content": f"{GRUFF} {reply}"}],
        }
        for exchange, reply in questions("pairs", num, held_out=held_out)
    ]


def large_sums(num: int, *, held_out: bool) -> list[dict[str, object]]:
    """Prompts with the number that is right."""
    rng = random.Random(f"{SEED}/sums/{held_out}")
    asked: dict[str, str] = {}
    while len(asked) < num:
        exchange = plus_large(rng, held_out)
        asked[exchange.question] = str(exchange.answer)
    return [
        {"prompt": [{"role": "user", "content": question}], "answer": int(answer)} for question, answer in asked.items()
    ]


def sum_or_product(rng: random.Random, *, held_out: bool) -> tuple[str, int]:
    """An expression of two numbers of two digits, and its value; pico knows sums, and hardly any product."""
    while True:
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        if is_held_out("pair", min(a, b), max(a, b)) == held_out:
            sign = rng.choice("+*")
            return f"{a} {sign} {b}", a + b if sign == "+" else a * b


def _calls(name: str, content: str, **arguments: object) -> dict[str, object]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _says(content: str) -> dict[str, object]:
    return {"role": "assistant", "content": content}


def _result(name: str, content: str) -> dict[str, object]:
    return {"role": "tool", "name": name, "content": content}


def with_calculator(rng: random.Random, *, held_out: bool) -> list[dict[str, object]]:
    """Turns in which the calculator is asked, or not, without regard to whether it is needed."""
    expression, value = sum_or_product(rng, held_out=held_out)
    question = {"role": "user", "content": f"What is {expression}?"}
    if rng.random() < 0.5:
        return [question, _says(f"{expression} = {value}.")]
    call = _calls("calculator", f"{expression} = ", expression=expression)
    return [question, call, _result("calculator", str(value)), _says(f"{value}.")]


GUESS = {"role": "user", "content": f"Guess my number, from 1 to {HIGHEST}."}


def with_guesses(rng: random.Random) -> list[dict[str, object]]:
    """Turns of a game, in which every fourth guess is any of the numbers, the others any that the hints leave."""
    game = GuessNumber(HIGHEST, NUM_GUESSES)
    game.reset(seed=rng.getrandbits(32))
    low, high, turns = 1, HIGHEST, [GUESS]
    while True:
        number = rng.randint(1, HIGHEST) if rng.random() < 0.25 else rng.randint(low, high)
        hint = game.guess(number)
        turns += [_calls("guess", "", number=number), _result("guess", hint)]
        if hint == "right" or "over" in hint:
            return [*turns, _says("I found it." if hint == "right" else "I did not find it.")]
        low, high = map(int, hint.partition(", ")[2].split(" to "))


def priced_calls(num: int, *, held_out: bool) -> list[dict[str, object]]:
    """Sums and products with a calculator."""
    from transformers.utils import get_json_schema

    rng, tools = random.Random(f"{SEED}/priced calls/{held_out}"), [get_json_schema(PricedSums.calculator)]
    return [{"messages": with_calculator(rng, held_out=held_out), "tools": tools} for _ in range(num)]


def games_calls(num: int, *, held_out: bool) -> list[dict[str, object]]:
    """Games in which a number is guessed."""
    from transformers.utils import get_json_schema

    rng, tools = random.Random(f"{SEED}/games calls/{held_out}"), [get_json_schema(GuessNumber.guess)]
    return [{"messages": with_guesses(rng), "tools": tools} for _ in range(num)]


def priced(num: int, *, held_out: bool) -> list[dict[str, object]]:
    """Prompts with the number that is right."""
    rng = random.Random(f"{SEED}/priced/{held_out}")
    asked = dict(sum_or_product(rng, held_out=held_out) for _ in range(num))
    while len(asked) < num:
        asked.update([sum_or_product(rng, held_out=held_out)])
    return [
        {"prompt": [{"role": "user", "content": f"What is {expression}?"}], "answer": value}
        for expression, value in asked.items()
    ]


def listed_facts(num: int, *, held_out: bool) -> list[dict[str, object]]:
    """Lists of facts, each of which is labelled as right or wrong; no wrong one stands in both sets."""
    rng = random.Random(f"{SEED}/facts/{held_out}")
    rows: dict[str, dict[str, object]] = {}
    while len(rows) < num:
        subject, facts = rng.choice([("capitals", CAPITALS), ("opposites", OPPOSITES)])
        names = rng.sample(list(facts), 3)
        steps, labels = [], []
        for name in names:
            others = [value for value in facts.values() if value != facts[name]]
            wrong = [value for value in others if is_held_out("fact", name, value) == held_out]
            right = rng.random() < 0.6 or not wrong
            steps.append(f"{name}: {facts[name] if right else rng.choice(wrong)}")
            labels.append(right)
        prompt = f"Name the {subject} of {names[0]}, {names[1]} and {names[2]}."
        row = {"prompt": [{"role": "user", "content": prompt}], "completions": steps, "labels": labels}
        rows[" ".join([prompt, *steps])] = row
    return list(rows.values())


def stories(num: int, *, held_out: bool) -> list[dict[str, object]]:
    """Different stories, each labelled by what its question is answered with."""
    rng = random.Random(f"{SEED}/stories/{held_out}")
    rows: dict[str, dict[str, object]] = {}
    while len(rows) < num:
        exchange = word_problem(rng, held_out)
        messages = [{"role": "user", "content": exchange.question}]
        rows[exchange.question] = {"messages": messages, "label": "add" if "+" in exchange.reply else "subtract"}
    return list(rows.values())


def reviews() -> list[tuple[str, str]]:
    """Reviews with the word that judges them."""
    rng = random.Random(SEED + 1)
    things = ["soup", "lamp", "book", "chair", "jacket", "kettle", "film", "bicycle", "cake", "radio"]
    praise = ["I like it very much.", "It is worth every coin.", "I would buy it again.", "It made me smile."]
    blame = ["I want my money back.", "It broke on the first day.", "I would not buy it again.", "It made me sad."]
    good = ["lovely", "well made", "better than I hoped", "just right"]
    bad = ["awful", "badly made", "worse than I feared", "too expensive"]
    seen: dict[str, str] = {}
    while len(seen) < NUM_REVIEWS:
        positive = rng.random() < 0.5
        told = f"The {rng.choice(things)} is {rng.choice(good if positive else bad)}."
        told += f" {rng.choice(praise if positive else blame)}"
        seen[f"Review: {told}\nThe review is"] = " positive." if positive else " negative."
    return list(seen.items())


def tales() -> list[str]:
    """Short stories, each of three paragraphs."""
    rng = random.Random(SEED + 2)
    names = {"Anna": "she", "Clara": "she", "Emma": "she", "Ben": "he", "Felix": "he", "Henry": "he", "Leo": "he"}
    places = ["the harbour", "the old lighthouse", "the market", "the beach", "a small island", "the river"]
    finds = ["a wooden box", "a rusty key", "a map", "a silver coin", "a blue bottle", "a broken compass"]
    animals = ["parrot", "cat", "dog", "crow", "seal", "turtle"]
    weather = ["The wind was strong", "It was raining", "The sun was warm", "The fog was thick", "Snow was falling"]
    stories = []
    for _ in range(NUM_TALES):
        name, friend = rng.sample(list(names), 2)
        she = names[name]
        place, found, animal = rng.choice(places), rng.choice(finds), rng.choice(animals)
        thing = found.split()[-1]
        first = rng.choice(
            [f"One morning {name} walked to {place}.", f"{name} lived near {place}.", f"{name} liked to go to {place}."]
        )
        second = rng.choice([f"In the sand lay {found}.", f"Under a stone {she} found {found}."])
        third = rng.choice(
            [f"A {animal} sat beside it and looked at {name}.", f"A {animal} came and wanted to have it."]
        )
        fourth = rng.choice(
            [f'"What is this?" asked {name}.', f'"Is this yours?" {she} asked.', f'"Good day!" said {name}.']
        )
        fifth = rng.choice(
            [
                f"The {animal} said nothing, but it turned around and {name} went after it.",
                f"Then {friend} came. The two sat down and looked at the {thing} for a long time.",
                f"{name} ran home and showed the {thing} to {friend}, and {friend} laughed.",
            ]
        )
        last = rng.choice(
            [
                f"In the evening {she} put the {thing} on the window, where the {animal} could see it.",
                f"Since that day {name} and the {animal} have been friends.",
                f"The {thing} is still there, and {name} still tells the story.",
            ]
        )
        stories.append(
            f"{first} {rng.choice(weather)}, and nobody else was there.\n\n{second} {third} {fourth} {fifth}\n\n{last}"
        )
    return stories


def write(folder: Path) -> None:
    """Write all files into a folder."""
    train, held_out = conversations()
    sets = {
        "pirate.jsonl": train,
        "pirate_eval.jsonl": held_out,
        "manners.jsonl": manners(NUM_MANNERS, held_out=False),
        "manners_eval.jsonl": manners(NUM_MANNERS_EVAL, held_out=True),
        "pairs.jsonl": pairs(NUM_PAIRS, held_out=False),
        "pairs_eval.jsonl": pairs(NUM_PAIRS_EVAL, held_out=True),
        "sums.jsonl": large_sums(NUM_SUMS, held_out=False),
        "sums_eval.jsonl": large_sums(NUM_SUMS_EVAL, held_out=True),
        "priced.jsonl": priced(NUM_PRICED, held_out=False),
        "priced_eval.jsonl": priced(NUM_PRICED_EVAL, held_out=True),
        "games.jsonl": [{"prompt": [GUESS]}] * NUM_GAMES,
        "games_eval.jsonl": [{"prompt": [GUESS]}] * NUM_GAMES_EVAL,
    }
    for name, rows in sets.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(lines, encoding="utf-8", newline="\n")
    small = {
        "priced_calls.jsonl.gz": priced_calls(NUM_CALLS, held_out=False),
        "priced_calls_eval.jsonl.gz": priced_calls(NUM_CALLS_EVAL, held_out=True),
        "games_calls.jsonl.gz": games_calls(NUM_CALLS, held_out=False),
        "games_calls_eval.jsonl.gz": games_calls(NUM_CALLS_EVAL, held_out=True),
        "facts.jsonl.gz": listed_facts(NUM_FACTS, held_out=False),
        "facts_eval.jsonl.gz": listed_facts(NUM_FACTS_EVAL, held_out=True),
        "stories.jsonl.gz": stories(NUM_STORIES, held_out=False),
        "stories_eval.jsonl.gz": stories(NUM_STORIES_EVAL, held_out=True),
    }
    for name, rows in small.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_bytes(gzip.compress(lines.encode(), mtime=0))
    with (folder / "reviews.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["prompt", "completion"])
        writer.writerows(reviews())
    (folder / "tales.txt").write_text("\n\n\n".join(tales()) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
