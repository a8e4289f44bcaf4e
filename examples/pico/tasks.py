"""The questions that pico is taught to answer: sums, sorting, spelling, facts, small talk.

Each task is a function that draws one exchange, a question and its reply, from a random generator.

Training and evaluation are kept apart by construction and not by sampling: what a problem is made of (for a sum,
its two operands, in either order and for any operation) is hashed, and the hash alone says on which side it lies.
A task that is asked for one side draws again until it has a problem from that side. So no pair of operands that
`evaluate.py` asks about was ever added, subtracted or multiplied in training, in digits, words or stories.
What can only be learned by heart (facts, spelling) has no such split: there we ask for what was taught.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from facts import (
    ANIMAL_BABIES,
    ANIMAL_LEGS,
    ANIMAL_SOUNDS,
    CAPITALS,
    COLOURS,
    DAYS,
    KINDS,
    LOOSE_FACTS,
    MONTHS,
    NAMES,
    OBJECTS,
    OPPOSITES,
    PAST_TENSES,
    PLURALS,
    SHE,
    SMALL_TALK,
    THINGS,
    WORDS,
)

#: One problem in five is kept for the evaluation.
HELD_OUT_ONE_IN = 5


@dataclass(frozen=True)
class Exchange:
    """One question and its reply. A reply is right when it ends with `answer`; small talk has no right answer."""

    question: str
    reply: str
    answer: str | None = None


#: Draws one exchange from the held-out side (True) or from the training side (False).
Generator = Callable[[random.Random, bool], Exchange]


def is_held_out(*parts: object) -> bool:
    """Whether the problem made of these parts belongs to the evaluation; the same on every machine."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def capitalised(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[0].upper() + text[1:]


def article(noun: str) -> str:
    """The indefinite article of a noun."""
    return "an" if noun[0] in "aeiou" else "a"


# Numbers ----------------------------------------------------------------------------------------------------

_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """A number from 0 to 999 in English words, for example `forty-two`."""
    if number >= 100:
        hundreds = f"{_ONES[number // 100]} hundred"
        return f"{hundreds} and {in_words(number % 100)}" if number % 100 else hundreds
    if number < 20:
        return _ONES[number]
    return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")


def _operands(rng: random.Random, held_out: bool, limits: list[int], least: int = 0) -> tuple[int, int]:
    """Two numbers whose unordered pair lies on the side asked for, each below a limit drawn from `limits`."""
    while True:
        a, b = rng.randrange(least, rng.choice(limits)), rng.randrange(least, rng.choice(limits))
        if is_held_out("pair", min(a, b), max(a, b)) == held_out:
            return a, b


# The limits weigh the difficulties: most operands have two digits, some have one or three.
_DIGIT_LIMITS = [10, 100, 100, 100, 1000]
_WORD_LIMITS = [10, 20, 50]
_TIMES_LIMITS = [13]

_PLUS = [
    "What is {a} + {b}?", "{a} + {b} = ?", "{a} + {b}", "What is {a} plus {b}?", "Add {a} and {b}.",
    "Calculate {a} + {b}.", "How much is {a} + {b}?", "What is the sum of {a} and {b}?", "Compute {a} plus {b}.",
    "Work out {a} + {b}.", "What do you get when you add {a} and {b}?", "Solve {a} + {b}.",
]  # fmt: skip
_MINUS = [
    "What is {a} - {b}?", "{a} - {b} = ?", "{a} - {b}", "What is {a} minus {b}?", "Subtract {b} from {a}.",
    "Calculate {a} - {b}.", "How much is {a} - {b}?", "Take {b} away from {a}.", "Compute {a} minus {b}.",
    "Work out {a} - {b}.", "What is the difference of {a} and {b}?", "Solve {a} - {b}.",
]  # fmt: skip
_TIMES = [
    "What is {a} x {b}?", "{a} x {b} = ?", "What is {a} times {b}?", "Multiply {a} by {b}.", "Calculate {a} x {b}.",
    "How much is {a} times {b}?", "What is the product of {a} and {b}?", "Work out {a} x {b}.",
]  # fmt: skip


