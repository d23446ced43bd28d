"""A task's own code that ends the process, or raises what Python's own loops swallow, is named."""

import sys

import pytest

from poise.tasks import Problem, TaskError, begin, draw, judge
from poise.tasks.rewards import RewardError


def leave():
    sys.exit()


def stop():
    next(iter(()))


@pytest.mark.parametrize(("how", "said"), [(leave, "SystemExit"), (stop, "StopIteration")])
def test_a_task_that_leaves_is_named(how, said):
    class Mine:
        name = "mine"

        def problems(self, *_):
            how()

        def score(self, *_):
            how()

    task, problem = Mine(), Problem("p", "?", "all", {})
    with pytest.raises(RewardError, match=rf"score\(\) of task 'mine' raised {said}.*test_leaving\.py.*problem p"):
        judge(task, problem, begin(task, problem))
    with pytest.raises(TaskError, match=rf"problems\(\) of task 'mine' raised {said}"):
        draw(task, "train", 0, 1)
