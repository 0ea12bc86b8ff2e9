"""How fast answers come at present."""

from typing import Final

WEIGHT: Final = 0.05
"""Of the newest figure in an average: a change of load shows after some dozens of them."""


class Pace:
    """Moving averages over what clients of all replicas have just waited for."""

    def __init__(self) -> None:
        self._first_token_s: float | None = None
        self._token_s: float | None = None

    def first_token(self, after_s: float) -> None:
        self._first_token_s = _moved(self._first_token_s, after_s)

    def next_tokens(self, num_tokens: int, after_s: float) -> None:
        self._token_s = _moved(self._token_s, after_s / num_tokens)

    def expected_s(self, num_tokens: int) -> float | None:
        """From the arrival of a request to its last token; None as long as nothing is known."""
        if self._first_token_s is None or self._token_s is None:
            return None
        return self._first_token_s + (num_tokens - 1) * self._token_s


def _moved(average: float | None, newest: float) -> float:
    return newest if average is None else average + WEIGHT * (newest - average)
