"""What makes arms comparable: the same problems in the same order."""

from support.small_runs import SHORT, run


def problems(folder):
    """The problems of every step, in order, without repetitions."""
    return [list(dict.fromkeys(record["problem"] for record in folder.rollouts(step))) for step in folder.recorded()]


def test_all_arms_of_a_seed_see_the_same_problems(tmp_path):
    arms = ["regulator=lopti", "regulator=random-split | ar", "algorithm=rltr", "algorithm=erl(reflection_tokens=8)"]
    settings = [*SHORT, "rollout.max_tokens=4", "steps=2", "prompts=2", "group=2", "rollouts_every=1", "evaluation=off"]
    expected = problems(run(tmp_path, *settings, name="grpo")[0])
    assert [len(step) for step in expected] == [2, 2]
    assert expected[0] != expected[1]
    for arm in arms:
        assert problems(run(tmp_path, *settings, arm, name=arm.replace(" ", ""))[0]) == expected, arm
    assert problems(run(tmp_path, *settings, "seed=1", name="other")[0]) != expected
