"""When a failed attempt is tried again, and how long to wait before it."""

from __future__ import annotations

import hashlib

import attrs


@attrs.frozen
class Backoff:
    """A retry policy as it stands in a definition: plain data, so that it is part of the definition's identity."""

    attempts: int = 1  # In all, the first one included.
    first_ms: int = 1_000
    factor: float = 2.0
    maximum_ms: int = 3_600_000
    jitter: float = 0.1  # A share of the delay, added or taken off.
    never: tuple[str, ...] = ()  # Exception classes as "module:Name" that make a retry pointless.

    def delay_ms(self, tries: int, key: str) -> int:
        """How long to wait after the `tries`-th failure.

        The jitter comes from key and attempt: it is the same in every life.
        """
        try:
            delay = min(self.first_ms * self.factor ** (tries - 1), float(self.maximum_ms))
        except OverflowError:  # After a thousand tries the factor alone is more than a float can hold.
            delay = float(min(self.first_ms, 1) * self.maximum_ms)
        spread = int.from_bytes(hashlib.blake2b(f"{key}/{tries}".encode(), digest_size=4).digest(), "big") / 2**32
        return max(0, round(delay * (1 + self.jitter * (2 * spread - 1))))

    def is_final(self, tries: int, types: tuple[str, ...]) -> bool:
        return tries >= self.attempts or any(name in self.never for name in types)


ONCE = Backoff()
