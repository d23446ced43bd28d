"""Engines, and the sampler and the algorithms that play with them.

Names and defaults that a run's settings share with them are here: reading them needs no torch.
"""

from typing import Literal

EngineName = Literal["auto", "native", "transformers", "vllm"]
GROUP = 8  # responses per prompt
MAX_TOKENS = 1024  # of a reply
VLLM_MEMORY = 0.3  # share of the device's memory
