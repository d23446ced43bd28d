"""The same environment class in TRL's trainer and in ours: the same tokens, and the same rewards."""

import json

import pytest
import transformers

trl = pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

from datasets import Dataset  # noqa: E402

from poise.models.loading import load_policy  # noqa: E402
from poise.sampling.sampler import Sampler  # noqa: E402
from poise.tasks.environment import Environment  # noqa: E402
from support import trl_runs  # noqa: E402
from support.scripted import Scripted  # noqa: E402
from support.trl_runs import config  # noqa: E402


def call(number):
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'number': number}})}\n</tool_call>"


EPISODES = [  # what the model says, turn after turn
    [call(3), call(4), "Alice is a knight."],
    [call(9), call(1), "Nobody."],
    ["Bob is a knave."],
    [call(3) + call(3), "Alice and Bob."],
]


class Counter:
    """In the shape that TRL documents: nothing here knows of either trainer."""

    def reset(self, **_) -> str:
        self.total = 0
        return " The total is 0."

    def add(self, number: int) -> str:
        """Add to the total.

        Args:
            number: What to add.

        Returns:
            The new total.
        """
        if self.total > 8:
            raise ValueError("Game over.")
        self.total += number
        return f"the total is now {self.total}"


class Rewarded(Counter):
    def get_reward(self) -> float:
        return self.total / 7


def tens(environments, **_):
    return [environment.total / 10 for environment in environments]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The embedded model with Qwen3's chat template and its control tokens."""
    folder = trl_runs.tool_model(tmp_path_factory.mktemp("model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    network.config.eos_token_id = network.generation_config.eos_token_id = tokenizer.eos_token_id
    network.save_pretrained(folder)
    return folder


def next_reply(text):
    """The reply that comes next in the episode that the text shows; the prompt says which one it is."""
    number = int(text.split("Episode ")[1][0])
    return EPISODES[number][text.count("<|im_start|>assistant") - 1] + "<|im_end|>"


class ScriptedTrainer(trl.GRPOTrainer):
    def _generate_single_turn(self, prompt_ids, *_, **__):
        replies = [next_reply(text) for text in self.processing_class.batch_decode(prompt_ids)]
        return self.processing_class(replies)["input_ids"], None

    def _calculate_rewards(self, *args, **settings):
        self.rewards = super()._calculate_rewards(*args, **settings)
        return self.rewards


@pytest.mark.parametrize(("kind", "functions"), [(Rewarded, []), (Counter, [tens]), (Rewarded, [tens])])
def test_an_environment_runs_unchanged_in_both_trainers(kind, functions, model, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"Episode {i}. Make the total 7."}]} for i in range(4)]
    trainer = ScriptedTrainer(
        model, list(functions), config(tmp_path, max_completion_length=400, num_generations=2), Dataset.from_list(rows),
        environment_factory=kind,
    )  # fmt: skip
    trainer.model.train()
    output = trainer._generate_and_score_completions([row for row in rows for _ in range(2)])

    policy = load_policy(model, device="cpu")
    task = Environment(kind, reward=functions)
    problems = [make_problem(task, row) for row in rows]
    engine = Scripted(policy, lambda _number, _turn, prompt: next_reply(policy.tokenizer.decode(prompt)))
    samples = Sampler(policy, engine, task, max_tokens=200).play(problems, seed=0)
    for number, sample in enumerate(samples):
        row = 2 * number  # TRL has two attempts at each
        theirs = output["prompt_ids"][row][output["prompt_mask"][row] == 1].tolist()
        assert list(sample.prompt.tokens) == theirs
        mask = output["completion_mask"][row] == 1
        assert sample.tokens.tolist() == output["completion_ids"][row][mask].tolist()
        assert sample.own.tolist() == (output["tool_mask"][row][mask] == 1).tolist()
        reward = trainer.rewards[row].nansum().item()
        assert sample.score.reward == pytest.approx(reward, abs=1e-6)
        assert sample.score.failed is None
    assert len({sample.score.reward for sample in samples}) == 4


def make_problem(task, row):
    problem = next(task.problems("train", 0))
    return type(problem)(problem.id, "", "all", {**problem.data, "row": row})
