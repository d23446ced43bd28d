"""How often each interval covers the true difference, and what can be detected: experiments/instrument/statistics.md.

python scripts/comparison_statistics.py   # a few minutes
"""

from collections.abc import Callable

import numpy as np

from poise.referee.compare.sign_flip import Floats, intervals, p_values
from poise.referee.compare.statistics import detectable, seeds_needed, student_factor

TRIALS = 4000
RESAMPLES = 2000


def bootstrap(samples: Floats) -> tuple[Floats, Floats]:
    """The percentile bootstrap."""
    generator = np.random.default_rng(0)
    chosen = generator.integers(0, samples.shape[1], (RESAMPLES, samples.shape[1]))
    ends = np.array([np.quantile(row[chosen].mean(1), [0.025, 0.975]) for row in samples])
    return ends[:, 0], ends[:, 1]


def student(samples: Floats) -> tuple[Floats, Floats]:
    n = samples.shape[1]
    margin = student_factor(n) * samples.std(1, ddof=1) / np.sqrt(n)
    return samples.mean(1) - margin, samples.mean(1) + margin


def false_findings(looks: tuple[int, ...]) -> float:
    """How often one of several looks at more and more seeds finds a difference at 5 % where there is none."""
    samples = np.random.default_rng(0).standard_normal((TRIALS, looks[-1]))
    found = np.zeros(TRIALS, dtype=bool)
    for n in looks:
        rows = max(1, 2**22 >> (n - 1))  # at a time, for want of memory
        found |= np.concatenate([p_values(part[:, :n]) for part in np.array_split(samples, -(-TRIALS // rows))]) <= 0.05
    return float(found.mean())


def main() -> None:
    draws: dict[str, Callable[[np.random.Generator, int], Floats]] = {
        "normal": lambda g, n: g.standard_normal((TRIALS, n)),
        "heavy tails (t, 2 degrees)": lambda g, n: g.standard_t(2, (TRIALS, n)),
        "strongly skewed (exponential)": lambda g, n: g.exponential(size=(TRIALS, n)) - 1,
    }
    print("coverage of 95 % intervals | sign-flip | Student | percentile bootstrap")
    for name, draw in draws.items():
        for n in (6, 10):
            samples = draw(np.random.default_rng(n), n)
            found = [function(samples) for function in (intervals, student, bootstrap)]
            shares = [np.mean((low <= 0) & (high >= 0)) for low, high in found]
            print(f"{name}, {n} seeds | " + " | ".join(f"{100 * share:.1f} %" for share in shares))
    arms = (1, 3, 5, 10)
    print("\nsmallest detectable difference, in spreads, for comparisons:", *arms)
    for n in (6, 8, 10, 15, 20):
        print(n, "seeds:", *(f"{detectable(n, 1.0, count):.2f}" for count in arms))
    for looks in ((10,), (6, 10), (6, 10, 20), (6, 8, 10, 12, 14, 16)):
        print("looks at", *looks, f"seeds: a false finding in {100 * false_findings(looks):.1f} %")
    print("seeds needed:", *(seeds_needed(count) for count in arms))


if __name__ == "__main__":
    main()
