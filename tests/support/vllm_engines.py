"""vLLM on small random weights."""

from itertools import count

import torch
import transformers

from poise.models.policy import EMBEDDED, Policy
from poise.runs.folder import RunFolder
from poise.sampling.vllm_engine import VllmEngine
from poise.tasks import Problem, Score
from poise.trainer import Trainer
from poise.training.building import build
from poise.training.config.schema import load

MEMORY = 0.02
STARTED = []  # a vLLM that is collected takes what all of a process share with it


def start(policy, **settings):
    STARTED.append(VllmEngine(policy, memory=MEMORY, **settings))
    return STARTED[-1]


def small(tied=True, seed=0):
    """The embedded model's tokenizer on random weights: vLLM's attention on a CPU has no heads of 40."""
    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # far from uniform
    return Policy(model, tokenizer)


class Vowels:
    """Whatever was asked: the share of letters that are an "e". Even random weights can begin with that."""

    name = "vowels"

    def problems(self, split, seed):
        for number in count():
            yield Problem(f"{split}/{seed}/{number}", f"Ada says {seed % 97} and {number}.", "1", {})

    def score(self, _, text):
        share = text.count("e") / max(len(text), 1)
        return Score(share, share > 0.5)


def train_on_vowels(folder, *settings):
    """The metrics of a short run that samples with vLLM."""
    small().save(folder / "model")
    given = ["prompts=8", "group=8", "rollout.max_tokens=24", "evaluation.problems=2", "optim.lr=2e-3"]
    given += [f"model={folder / 'model'}", "rollout.engine=vllm", f"rollout.vllm_memory={MEMORY}"]
    config = load("tiny", [*given, f"run={folder / 'run'}", *settings])
    run = RunFolder.create(config.run, config.model_dump(mode="json"))
    trainer = Trainer(config, run, build(config, run, task=Vowels()), quiet=True)
    STARTED.append(trainer.sampler.engine)
    trainer.run()
    return run.metrics()
