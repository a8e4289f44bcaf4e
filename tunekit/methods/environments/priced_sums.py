"""Sums with a calculator that has a price: the model learns when a tool is worth it."""

from tunekit.methods.environments.tools import calculator as calculate


class PricedSums:
    """A calculator, each use of which costs `price`. Whether the answer is right, another reward says."""

    def __init__(self, price: float = 0.2) -> None:
        self._price = price
        self._num_uses = 0

    def reset(self) -> None:
        """Begin with nothing to pay."""
        self._num_uses = 0

    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: The expression, such as `12 * (3 + 4)`.
        """
        self._num_uses += 1
        return calculate(expression)

    def get_reward(self) -> float:
        """Return what was paid, below zero."""
        return -self._price * self._num_uses
