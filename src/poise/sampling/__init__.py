"""Engines, the sampler and the algorithms.

The settings of a run also use the names and defaults below, so this file does not import torch.
"""

from typing import Literal

EngineName = Literal["auto", "native", "transformers", "vllm"]
GROUP = 8  # responses per prompt
MAX_TOKENS = 1024  # per reply
VLLM_MEMORY = 0.3  # share of the device's memory
