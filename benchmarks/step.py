"""What a whole GRPO step takes, poise against TRL: same model, prompts, rewards, batch and optimizer, in one process.

    pip install -c constraints.txt -e '.[train,bench]'
    OMP_WAIT_POLICY=passive python benchmarks/step.py            # about three minutes on two idle cores
    python benchmarks/step.py --device cuda --shape 135M --json out.json
    python benchmarks/step.py --device cuda --shape 135M --alone grpo ar nthr   # what a regulator costs

Both train the embedded model in float32, 16 prompts × 8 responses to an optimizer step, without KL. With ``--shape`` it
is a model of that shape with random weights, 64 × 8 responses of 256 tokens, in bfloat16 with float32 weights for the
optimizer, each trainer's own way.

The trainers take turns, a step each, so that whatever else the machine does hits both. The first row is training as it
is: responses end where the model ends them, and poise leaves out of the update what has no advantage. In the second
(``--fixed-length``) no response ends early and all have an advantage, so that both do the same work.

TRL runs at the fastest setting that we found (see ``trl_config``), through its default engine, transformers' generate,
or (``--trl-engine vllm``) vLLM in its process. ``--which poise`` or ``trl`` runs one of them alone: for its memory, and
the time from the start of the process to the end of the first step. A step of TRL is all that its loop does between two
optimizer steps, loading the batch included; a step of poise is ``Trainer.step``, in which the problems are even made
up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is here

import torch
import transformers
import trl
from datasets import Dataset
from measure import environment, since_start, write
from update import SHAPES, model_of

from poise.models.policy import EMBEDDED
from poise.runs.folder import RunFolder
from poise.tasks import Problem, Score, Split, Task
from poise.trainer import Trainer
from poise.training.building import build
from poise.training.config.schema import Config, load
from poise.training.steps import State

NEVER = 1_000_000  # an end token that no vocabulary has
LR = 2e-4
Rows = list[dict[str, dict[str, float]]]  # the figures of every step, by trainer
Kept = Callable[[Rows], None]  # called after every step


class Problems:
    """A task whose problems are the same for both trainers. ``spread`` makes every response differ from its group.

    A call of ``problems`` is a step; what the trainer takes for a seed would be different for TRL.
    """

    def __init__(self, task: Task, spread: bool) -> None:
        self.task, self.spread, self.name = task, spread, task.name
        self.steps = self.scored = 0

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:  # noqa: ARG002
        """The problems of the next step."""
        self.steps += 1
        return self.task.problems(split, self.steps)

    def score(self, problem: Problem, text: str) -> Score:
        """The task's own score; with ``spread``, computed all the same, but every other response counts as correct."""
        score = self.task.score(problem, text)
        self.scored += 1
        odd = self.scored % 2 == 1
        return Score(float(odd), odd, score.parts) if self.spread else score


class TimedTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, which says how long its last generation took, what of it with vLLM, and what came of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts: dict[str, float] = {}
        if self.use_vllm:
            self.clock(self.vllm_generation, "sync_weights", "push_s")
            self.clock(self.vllm_generation.llm, "generate", "vllm_s")

    def clock(self, owner: Any, method: str, part: str) -> None:
        """Time every call of this method, as a part of the generation."""
        timed = getattr(owner, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = now(self.args.device.type)
            made = timed(*args, **kwargs)
            self.parts[part] = self.parts.get(part, 0.0) + now(self.args.device.type) - start
            return made

        setattr(owner, method, run)

    def _generate(self, prompts: list[Any]) -> Any:
        self.parts.clear()
        start = now(self.args.device.type)
        made = super()._generate(prompts)
        self.generation_s = now(self.args.device.type) - start
        self.prompt_ids, completion_ids = made[0], made[1]
        self.lengths = [len(ids) for ids in completion_ids]
        return made


class Turns(transformers.TrainerCallback):  # type: ignore[misc]
    """Stops the clock after each of TRL's steps, and gives poise its turn."""

    def __init__(
        self,
        device: str,
        ours: Trainer | None,
        problems: Problems,
        prompt_ids: list[list[list[int]]] | None,
        kept: Kept,
    ) -> None:
        self.device, self.ours, self.problems, self.prompt_ids, self.kept = device, ours, problems, prompt_ids, kept
        self.theirs: TimedTrainer | None = None
        self.state = State()
        self.rows: Rows = []
        self.first_step_s = 0.0  # from the start of the process

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.before = at_rest(self.device)
        self.start = now(self.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Write down TRL's step, then run the same step with poise."""
        theirs = self.theirs
        seconds = now(self.device) - self.start
        assert theirs is not None
        if self.prompt_ids:
            assert theirs.prompt_ids == self.prompt_ids[state.global_step - 1], "the prompts differ"
        found = row(seconds, theirs.generation_s, theirs.lengths, 1.0) | theirs.parts
        rows = {"trl": found | memory(self.device, self.before)}
        if self.ours:
            rows["poise"] = self.our_step(state.global_step)
        self.keep(rows)
        self.on_train_begin()

    def keep(self, rows: dict[str, dict[str, float]]) -> None:
        """The figures of a step."""
        self.first_step_s = self.first_step_s or since_start()
        self.rows.append(rows)
        self.kept(self.rows)

    def our_step(self, step: int) -> dict[str, float]:
        """A step of poise, and its figures."""
        assert self.ours is not None
        before = at_rest(self.device)
        start = now(self.device)
        result = self.ours.step(self.state)
        seconds = now(self.device) - start
        self.state = result.state
        metrics = result.metrics | result.clock.metrics(int(result.metrics["tokens/sampled"]))
        assert self.problems.steps == step, "the problems differ"
        config = self.ours.config
        lengths = [metrics["rollout/length"]] * (config.prompts * config.group)
        found = row(seconds, metrics["time/rollout"], lengths, 1 - metrics["reward/no_spread"])
        parts = {name: value for name, value in metrics.items() if name.startswith("time/")}
        return found | parts | memory(self.device, before)


def row(seconds: float, generation: float, lengths: Sequence[float], updated: float) -> dict[str, float]:
    tokens = sum(lengths)
    return {
        "step_s": seconds,
        "generation_s": generation,
        "rest_s": seconds - generation,
        "s_per_1k": 1000 * seconds / tokens,
        "length": tokens / len(lengths),
        "updated": updated,
    }


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def at_rest(device: str) -> int:
    """Bytes that both trainers hold between steps."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def memory(device: str, before: int) -> dict[str, float]:
    """What a step took beyond that, and all that there was, at its peak."""
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"extra_gib": (peak - before) / 2**30, "peak_gib": peak / 2**30}


def our_trainer(config: Config, task: Task, endless: bool) -> Trainer:
    folder = RunFolder.create(config.run, config.model_dump(mode="json"))
    trainer = Trainer(config, folder, build(config, folder, task=task), quiet=True)
    if endless:
        trainer.policy.model.generation_config.eos_token_id = None
        trainer.policy.tokenizer.eos_token = None
        assert trainer.policy.end_tokens == []
    return trainer


def trl_config(config: Config, folder: Path, args: argparse.Namespace, endless: bool) -> Any:
    """The same training for TRL, at its fastest; what is not named here is TRL's default.

    ``dapo`` is the mean over the batch's tokens, as poise's. All responses are generated at once, and no forward pass
    is spent on old log-probabilities, since a generation batch is one optimizer step. The update takes ``micro``
    responses at a time: of 8, 16, 32, 64 and 128 on two busy cores, 16 and 32 took the least processor time, about a
    quarter less than 128; on CUDA 128 was the most that we tried. The optimizer is the fused AdamW that it takes by
    default. With vLLM, TRL by default scores the responses again, to correct for vLLM's rounding; only
    ``--trl-correction`` leaves that on.
    """
    responses, micro = config.prompts * config.group, args.trl_micro
    engine: dict[str, Any] = {}
    never: dict[str, Any] = {"eos_token_id": [NEVER]}
    if args.trl_engine == "vllm":
        never = {"ignore_eos": True} | ({"detokenize": False} if args.trl_no_text else {})
        engine = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": args.trl_memory,
            "vllm_max_model_length": config.rollout.max_prompt + config.rollout.max_tokens,
            "vllm_importance_sampling_correction": args.trl_correction,
        }  # fmt: skip
    return trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=responses // micro,
        num_generations=config.group,
        max_completion_length=config.rollout.max_tokens,
        temperature=config.rollout.temperature,
        generation_kwargs=never if endless else None,
        **engine,
        shuffle_dataset=False,
        beta=0.0,
        loss_type="dapo",
        epsilon=config.objective.clip_low,
        epsilon_high=config.objective.clip_high,
        learning_rate=config.optim.lr,
        lr_scheduler_type="constant",
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.grad_clip,
        bf16=config.dtype == "auto" and config.device == "cuda",
        fp16=False,
        gradient_checkpointing=False,  # on by default: slower, and there is memory enough
        torch_compile=args.trl_compile,
        use_cpu=config.device == "cpu",
        dataloader_pin_memory=config.device != "cpu",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
    )


def compare(config: Config, args: argparse.Namespace, endless: bool, kept: Kept) -> tuple[Rows, float]:
    """Figures of every step, of both or of one; seconds from the process's start to the end of the first."""
    task = config.task.build()
    drawn = Problems(task, endless)
    ours = our_trainer(config, drawn, endless) if args.which != "trl" else None
    if args.which == "poise":
        turns = Turns(config.device, ours, drawn, None, kept)
        for step in range(1, config.steps + 1):
            turns.keep({"poise": turns.our_step(step)})
    else:
        turns = train_theirs(config, task, drawn, ours, args, endless, kept)
    assert len(turns.rows) == config.steps
    for step_rows in turns.rows if endless else ():
        lengths = {name: figures["length"] for name, figures in step_rows.items()}
        assert set(lengths.values()) == {config.rollout.max_tokens}, f"lengths should be equal: {lengths}"
    if steps := [rows["poise"] for rows in turns.rows[args.warm_up :] if "poise" in rows]:
        print({k: round(statistics.median(s[k] for s in steps), 4) for k in steps[0] if k.startswith("time/")})
    return turns.rows, turns.first_step_s


def train_theirs(
    config: Config,
    task: Task,
    drawn: Problems,
    ours: Trainer | None,
    args: argparse.Namespace,
    endless: bool,
    kept: Kept,
) -> Turns:
    """Train with TRL, and with poise in turns if it is given."""
    steps = [list(islice(task.problems("train", step + 1), config.prompts)) for step in range(config.steps)]
    problems = [problem for step in steps for problem in step]
    rewards = Problems(task, endless)

    def reward(completions: list[list[dict[str, str]]], number: list[int], **_: Any) -> list[float]:
        texts = (completion[0]["content"] for completion in completions)
        return [rewards.score(problems[i], text).reward for i, text in zip(number, texts, strict=True)]

    expected = (
        [[ours.policy.encode(p.prompt) for p in step for _ in range(config.group)] for step in steps] if ours else None
    )
    turns = Turns(config.device, ours, drawn, expected, kept)
    prompts = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    theirs = TimedTrainer(
        model=str(EMBEDDED) if config.model == "embedded" else config.model,
        reward_funcs=reward,
        args=trl_config(config, Path(config.run) / "trl", args, endless),
        train_dataset=Dataset.from_dict({"prompt": prompts, "number": list(range(len(problems)))}),
        callbacks=[turns],
    )
    theirs.remove_callback(transformers.PrinterCallback)
    masters = next(iter(ours.checkpoints.master_weights.parameters.values())).dtype if ours else torch.float32
    assert next(theirs.model.parameters()).dtype == masters == torch.float32
    turns.theirs = theirs
    if endless:
        theirs.eos_token_ids = [NEVER]
    theirs.train()
    return turns


def alone(config: Config, regulators: list[str], warm_up: int, endless: bool) -> dict[str, list[dict[str, float]]]:
    """What each part of poise's steps takes, by regulator."""
    found = {}
    for text in regulators:
        ours = config.model_copy(update={"regulator": text, "run": f"{config.run}/{text}"})
        trainer = our_trainer(ours, Problems(ours.task.build(), endless), endless)
        results = [*trainer.steps(State())][warm_up:]
        found[text] = [result.clock.metrics(int(result.metrics["tokens/sampled"])) for result in results]
        parts = {name: statistics.median(part[name] for part in found[text]) for name in found[text][0]}
        print(f"{text:>10s}: " + ", ".join(f"{k.removeprefix('time/')} {v:.4g}" for k, v in parts.items()), flush=True)
    return found


def random_model(shape: str, folder: str) -> Path:
    """A folder with a model of this shape and the embedded model's tokenizer."""
    path = Path(folder) / "model"
    model_of(shape, "cpu", torch.float32).save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(path)
    return path


def summary(rows: Rows) -> dict[str, Any]:
    """Medians, and between what they lie. Ratios are those of the medians; their range is that of single steps."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "low": min(values), "high": max(values)}

    found: dict[str, Any] = {
        name: {key: spread([r[name][key] for r in rows]) for key in rows[0][name]} for name in sorted(rows[0])
    }
    if len(found) == 1:
        return found
    found["ratio"] = {
        key: spread([r["trl"][key] / r["poise"][key] for r in rows])
        | {"median": found["trl"][key]["median"] / found["poise"][key]["median"]}
        for key in ("step_s", "s_per_1k", "generation_s", "rest_s")
    }
    return found


def show(title: str, found: dict[str, Any]) -> None:
    print(f"\n{title}")
    columns = {
        "s/step": ("step_s", 2),
        "s/1k tokens": ("s_per_1k", 3),
        "generation s": ("generation_s", 2),
        "push s": ("push_s", 2),
        "vLLM s": ("vllm_s", 2),
        "rest s": ("rest_s", 2),
        "length": ("length", 1),
        "updated": ("updated", 2),
        "extra GiB": ("extra_gib", 1),
        "peak GiB": ("peak_gib", 1),
    }
    print(f"  {'':9s}" + "".join(f"{head:>22s}" for head in columns))

    def cell(value: dict[str, float] | None, digits: int) -> str:
        if value is None:
            return ""
        return f"{value['median']:.{digits}f} ({value['low']:.{digits}f}–{value['high']:.{digits}f})"

    for name in found:
        label = "TRL/poise" if name == "ratio" else name
        print(
            f"  {label:9s}" + "".join(f"{cell(found[name].get(key), digits):>22s}" for key, digits in columns.values()),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, help="write the figures here too, those of every step among them")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each trainer, per row")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them")
    parser.add_argument("--fixed-length", type=int, metavar="L", help="of the second row; 0: no such row")
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="random weights of this shape; all responses of one length"
    )
    parser.add_argument("--engine", default="auto", help="poise's: auto, native, transformers or vllm")
    parser.add_argument("--which", default="both", choices=["both", "poise", "trl"], help="of the trainers")
    parser.add_argument("--prompts", type=int, help="of a step of a --shape (64)")
    parser.add_argument("--trl-engine", default="generate", choices=["generate", "vllm"], help="what TRL samples with")
    parser.add_argument("--trl-memory", type=float, default=0.3, help="the share of the device's memory for TRL's vLLM")
    parser.add_argument(
        "--trl-correction", action="store_true", help="leave TRL's importance weights for vLLM on: a pass more"
    )
    parser.add_argument("--trl-no-text", action="store_true", help="with vLLM and one length: no text, only tokens")
    parser.add_argument("--trl-compile", action="store_true", help="TRL with torch.compile (its default is without)")
    parser.add_argument("--alone", nargs="+", metavar="REGULATOR", help="only poise, with these, one after the other")
    parser.add_argument("--only-fixed", action="store_true", help="no first row")
    parser.add_argument(
        "--trl-micro", type=int, help="responses per forward pass of TRL's update (CPU: 16, CUDA: 128, the fastest)"
    )
    args = parser.parse_args()
    args.trl_micro = args.trl_micro or (128 if args.device == "cuda" else 16)
    if args.fixed_length is None:
        args.fixed_length = 256 if args.shape else 112
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    figures: dict[str, Any] = {
        **environment(args.device), "steps": args.steps, "warm_up": args.warm_up, "trl_micro": args.trl_micro,
        "arguments": {name: str(value) for name, value in vars(args).items() if name != "json"},
    }  # fmt: skip
    versions = ", ".join(f"{package} {version}" for package, version in figures["versions"].items())
    print(f"{versions} on {figures['device']}")
    for name, length in (("sampled", 0), ("fixed", args.fixed_length)):
        if args.only_fixed or args.shape if name == "sampled" else not length:
            continue
        with tempfile.TemporaryDirectory() as folder:
            count = (args.prompts or 64) if args.shape else 16
            size = (
                [f"model={random_model(args.shape, folder)}", f"prompts={count}"] if args.shape else ["dtype=float32"]
            )
            config = load(
                "tiny",
                [
                    f"run={folder}/run", f"steps={args.warm_up + args.steps}", f"device={args.device}", *size,
                    f"optim.lr={LR}", "rollouts_every=0", f"rollout.engine={args.engine}",
                    *([f"rollout.max_tokens={length}"] if length else []),
                    f"compile={args.device == 'cuda'}",  # as a longer run would by itself
                ],
            )  # fmt: skip
            assert (config.prompts, config.group) == (count, 8)
            if args.alone:
                figures[name] = alone(config, args.alone, args.warm_up, endless=bool(length))
                continue
            rows, first = compare(
                config, args, bool(length), lambda done: write(args.json, {**figures, "steps_so_far": done}, quiet=True)
            )
        warm_up, measured = rows[: args.warm_up], rows[args.warm_up :]
        found = summary(measured)
        figures[name] = found | {"each": measured, "warm_up_each": warm_up, "first_step_s": first}
        print(f"{first:.1f} s from the start of the process to the end of the first step")
        title = (
            f"all responses {length} tokens long" if length else f"sampled, at most {config.rollout.max_tokens} tokens"
        )
        show(
            f"{title}; {config.prompts} prompts × {config.group}, medians of {args.steps} (lowest–highest)",
            found,
        )
    write(args.json, figures)


if __name__ == "__main__":
    main()
