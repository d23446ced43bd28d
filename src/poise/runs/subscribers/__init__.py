"""What follows a run: each subscriber is told of its start, of every step and of its end, in one order.

1. ``recorder.Recorder`` writes the step's responses and tokens, and logs its line of metrics: the step is finished.
2. ``evaluation_schedule.EvaluationSchedule`` measures on held-out problems when it is time, and adds to that line.
3. ``summary.Summary`` writes ``summary.json`` at the end.
4. ``console.Console`` shows the step, ``runs.trackers`` send it on, and ``warnings.Watch`` warns.
5. The user's ``callbacks``, in their order.

Then the trainer saves a checkpoint if one is due or the run ends here. A subscriber has any of ``on_start(state)``,
``on_step(result)`` and ``on_end(state)``. If one returns False from ``on_start`` or ``on_step``, the run ends there,
after the others have been told: the step is saved, the last evaluation is done, and the run can be resumed.
"""
