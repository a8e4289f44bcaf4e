"""Guess a number from hints: the smallest task in which an answer of several turns is better than one."""

import random


class GuessNumber:
    """A number between 1 and `highest`, which is to be guessed with `num_guesses` guesses."""

    def __init__(self, highest: int = 15, num_guesses: int = 4) -> None:
        self._highest = highest
        self._num_guesses = num_guesses
        self._number = 1
        self._range = (1, highest)
        self._num_wrong = 0
        self._num_ruled_out = 0
        self._is_found = False

    def reset(self, seed: int) -> None:
        """Think of a number."""
        self._number = random.Random(seed).randint(1, self._highest)
        self._num_wrong, self._num_ruled_out, self._is_found = 0, 0, False
        self._range = (1, self._highest)

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        if self._is_found or self._num_wrong == self._num_guesses:
            return "the game is over"
        if number == self._number:
            self._is_found = True
            return "right"
        self._num_wrong += 1
        self._num_ruled_out += not self._range[0] <= number <= self._range[1]
        if self._num_wrong == self._num_guesses:
            return "wrong, the game is over"
        lowest, highest = self._range
        is_higher = number < self._number
        self._range = (max(lowest, number + 1), highest) if is_higher else (lowest, min(highest, number - 1))
        return f"{'higher' if is_higher else 'lower'}, {self._range[0]} to {self._range[1]}"

    def get_reward(self) -> float:
        """Return 1 for the number, less 0.1 for each wrong guess, and 0.3 for each that the hints had ruled out."""
        return self._is_found - 0.1 * self._num_wrong - 0.3 * self._num_ruled_out
