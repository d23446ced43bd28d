"""No warning speaks up on the recorded curves of runs that went well."""

from __future__ import annotations

import pytest
from false_alarms import recorded, replay

pytestmark = pytest.mark.studies


def test_no_false_alarm_on_recorded_runs() -> None:
    runs = list(recorded())
    assert len(runs) == 40
    assert [name for name, run in runs if replay(run)] == []
