"""A game in the shape of TRL's environments: it runs unchanged in poise and in TRL.

poise train environment=examples/environment/guess_number.py:GuessNumber model=Qwen/Qwen2.5-0.5B-Instruct
"""


class GuessNumber:
    """The model calls ``guess`` until it finds a number from 1 to 15."""

    def reset(self, seed: int = 0, **_row: object) -> str:
        """Begin a new game; what is returned is the prompt."""
        self.number, self.guesses, self.nearest = seed % 15 + 1, 0, 15
        return "Guess a number from 1 to 15, in at most four guesses."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        if self.guesses == 4:
            raise ValueError("No guesses are left.")
        self.guesses, self.nearest = self.guesses + 1, min(self.nearest, abs(number - self.number))
        return "Right!" if number == self.number else "Higher." if number < self.number else "Lower."

    def get_reward(self) -> float:
        """1 for the number, less for a near miss, 0 without a guess."""
        return 1.0 if self.nearest == 0 else 0.5 * (1 - self.nearest / 15)
