"""TRL's tools and environments with a regulator: what the model did not write is not regulated."""

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

from datasets import Dataset  # noqa: E402

from poise import regulators  # noqa: E402
from poise.integrations.trl import KL_WEIGHTS, WEIGHTS, RegulatedGRPOTrainer  # noqa: E402
from support import trl_runs  # noqa: E402
from support.trl_runs import CALL, config, weights  # noqa: E402

ANSWERS = ("Alice is a knight.", "Bob is a knave and Alice is not.", "Nobody.")


def add(number: int) -> str:
    """Add to the total.

    Args:
        number: What to add.
    """
    return f"the total is now {number}"


class Counter:
    def reset(self, **_):
        self.total = 0

    def add(self, number: int) -> str:
        """Add to the total.

        Args:
            number: What to add.
        """
        self.total += number
        return f"the total is now {self.total}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return trl_runs.tool_model(tmp_path_factory.mktemp("model"))


class Scripted(RegulatedGRPOTrainer):
    _generate_single_turn = trl_runs.calls_tools(CALL, ANSWERS)

    def _generate_and_score_completions(self, inputs):
        self.output = super()._generate_and_score_completions(inputs)
        return self.output


def make(model, folder, regulator, more, **settings):
    prompts = [[{"role": "user", "content": "Make the total 7."}]] * 4
    trainer = Scripted(
        model, trl_runs.spread, config(folder, **{"max_completion_length": 160, "max_steps": 2} | settings),
        Dataset.from_dict({"prompt": prompts}), regulator=regulator, **more,
    )  # fmt: skip
    trainer.remove_callback(trl_runs.transformers.PrinterCallback)
    return trainer


@pytest.mark.parametrize(
    "more",
    [{"tools": [add]}, pytest.param({"environment_factory": Counter}, marks=pytest.mark.slow)],
    ids=lambda more: next(iter(more)),
)
def test_the_regulator_sees_only_what_the_model_wrote(more, model, tmp_path):
    batches = []

    def watched(batch):
        batches.append(batch)
        return regulators.parse("ar(alpha=0.5) | lopti(threshold=0.01)")(batch)

    trainer = make(model, tmp_path, watched, more, num_iterations=2, beta=0.1)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(weights(trainer), before)
    assert trainer.state.log_history[0]["tools/call_frequency"] == 0.5
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0

    batch, output, decode = batches[-1], trainer.output, trainer.processing_class.decode
    assert torch.equal(batch.mask, (output["completion_mask"] * output["tool_mask"]).bool())
    for row, ids in enumerate(output["completion_ids"]):
        answer = ANSWERS[row // 2 % 3 if row % 2 == 0 else row % 3]  # those who called are asked again by themselves
        assert decode(ids[batch.mask[row]]) == (CALL + answer if row % 2 == 0 else answer)
        between = decode(ids[(output["completion_mask"][row] == 1) & ~batch.mask[row]])
        assert ("the total is now 7" in between) == (row % 2 == 0)
    for name in (WEIGHTS, KL_WEIGHTS):
        assert (output[name] != 0).any()
        assert not output[name].transpose(1, 2)[~batch.mask].any()


@pytest.mark.slow
def test_grpo_with_tools_is_stock_trl_bit_for_bit(model, tmp_path):
    found = []
    for kind in (trl.GRPOTrainer, Scripted):
        own = {} if kind is trl.GRPOTrainer else {"regulator": "grpo"}
        one = type("One", (kind,), {"_generate_single_turn": Scripted._generate_single_turn})
        trainer = one(
            model, trl_runs.spread, config(tmp_path, max_completion_length=160, max_steps=2),
            trl_runs.DATA, tools=[add], **own,
        )  # fmt: skip
        before = weights(trainer)
        trainer.train()
        found.append(weights(trainer))
    assert not torch.equal(found[0], before)
    assert torch.equal(*found)
