"""Subscribers follow a run: the trainer notifies them at the start, after every step and at the end, in this order.

1. ``recorder.Recorder`` writes the step's responses and tokens, and logs its metrics: the step is now finished.
2. ``evaluation_schedule.EvaluationSchedule`` evaluates if an evaluation is due, and adds the result to these metrics.
3. ``summary.Summary`` writes ``summary.json`` at the end.
4. ``console.Console`` shows the step, ``runs.trackers`` send its metrics, and ``warnings.Watch`` warns.
5. The user's ``callbacks``, in their order.

Then the trainer saves a checkpoint if one is due or the run ends here. A subscriber has any of the methods
``on_start(state)``, ``on_step(result)`` and ``on_end(state)``. If ``on_start`` or ``on_step`` returns False, the
trainer still notifies the other subscribers, saves the step, evaluates, and ends the run. The run can be resumed.
"""
