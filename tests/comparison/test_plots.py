"""The picture of a comparison."""

from poise.comparison.plots import STYLES


def test_arms_can_be_told_apart():
    assert len(set(STYLES)) == len(STYLES) >= 30
    colours, markers, _ = zip(*STYLES[:8], strict=True)
    assert len(set(colours)) == len(set(markers)) == 8
