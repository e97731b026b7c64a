"""StepTimes: how long steps take, learned from those that were committed."""

FRESH = 0.2  # the part of a size's mean that its newest step is
FORGET = 0.98  # what remains of a size's weight with each step of another


class StepTimes:
    """Fits seconds ≈ a + b · tokens, a and b at least 0, over steps of all sizes.

    Steps are gathered by size, in octaves: most are decodes of the same few tokens, and would outweigh the rare large one that the slope
    depends on. Each octave keeps a moving mean; the line is their least-squares fit, in which an octave not seen lately counts
    less, but is never quite forgotten while there is no other to tell the slope.
    """

    def __init__(self) -> None:
        self._octaves: dict[int, list[float]] = {}  # octave → [weight, mean tokens, mean seconds]

    def add(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        octave = tokens.bit_length()
        for other, mean in self._octaves.items():
            if other != octave:
                mean[0] = max(mean[0] * FORGET, 1e-6)
        mean = self._octaves.setdefault(octave, [1.0, float(tokens), seconds])
        mean[0] = 1.0
        mean[1] += FRESH * (tokens - mean[1])
        mean[2] += FRESH * (seconds - mean[2])

    def fit(self) -> tuple[float, float] | None:
        """(a, b), or None before the first step. One size alone says: all of it is b."""
        points = self._octaves.values()
        if not points:
            return None
        total = sum(w for w, _, _ in points)
        x, y = (sum(p[0] * p[i] for p in points) / total for i in (1, 2))
        spread = sum(w * (tokens - x) ** 2 for w, tokens, _ in points)
        slope = sum(w * (tokens - x) * (seconds - y) for w, tokens, seconds in points) / spread if spread else y / x
        slope = min(max(slope, 0.0), y / x)  # so that a is not below 0
        return y - slope * x, slope

    def each(self, tokens: int) -> float:
        """Seconds per token of a step of so many; 0 before the first step."""
        fixed, slope = self.fit() or (0.0, 0.0)
        return fixed / tokens + slope