def plus(rng: random.Random, held_out: bool) -> Exchange:
    """A sum in digits."""
    a, b = _operands(rng, held_out, _DIGIT_LIMITS)
    return Exchange(rng.choice(_PLUS).format(a=a, b=b), f"{a} + {b} = {a + b}.", str(a + b))


def minus(rng: random.Random, held_out: bool) -> Exchange:
    """A difference in digits, never below zero."""
    b, a = sorted(_operands(rng, held_out, _DIGIT_LIMITS))
    return Exchange(rng.choice(_MINUS).format(a=a, b=b), f"{a} - {b} = {a - b}.", str(a - b))


def plus_large(rng: random.Random, held_out: bool) -> Exchange:
    """A sum of two numbers of three digits."""
    a, b = _operands(rng, held_out, [1000], least=100)
    return Exchange(rng.choice(_PLUS).format(a=a, b=b), f"{a} + {b} = {a + b}.", str(a + b))


def minus_large(rng: random.Random, held_out: bool) -> Exchange:
    """A difference of two numbers of three digits, never below zero."""
    b, a = sorted(_operands(rng, held_out, [1000], least=100))
    return Exchange(rng.choice(_MINUS).format(a=a, b=b), f"{a} - {b} = {a - b}.", str(a - b))


def times(rng: random.Random, held_out: bool) -> Exchange:
    """A product from the multiplication table up to 12 x 12."""
    a, b = _operands(rng, held_out, _TIMES_LIMITS)
    return Exchange(rng.choice(_TIMES).format(a=a, b=b), f"{a} x {b} = {a * b}.", str(a * b))


def plus_words(rng: random.Random, held_out: bool) -> Exchange:
    """A sum in words."""
    a, b = _operands(rng, held_out, _WORD_LIMITS)
    x, y, z = in_words(a), in_words(b), in_words(a + b)
    asked = ["What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?", "{a} plus {b}",
             "What is the sum of {a} and {b}?", "What do you get when you add {a} and {b}?"]  # fmt: skip
    return Exchange(capitalised(rng.choice(asked).format(a=x, b=y)), capitalised(f"{x} plus {y} is {z}."), z)


def minus_words(rng: random.Random, held_out: bool) -> Exchange:
    """A difference in words, never below zero."""
    b, a = sorted(_operands(rng, held_out, _WORD_LIMITS))
    x, y, z = in_words(a), in_words(b), in_words(a - b)
    asked = ["What is {a} minus {b}?", "Subtract {b} from {a}.", "How much is {a} minus {b}?", "{a} minus {b}",
             "Take {b} away from {a}."]  # fmt: skip
    return Exchange(capitalised(rng.choice(asked).format(a=x, b=y)), capitalised(f"{x} minus {y} is {z}."), z)


def word_problem(rng: random.Random, held_out: bool) -> Exchange:
    """A sum or a difference inside a very short story."""
    a, b = _operands(rng, held_out, [10, 20, 100])
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    she = "she" if name in SHE else "he"
    if rng.random() < 0.5:
        event = rng.choice([f"{other} gives {name} {b} more", f"{name} buys {b} more", f"{name} finds {b} more"])
        shown = f"{a} + {b} = {a + b}"
        left = a + b
        question = rng.choice([f"How many {thing} does {name} have now?", f"How many {thing} does {she} have?"])
    else:
        a, b = max(a, b), min(a, b)
        event = rng.choice([f"{name} gives {b} to {other}", f"{name} loses {b}", f"{name} sells {b}"])
        shown = f"{a} - {b} = {a - b}"
        left = a - b
        question = rng.choice([f"How many {thing} does {name} have left?", f"How many {thing} are left?"])
    return Exchange(f"{name} has {a} {thing}. {event}. {question}", f"{shown}. The answer is {left}.", str(left))


def compare(rng: random.Random, held_out: bool) -> Exchange:
    """Which of two numbers is larger or smaller."""
    a, b = _operands(rng, held_out, [20, 100, 1000])
    while a == b:
        a, b = _operands(rng, held_out, [20, 100, 1000])
    word, right = rng.choice([("larger", max(a, b)), ("smaller", min(a, b))])
    asked = rng.choice([f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?",
                        f"Is {a} or {b} the {word} number?"])  # fmt: skip
    return Exchange(asked, f"The {word} number is {right}.", str(right))


