"""A text adventure: a house of rooms in a row, a key in one of them, a locked door in another."""

import random

_ROOMS = ("hall", "kitchen", "library", "cellar", "attic", "study", "bedroom", "pantry", "gallery", "workshop")


class Adventure:
    """A house of `num_rooms` rooms, which is to be left within `num_moves` moves."""

    def __init__(self, num_rooms: int = 5, num_moves: int = 12) -> None:
        self._num_rooms = num_rooms
        self._num_moves = num_moves
        self._names: list[str] = []
        self._place = self._key = self._door = self._num_made = 0
        self._has_key = self._is_out = False

    def reset(self, seed: int) -> str:
        """Build the house, and describe the first room."""
        rng = random.Random(seed)
        self._names = [f"{_ROOMS[place % len(_ROOMS)]} {place + 1}" for place in range(self._num_rooms)]
        self._place, self._key, self._door = rng.sample(range(self._num_rooms), 3)
        self._num_made, self._has_key, self._is_out = 0, False, False
        return self._view()

    def go(self, direction: str) -> str:
        """Go to the next room.

        Args:
            direction: `left` or `right`.
        """
        if over := self._count():
            return over
        step = {"left": -1, "right": 1}.get(direction.strip().lower())
        if step is None:
            return "You can go left or right."
        if not 0 <= self._place + step < self._num_rooms:
            return "There is a wall."
        self._place += step
        return self._view()

    def take_key(self) -> str:
        """Take the key that lies here."""
        if over := self._count():
            return over
        if self._has_key or self._place != self._key:
            return "There is no key here."
        self._has_key = True
        return "You have the key."

    def open_door(self) -> str:
        """Open the door that is here, and leave."""
        if over := self._count():
            return over
        if self._place != self._door:
            return "There is no door here."
        if not self._has_key:
            return "It is locked."
        self._is_out = True
        return "You are out."

    def get_reward(self) -> float:
        """Return 1 for leaving, less 0.02 for each move; 0.2 for the key alone."""
        if self._is_out:
            return 1 - 0.02 * self._num_made
        return 0.2 if self._has_key else 0.0

    def _count(self) -> str:
        if self._is_out or self._num_made == self._num_moves:
            return "The adventure is over."
        self._num_made += 1
        return ""

    def _view(self) -> str:
        contents = ["a key"] if self._place == self._key and not self._has_key else []
        contents += ["a locked door"] if self._place == self._door else []
        ways = ["left"] * (self._place > 0) + ["right"] * (self._place < self._num_rooms - 1)
        sentence = f" There is {' and '.join(contents)}." if contents else ""
        return f"You are in the {self._names[self._place]}.{sentence} You can go {' or '.join(ways)}."
