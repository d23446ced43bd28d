"""Problems from the user's data sets, scored by reward functions.

``sources`` finds and opens a data set, ``rows`` reads files, ``reader`` turns rows into problems, ``order`` determines
their order in training, and ``task`` is the task.
"""

from poise.tasks.data.rows import DataError
from poise.tasks.data.task import Data, Math, task_of

__all__ = ["Data", "DataError", "Math", "task_of"]