def number_words(rng: random.Random, held_out: bool) -> Exchange:
    """A number from digits to words, or back."""
    number = rng.randrange(rng.choice([100, 1000]))
    while is_held_out("number", number) != held_out:
        number = rng.randrange(rng.choice([100, 1000]))
    words = in_words(number)
    if rng.random() < 0.5:
        asked = rng.choice([f"Write {number} in words.", f"How do you write {number} in words?", f"{number} in words"])
        return Exchange(asked, f"{number} in words is {words}.", words)
    asked = rng.choice([f"Write {words} in digits.", f"Write {words} as a number.", f"What number is {words}?"])
    return Exchange(asked, f"The number is {number}.", str(number))


def odd_even(rng: random.Random, held_out: bool) -> Exchange:
    """Whether a number is odd or even."""
    number = rng.randrange(rng.choice([100, 1000]))
    while is_held_out("number", number) != held_out:
        number = rng.randrange(rng.choice([100, 1000]))
    kind = "odd" if number % 2 else "even"
    asked = rng.choice(
        [f"Is {number} odd or even?", f"Is {number} even or odd?", f"Is the number {number} odd or even?"]
    )
    return Exchange(asked, f"The number {number} is {kind}.", kind)


def next_number(rng: random.Random, held_out: bool) -> Exchange:
    """The number before or after another."""
    number = 1 + rng.randrange(rng.choice([100, 1000]))
    while is_held_out("number", number) != held_out:
        number = 1 + rng.randrange(rng.choice([100, 1000]))
    word, right = rng.choice([("after", number + 1), ("before", number - 1)])
    asked = rng.choice([f"What number comes {word} {number}?", f"Which number is {word} {number}?"])
    return Exchange(asked, f"The number {word} {number} is {right}.", str(right))


# Lists and words --------------------------------------------------------------------------------------------


def _several(rng: random.Random, held_out: bool, pool: list[str], least: int, most: int) -> list[str]:
    """Some different members of the pool whose sequence lies on the side asked for."""
    while True:
        chosen = rng.sample(pool, rng.randint(least, most))
        if is_held_out("list", *chosen) == held_out:
            return chosen


def sort_numbers(rng: random.Random, held_out: bool) -> Exchange:
    """Sort three to six numbers, up or down."""
    pool = list(map(str, range(rng.choice([10, 100]))))
    items = _several(rng, held_out, pool, 3, 6)
    falling = rng.random() < 0.3
    right = ", ".join(sorted(items, key=int, reverse=falling))
    order = "from large to small" if falling else rng.choice(["from small to large", "in order"])
    asked = rng.choice(["Sort these numbers {o}: {i}.", "Put these numbers {o}: {i}", "Write {i} {o}.",
                        "Sort {i} {o}."])  # fmt: skip
    return Exchange(asked.format(o=order, i=", ".join(items)), f"{right}.", right)


def sort_words(rng: random.Random, held_out: bool) -> Exchange:
    """Sort two to four words by the alphabet."""
    items = _several(rng, held_out, WORDS, 2, 4)
    right = ", ".join(sorted(items))
    asked = rng.choice(["Sort these words: {i}.", "Put these words in alphabetical order: {i}.",
                        "Sort the words {i} by the alphabet."])  # fmt: skip
    return Exchange(asked.format(i=", ".join(items)), f"{right}.", right)


def copy(rng: random.Random, held_out: bool) -> Exchange:
    """Say something again, as it is."""
    pool = rng.choice([WORDS, WORDS, list(map(str, range(100)))])
    right = rng.choice([" ", ", "]).join(_several(rng, held_out, pool, 2, 7))
    asked = rng.choice(["Repeat after me: {i}", "Copy this: {i}", "Say this again: {i}", "Repeat: {i}",
                        "Write this down: {i}"])  # fmt: skip
    return Exchange(asked.format(i=right), right, right)


def repeat(rng: random.Random, held_out: bool) -> Exchange:
    """Write one word several times."""
    while True:
        word, number = rng.choice(WORDS), rng.randint(2, 6)
        if is_held_out("repeat", word, number) == held_out:
            break
    right = " ".join([word] * number)
    shown = rng.choice([str(number), in_words(number)])
    asked = rng.choice(["Write the word {w} {n} times.", "Say {w} {n} times.", "Repeat the word {w} {n} times."])
    return Exchange(asked.format(w=word, n=shown), right, right)


