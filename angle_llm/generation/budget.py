"""What a command may spend: so many requests, so much money. Asked before a request is made, at its worst price, so what
servers count is never above it. What one charges for an answer that was lost on its way, nobody tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition

from angle_llm.config import SettingsError
from angle_llm.generation.generators import Answer, Failure, Request

_OVERHEAD_TOKENS = 64
"""Of a chat template around a message."""


@dataclass(frozen=True)
class Prices:
    """In the same money as the budget."""

    read: float = 0.0
    """Of a million tokens of messages."""
    new: float = 0.0
    """Of a million tokens of answers."""

    def of(self, read_tokens: int, new_tokens: int) -> float:
        """What so many tokens cost."""
        return (read_tokens * self.read + new_tokens * self.new) / 1e6


class Budget:
    """Counts what was spent and what is on its way; threads may ask at once.

    Raises:
        SettingsError: for a limit in money without prices.
    """

    def __init__(
        self, prices: Prices, *, max_requests: int | None, max_cost: float | None, max_new_tokens: int
    ) -> None:
        if max_cost is not None and not (prices.read or prices.new):
            raise SettingsError("--max-cost needs the prices of a million tokens: --prices.read and --prices.new.")
        self.prices = prices
        self.max_requests = max_requests
        self.max_cost = max_cost
        self.max_new_tokens = max_new_tokens
        self.requests = 0
        self.cost = 0.0
        self._reserved_requests = 0
        self._reserved_cost = 0.0
        self._changed = Condition()

    def count(self, answers: Sequence[Answer | Failure]) -> None:
        """Adds what was spent in an earlier run."""
        self.requests += len(answers)
        self.cost += sum(self.prices.of(answer.read_tokens, answer.new_tokens) for answer in answers)

    def reserve(self, requests: Sequence[Request]) -> bool:
        """Whether these may be made. Waits for what is on its way where that may turn out cheaper than feared."""
        worst = sum(self._worst(request) for request in requests)
        with self._changed:
            while not self._fits(len(requests), worst):
                if not self._reserved_requests:
                    return False
                self._changed.wait()
            self._reserved_requests += len(requests)
            self._reserved_cost += worst
            return True

    def settle(self, requests: Sequence[Request], came: Sequence[Answer | Failure]) -> None:
        """Turns what was reserved for `requests` into what came of them cost. Those of which nothing came count as requests."""
        with self._changed:
            self._reserved_requests -= len(requests)
            self._reserved_cost -= sum(self._worst(request) for request in requests)
            self.requests += len(requests) - len(came)
            self.count(came)
            self._changed.notify_all()

    def _worst(self, request: Request) -> float:
        read = len(request.message.encode()) + _OVERHEAD_TOKENS  # a token is a byte at least
        return self.prices.of(read, self.max_new_tokens)

    def _fits(self, requests: int, cost: float) -> bool:
        few = self.max_requests is None or self.requests + self._reserved_requests + requests <= self.max_requests
        # Sums of floats in another order differ in the last digit.
        cheap = self.max_cost is None or self.cost + self._reserved_cost + cost <= self.max_cost * (1 + 1e-9)
        return few and cheap
