"""What is kept of a step."""

from poise.training import steps


def test_the_parts_of_a_step_add_up_to_it(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now[0])
    clock = steps.Clock()
    for part, seconds in (("rollout", 3), ("update", 2), ("rollout", 1)):
        with clock(part):
            now[0] += seconds
        now[0] += 0.5  # between the parts
    found = clock.metrics(tokens=30)
    assert found == {
        "time/rollout": 4, "time/update": 2, "time/other": 1.5, "time/step": 7.5, "time/tokens_per_s": 4
    }  # fmt: skip
    with clock("record"):  # after the metrics were asked for
        now[0] += 2.5
    assert clock.metrics(tokens=30).items() >= {"time/record": 2.5, "time/step": 10, "time/tokens_per_s": 3}.items()
