"""A run says what it was regulated by: in its checkpoints, on its model card, to its tracker."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

trl = pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

from poise import Phase, Regulator, regulators  # noqa: E402
from poise.integrations.demands import CannotRegulateError  # noqa: E402
from poise.integrations.trl_metadata import check_resume, describe, tell_trackers  # noqa: E402
from support.trl_runs import build  # noqa: E402

STOCK = trl.GRPOTrainer
SHORT = {"max_completion_length": 4, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}


def test_a_checkpoint_says_what_it_was_trained_with_and_is_not_resumed_with_another(tmp_path):
    build(tmp_path, "ar(0.3)", max_steps=1, report_to="tensorboard", **SHORT).train()
    checkpoint = tmp_path / "checkpoint-1"
    written = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]["poise"]
    assert written["regulator"] == "ar(alpha=0.3)"
    assert "weighted tokens by `ar(alpha=0.3)` (poise" in (tmp_path / "README.md").read_text()
    events = b"".join(path.read_bytes() for path in tmp_path.rglob("events.*"))
    assert b"poise_regulator" in events
    assert b"ar(alpha=0.3)" in events

    with pytest.raises(CannotRegulateError, match=r"step 1 was trained with 'ar\(alpha=0.3\)'.*with 'ar'.*change_reg"):
        build(tmp_path, "ar", max_steps=2, **SHORT).train(resume_from_checkpoint=str(checkpoint))
    build(tmp_path, "ar(alpha=0.3)", max_steps=2, **SHORT).train(resume_from_checkpoint=str(checkpoint))
    more = {"more": {"change_regulator": True}}
    build(tmp_path, "ar", max_steps=3, **SHORT, **more).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    state = json.loads((tmp_path / "checkpoint-3/trainer_state.json").read_text())
    assert state["stateful_callbacks"]["poise"]["regulator"] == "ar"


@pytest.mark.slow
def test_a_checkpoint_of_stock_trl_is_grpo(tmp_path):
    build(tmp_path, kind=STOCK, max_steps=1, **SHORT).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(CannotRegulateError, match="was trained with 'grpo', and this run would continue with 'ar'"):
        build(tmp_path, "ar", max_steps=2, **SHORT).train(resume_from_checkpoint=checkpoint)
    build(tmp_path, "grpo", max_steps=2, **SHORT).train(resume_from_checkpoint=checkpoint)
    stock = build(tmp_path, kind=STOCK, max_steps=3, restore_callback_states_from_checkpoint=True, **SHORT)
    stock.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # what we wrote is in nobody's way


def test_a_run_that_starts_afresh_is_nobodys_successor():
    check_resume(SimpleNamespace(global_step=0, stateful_callbacks={}), "ar")
    check_resume(SimpleNamespace(global_step=0, stateful_callbacks=None), "ar")


def test_descriptions_are_the_same_in_every_process():
    @dataclass(frozen=True)
    class Mine(Regulator):
        power: float = 0.5

        def phases(self, batch):
            return [Phase.of(batch, batch.prob**self.power)]

    def function(batch):
        return [Phase.of(batch)]

    assert describe(regulators.parse("lopti(0.5)|ar")) == "lopti(threshold=0.5) | ar"
    assert describe(Mine(0.3)).endswith("Mine(power=0.3)")
    found = describe(regulators.parse("ar") | function)
    assert found.startswith(f"ar | {__name__}:")
    assert "0x" not in found


def test_wandb_and_trackio_are_told():
    told = {}
    config = SimpleNamespace(update=lambda values, **options: told.update(values, **options))
    client = SimpleNamespace(config=config)
    callbacks = [SimpleNamespace(_wandb=client), SimpleNamespace(_trackio=None), SimpleNamespace(tb_writer=None)]
    tell_trackers(callbacks, "ar")
    assert told == {"poise_regulator": "ar", "allow_val_change": True}
