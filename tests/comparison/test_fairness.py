"""What makes arms comparable: the same problems in the same order."""

import pytest

from support.small_runs import SHORT, run


def problems(folder):
    """The problems of every step, in order, without repetitions."""
    return [list(dict.fromkeys(record["problem"] for record in folder.rollouts(step))) for step in folder.recorded()]


@pytest.mark.usefixtures("short_evaluation")
def test_all_arms_of_a_seed_see_the_same_problems(tmp_path):
    arms = ["regulator=lopti", "regulator=random-split | ar", "algorithm=rltr", "algorithm=erl(reflection_tokens=8)"]
    settings = [*SHORT, "steps=2", "group=2", "rollouts_every=1", "evaluation=off", "optim.lr=1e-3"]
    expected = problems(run(tmp_path, *settings, name="grpo")[0])
    assert [len(step) for step in expected] == [4, 4]
    assert expected[0] != expected[1]
    for arm in arms:
        assert problems(run(tmp_path, *settings, arm, name=arm.replace(" ", ""))[0]) == expected, arm
    assert problems(run(tmp_path, *settings, "seed=1", name="other")[0]) != expected