def reverse(rng: random.Random, held_out: bool) -> Exchange:
    """Say a list backwards."""
    items = _several(rng, held_out, rng.choice([WORDS, list(map(str, range(100)))]), 2, 5)
    right = ", ".join(reversed(items))
    asked = rng.choice(["Reverse this list: {i}.", "Say this backwards: {i}.", "Turn this list around: {i}."])
    return Exchange(asked.format(i=", ".join(items)), f"{right}.", right)


def pick(rng: random.Random, held_out: bool) -> Exchange:
    """The first or the last of a list, or how many there are."""
    items = _several(rng, held_out, WORDS, 2, 7)
    shown = rng.choice([" ", ", "]).join(items)
    what = rng.choice(["first", "last", "count"])
    if what == "count":
        asked = rng.choice([f"How many words are in this list: {shown}?", f"Count these words: {shown}."])
        return Exchange(asked, f"The number of words is {len(items)}.", str(len(items)))
    right = items[0] if what == "first" else items[-1]
    asked = rng.choice([f"What is the {what} word of this list: {shown}?", f"Tell me the {what} word: {shown}."])
    return Exchange(asked, f"The {what} word is {right}.", right)


def count_up(rng: random.Random, held_out: bool) -> Exchange:
    """Count from one number to another, up or down."""
    while True:
        start, length = rng.randrange(rng.choice([10, 90])), rng.randint(3, 9)
        if is_held_out("count", start, length) == held_out:
            break
    numbers = list(range(start, start + length))
    if rng.random() < 0.25:
        numbers.reverse()
    right = ", ".join(map(str, numbers))
    asked = rng.choice(
        ["Count from {a} to {b}.", "Please count from {a} to {b}.", "Write the numbers from {a} to {b}."]
    )
    return Exchange(asked.format(a=numbers[0], b=numbers[-1]), f"{right}.", right)


def lookup(rng: random.Random, held_out: bool) -> Exchange:
    """Find in the question who has what."""
    people = _several(rng, held_out, NAMES, 2, 4)
    things = rng.sample(OBJECTS, len(people))
    told = " ".join(f"{person} has a {thing}." for person, thing in zip(people, things, strict=True))
    index = rng.randrange(len(people))
    if rng.random() < 0.5:
        return Exchange(f"{told} Who has the {things[index]}?", f"The {things[index]} belongs to {people[index]}.",
                        people[index])  # fmt: skip
    return Exchange(f"{told} What does {people[index]} have?", f"{people[index]} has a {things[index]}.", things[index])


def spell(rng: random.Random, _: bool) -> Exchange:
    """Spell a word, or count its letters. Learned by heart: the tokenizer hides the letters."""
    word = rng.choice(WORDS)
    if rng.random() < 0.3:
        asked = rng.choice([f"How many letters are in {word}?", f"How many letters does the word {word} have?"])
        return Exchange(asked, f"The word {word} has {len(word)} letters.", f"{len(word)} letters")
    right = " ".join(word.upper())
    asked = rng.choice([f"Spell {word}.", f"How do you spell {word}?", f"Spell the word {word}.",
                        f"How is {word} spelled?"])  # fmt: skip
    return Exchange(asked, f"The word {word} is spelled {right}.", right)


# Facts and small talk ---------------------------------------------------------------------------------------


