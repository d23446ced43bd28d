"""Decoding attention on a CPU, by Triton's interpreter; started by test_fused_step.py in a process of its own."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from poise.sampling.native import kernels
from support import slots

USED = [1, 2, 64, 65, 256, 257, 258, 513, 1025, 1500]  # around the borders of blocks and parts


def main():
    kernels._processors = lambda _: 132
    for heads, shared, width, window, rotated in (
        (2, 2, 64, None, False), (4, 2, 96, 300, True), (6, 1, 128, None, True), (7, 1, 16, 700, False),
    ):  # fmt: skip
        case = slots.case(heads, shared, width, USED, 1536, window, rotated=rotated)
        assert kernels.split_count(case.query, case.keys) == 6
        slots.check(case, error=1e-5)
    print("equal")


if __name__ == "__main__":
    main()
