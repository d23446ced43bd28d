"""What is kept of a step."""

import pytest

from poise.training import records


def test_the_parts_of_a_step_add_up_to_it(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(records.time, "perf_counter", lambda: now[0])
    clock = records.Clock()
    now[0] += 7  # before the step begins
    clock.restart()
    for part, seconds in (("rollout", 3), ("update", 2), ("rollout", 1)):
        with clock(part):
            now[0] += seconds
        now[0] += 0.5  # between the parts
    found = clock.metrics(tokens=30)
    assert found == {
        "time/rollout": 4, "time/update": 2, "time/other": 1.5, "time/step": 7.5, "time/tokens_per_s": 4
    }  # fmt: skip
    clock.restart()
    now[0] += 1
    assert clock.metrics(tokens=1) == {"time/other": 1, "time/step": 1, "time/tokens_per_s": pytest.approx(1)}
