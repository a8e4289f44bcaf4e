"""The documents that pico is pre-trained on, all of them made here from a seed.

Two kinds come out: *conversations*, made of the questions and replies of `tasks.py`, and *plain texts* without
chat markers (short stories, facts told in a row, lines of sums), so that the model also knows running text.

    python examples/pico/corpus.py                   # print a dozen
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from facts import (
    ADJECTIVES,
    FEELINGS,
    FOODS,
    NAMES,
    OBJECTS,
    PETS,
    PLACES,
    SHE,
    SYSTEM_PROMPTS,
    WEATHER,
)
from tasks import TASKS, article, capitalised, draw_fact, minus, minus_words, plus, plus_words, times

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

#: A document in pieces: the text, and whether it is the model's own to say (a reply, or plain text).
Document = list[tuple[str, bool]]

#: The first words of questions that "Please" goes well with.
_ORDERS = [
    "Add", "Calculate", "Compute", "Copy", "Count", "Multiply", "Name", "Put", "Repeat", "Reverse", "Say", "Solve",
    "Sort", "Spell", "Subtract", "Take", "Tell", "Turn", "Work", "Write",
]  # fmt: skip


def _dress(rng: random.Random, question: str) -> str:
    """The question as people write it: politely, in a hurry, without its last mark."""
    roll = rng.random()
    lowered = question[0].lower() + question[1:]
    if roll < 0.08:
        return f"Please {lowered}" if question.split()[0] in _ORDERS else question
    if roll < 0.12:
        return f"Can you tell me: {lowered}"
    if roll < 0.16:
        return f"Question: {question}"
    if roll < 0.20:
        return f"I have a question. {question}"
    if roll < 0.24:
        return question.rstrip("?.")
    if roll < 0.28:
        return lowered
    return question


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """A conversation of one to four exchanges, sometimes with a system message."""
    names, weights = list(TASKS), [weight for weight, _ in TASKS.values()]
    num_exchanges = rng.choices([1, 2, 3, 4], [55, 20, 15, 10])[0]
    messages: list[dict[str, str]] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    # Half of the longer conversations stay with one task.
    chosen = rng.choices(names, weights, k=num_exchanges)
    if rng.random() < 0.5:
        chosen = chosen[:1] * num_exchanges
    for name in chosen:
        exchange = TASKS[name][1](rng, False)
        question = exchange.question if name == "small_talk" else _dress(rng, exchange.question)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": exchange.reply})
    return messages


def chat_document(messages: list[dict[str, str]]) -> Document:
    """The conversation as the chat template writes it, cut where the replies begin and end."""
    pieces: Document = []
    others = ""
    for message in messages:
        others += f"{IM_START}{message['role']}\n"
        if message["role"] == "assistant":
            pieces += [(others, False), (message["content"] + IM_END, True)]
            others = "\n"
        else:
            others += f"{message['content']}{IM_END}\n"
    return [*pieces, (others, False)]


def story(rng: random.Random) -> str:
    """A story of four to seven short sentences."""
    name, friend = rng.sample(NAMES, 2)
    she, her, her_object = ("she", "her", "her") if name in SHE else ("he", "his", "him")
    place, thing, pet, food = rng.choice(PLACES), rng.choice(OBJECTS), rng.choice(PETS), rng.choice(FOODS)
    adjective, feeling = rng.choice(ADJECTIVES), rng.choice(FEELINGS)
    an = article(adjective)
    opening = rng.choice([f"{name} went to {place}.", f"One day {name} walked to {place}.", f"{name} was in {place}.",
                          f"Every morning {name} goes to {place}.",
                          f"{name} and {friend} went to {place}."])  # fmt: skip
    middle = [
        f"{rng.choice(WEATHER)}.",
        f"There {she} found {an} {adjective} {thing}.",
        f"{capitalised(she)} was {feeling}.",
        f"A {pet} came and looked at {her_object}.",
        f'"Look at this {thing}," said {friend}.',
        f'"What a {adjective} {thing}!" said {name}.',
        f"{capitalised(she)} gave {food} to the {pet}.",
        f"{name} put the {thing} into {her} bag.",
        f"{friend} wanted to see the {thing} too.",
        f"The {pet} ran away with the {thing}.",
        f"{name} and {friend} ate {food} together.",
        f"{capitalised(she)} sat down and waited.",
    ]
    kept = sorted(rng.sample(range(len(middle)), rng.randint(2, 5)))
    ending = rng.choice([f"Then {name} went home.", f"In the evening {she} told {friend} about it.",
                         f"{name} never forgot that day.", f"At the end of the day everyone was {feeling}.",
                         f"{capitalised(she)} took the {thing} home.", "It was a good day."])  # fmt: skip
    return " ".join([opening, *(middle[index] for index in kept), ending])


def plain_text(rng: random.Random) -> str:
    """A text without chat markers: a story, some facts, a row of sums."""
    roll = rng.random()
    if roll < 0.5:
        return story(rng)
    if roll < 0.75:
        told = (draw_fact(rng)[1:] for _ in range(rng.randint(2, 6)))
        return " ".join(f"{start} {value}." for start, value in told)
    generators = rng.choices([plus, minus, times, plus_words, minus_words], [5, 4, 1, 2, 1], k=rng.randint(3, 8))
    return rng.choice([" ", "\n"]).join(generator(rng, False).reply for generator in generators)


def documents(seed: int | str) -> Iterator[Document]:
    """Endless training documents: six in seven are conversations, the others plain text."""
    rng = random.Random(seed)
    while True:
        if rng.random() < 1 / 7:
            yield [(plain_text(rng), True)]
        else:
            yield chat_document(conversation(rng))


if __name__ == "__main__":
    stream = documents(seed=0)
    for _ in range(12):
        print("".join(text for text, _ in next(stream)), end="\n---\n")
