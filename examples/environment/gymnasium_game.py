"""A game of gymnasium in the shape of TRL's environments (``pip install gymnasium``).

poise train environment=examples/environment/gymnasium_game.py:Taxi task.turns=32 model=Qwen/Qwen2.5-0.5B-Instruct

Any game that renders itself as text and has numbered actions runs the same way: change ``NAME`` and ``ACTIONS``.
"""

import re

import gymnasium

COLOUR = re.compile(r"(?:\x1b\[([\d;]+)m)+")  # "0" ends the colours


class Taxi:
    """The model calls ``act`` until the passenger is at the hotel or gymnasium ends the game."""

    NAME = "Taxi-v4"
    ACTIONS = ("south", "north", "east", "west", "pickup", "dropoff")  # in gymnasium's order

    def __init__(self) -> None:
        self._game = gymnasium.make(self.NAME, render_mode="ansi")

    def reset(self, seed: int = 0, **_row: object) -> str:
        """Begin the game of a seed; what is returned is the prompt."""
        self._game.reset(seed=seed)
        self._reward, self._over = 0.0, False
        return f"{self._picture()}\nCall act until the game is over. Actions: {', '.join(self.ACTIONS)}."

    def act(self, action: str) -> str:
        """Take an action and see the game after it.

        Args:
            action: The name of the action.
        """
        if self._over:
            raise ValueError("The game is over.")
        if action not in self.ACTIONS:
            raise ValueError(f"The actions are {', '.join(self.ACTIONS)}.")
        _, reward, ended, cut_off, _ = self._game.step(self.ACTIONS.index(action))
        self._reward, self._over = self._reward + float(reward), ended or cut_off
        return f"{self._picture()}{' The game is over.' if self._over else ''}"

    def get_reward(self) -> float:
        """The sum of gymnasium's rewards: at most 20, less 1 for each move."""
        return self._reward

    def _picture(self) -> str:
        """The game as text. What gymnasium highlights with a colour stands in [brackets]."""
        return COLOUR.sub(lambda found: "]" if found[1] == "0" else "[", str(self._game.render())).strip("\n")
