"""The run's deterministic order of samples: sample number → window of the corpus. Pure, O(1) memory.

Samples are numbered 0, 1, 2, … without end. Each pass over the corpus (epoch) has its own permutation, so every window
appears exactly once per epoch. The permutation is a keyed Feistel network over the next power of four, with cycle
walking back into range (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). It uses integer arithmetic only
and is equal on every machine.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_FEISTEL_ROUNDS = 6


def splitmix64(value: int) -> int:
    """Apply SplitMix64's finaliser, a bijection of 64-bit integers that looks random."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class SampleOrder:
    """A map from the run's sample numbers to windows `0 … samples - 1`."""

    def __init__(self, seed: int, samples: int) -> None:
        if samples < 1:
            raise ValueError(f"samples is {samples}; it must be at least 1")
        self.samples = samples
        self._seed = splitmix64(seed & _MASK)
        self._half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._epoch = -1
        self._keys: tuple[int, ...] = ()

    def window(self, sample: int) -> int:
        """Return the window of sample number `sample` (0 or more)."""
        epoch, position = divmod(sample, self.samples)
        if epoch != self._epoch:
            self._epoch = epoch
            self._keys = tuple(
                splitmix64(self._seed ^ splitmix64(epoch * _FEISTEL_ROUNDS + i)) for i in range(_FEISTEL_ROUNDS)
            )
        position = self._permute(position)
        while position >= self.samples:  # fewer than four turns on average: the domain is at most 4× too large
            position = self._permute(position)
        return position

    def _permute(self, position: int) -> int:
        left, right = position >> self._half_bits, position & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (splitmix64(right ^ key) & self._half_mask)
        return left << self._half_bits | right
