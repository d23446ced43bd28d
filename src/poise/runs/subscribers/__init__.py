"""What follows a run: each subscriber is told of its start, of every step and of its end, in one order.

1. ``records.Recorder`` writes the step's responses and tokens, and logs its line of metrics: the step is finished.
2. ``evaluations.Evaluations`` measures on held-out problems when it is time, adds to that line, and writes
   ``summary.json`` at the end.
3. ``reporter.Reporter`` shows samples and the step on the console, tells the trackers, and warns.
4. The user's ``callbacks``, in their order.

Then the trainer saves a checkpoint if one is due or the run ends here. A subscriber has any of ``on_start(state)``,
``on_step(result)`` and ``on_end(state)``. One that returns False from the first two ends the run there; the others are
told all the same. The step is saved, the last evaluation is done, and the run can be resumed.
"""
