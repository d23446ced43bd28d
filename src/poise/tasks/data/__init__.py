"""Problems from the user's data sets, scored by reward functions.

``sources`` finds and opens a data set, ``rows`` reads files, ``reader`` converts rows to problems, ``order`` determines
the order of the problems in training, and ``task`` defines the task.
"""

from poise.tasks.data.rows import DataError
from poise.tasks.data.task import Data, Math, task_of

__all__ = ["Data", "DataError", "Math", "task_of"]
