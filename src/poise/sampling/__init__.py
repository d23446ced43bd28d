"""Engines, the sampler and the algorithms.

The names and defaults below are also used by the settings of a run. This file does not import torch.
"""

from typing import Literal

EngineName = Literal["auto", "native", "transformers", "vllm"]
GROUP = 8  # responses per prompt
MAX_TOKENS = 1024  # the longest reply
VLLM_MEMORY = 0.3  # share of the device's memory