#: Tables that all work alike: the entries, how one is asked for, how the sentence that tells it begins.
_TABLES: dict[int, tuple[dict[str, str], list[str], str]] = {
    0: (CAPITALS,
        ["What is the capital of {key}?", "Which city is the capital of {key}?", "Name the capital of {key}.",
         "What is {key}'s capital?", "capital of {key}"],
        "The capital of {key} is"),
    2: (ANIMAL_SOUNDS,
        ["What sound does a {key} make?", "What does a {key} say?", "Which sound does the {key} make?"],
        "The {key} says"),
    3: (ANIMAL_BABIES,
        ["What is a baby {key} called?", "What do you call a young {key}?"],
        "A baby {key} is called a"),
    5: (COLOURS,
        ["What colour is {key}?", "What is the colour of {key}?", "Which colour does {key} have?"],
        "The colour of {key} is"),
    6: (KINDS,
        ["What kind of thing is {key}?", "What is {key}: what kind of thing?", "What sort of thing is {key}?"],
        "The word {key} names {an}"),
    7: (PAST_TENSES,
        ["What is the past tense of {key}?", "Put {key} in the past tense.", "past tense of {key}"],
        "The past tense of {key} is"),
    8: (PLURALS,
        ["What is the plural of {key}?", "One {key}, two what?", "plural of {key}"],
        "The plural of {key} is"),
}  # fmt: skip


def _table_fact(rng: random.Random) -> tuple[list[str], str, str]:
    """Phrasings of a question from one of the tables, the start of the sentence that answers it, the answer."""
    table = rng.randrange(11)
    if table in _TABLES:
        entries, asked, start = _TABLES[table]
        key, value = rng.choice(list(entries.items()))
        return [phrase.format(key=key) for phrase in asked], start.format(key=key, an=article(value)), value
    if table == 1:
        pair = rng.choice(OPPOSITES)
        key, value = pair if rng.random() < 0.5 else pair[::-1]
        asked = ["What is the opposite of {key}?", "Name the opposite of {key}.", "opposite of {key}"]
        return [phrase.format(key=key) for phrase in asked], f"The opposite of {key} is", value
    if table == 4:
        key, value = rng.choice(list(ANIMAL_LEGS.items()))
        return [f"How many legs does a {key} have?", f"How many legs has a {key}?"], f"A {key} has", f"{value} legs"
    # What comes before or after in a row: days and months go round, letters do not.
    if table == 9:
        row, kind = rng.choice([(DAYS, "day"), (MONTHS, "month")])
        index = rng.randrange(len(row))
    else:
        row, kind = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), "letter"
        index = rng.randrange(1, 25)
    word, step = rng.choice([("after", 1), ("before", -1)])
    return (
        [f"What {kind} comes {word} {row[index]}?", f"Which {kind} is {word} {row[index]}?"],
        f"The {kind} {word} {row[index]} is",
        row[(index + step) % len(row)],
    )


def draw_fact(rng: random.Random) -> tuple[list[str], str, str]:
    """A fact from the tables or a loose one."""
    if rng.random() < 0.25:
        question, start, value = rng.choice(LOOSE_FACTS)
        return [question], start, value
    return _table_fact(rng)


def facts(rng: random.Random, _: bool) -> Exchange:
    """A question about something learned by heart."""
    asked, start, value = draw_fact(rng)
    return Exchange(rng.choice(asked), f"{start} {value}.", value)


def small_talk(rng: random.Random, _: bool) -> Exchange:
    """A greeting, a question about pico, thanks, goodbye."""
    said, replies = rng.choice(SMALL_TALK)
    return Exchange(rng.choice(said), rng.choice(replies))


#: Every task with its share of the exchanges in training. The two without a share only ask: for what `plus` and
#: `minus` draw seldom, so that pico gets it right about half the time and fine-tuning has something to improve.
TASKS: dict[str, tuple[float, Generator]] = {
    "plus": (18, plus),
    "minus": (14, minus),
    "times": (3, times),
    "plus_words": (7, plus_words),
    "minus_words": (5, minus_words),
    "word_problem": (6, word_problem),
    "compare": (3, compare),
    "number_words": (4, number_words),
    "odd_even": (2, odd_even),
    "next_number": (3, next_number),
    "sort_numbers": (5, sort_numbers),
    "sort_words": (3, sort_words),
    "copy": (4, copy),
    "repeat": (1, repeat),
    "reverse": (2, reverse),
    "pick": (3, pick),
    "count_up": (2, count_up),
    "lookup": (3, lookup),
    "spell": (4, spell),
    "facts": (14, facts),
    "small_talk": (6, small_talk),
    "plus_large": (0, plus_large),
    "minus_large": (0, minus_large),
}

#: The tasks whose mean accuracy is called "arithmetic".
ARITHMETIC: tuple[str, ...] = ("plus_large", "minus_large")
