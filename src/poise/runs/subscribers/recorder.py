"""Writes a run's environment and each step's metrics, responses and tokens into its folder."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from poise import __version__
from poise._lib.fingerprint import package_hash
from poise.batch import Phase, Prompt, Rows, TokenBatch
from poise.runs.folder import RunFolder
from poise.sampling.sampler import Sampler
from poise.sampling.trajectories import FIRST, Trajectory
from poise.tasks import Task, gold_answer
from poise.training.steps import State, StepResult

STARTS = ("package", "python", "torch", "transformers", "device", "threads")  # compared with the run's previous start


class Recorder:
    """Writes the metrics of each step, and every ``every`` steps the responses and tokens.

    ``sizes`` has the parameter counts. ``note`` shows differences from the run's previous start.
    """

    def __init__(
        self,
        folder: RunFolder,
        sampler: Sampler,
        every: int,
        sizes: dict[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self.folder, self.policy, self.task, self.every = folder, sampler.policy, sampler.task, every
        self.sizes, self.note = sizes, note

    def on_start(self, state: State) -> None:
        """Write ``environment.json``."""
        for line in write_start(self.folder, environment(self.policy.device) | self.sizes, state.step):
            self.note(line)

    def on_step(self, result: StepResult) -> None:
        """Write responses and tokens if they are due; then add the times to the metrics, and log the metrics."""
        step, batch = result.state.step, result.batch
        with result.clock("record"):
            if batch is not None and self.every and (step == 1 or step % self.every == 0):
                self.folder.save_rollouts(
                    step, response_records(step, result.trajectories, self.task, self.policy.read)
                )
                arrays = token_arrays(batch, [on_all_rows(phase, result.rows, batch) for phase in result.phases])
                self.folder.save_tokens(step, arrays, self.policy.texts(arrays["id"]))
        result.metrics.update(result.clock.metrics(int(result.metrics["tokens/sampled"])))
        self.folder.log(step, result.metrics)


def response_records(
    step: int, samples: Sequence[Trajectory], task: Task, read: Callable[[Prompt], str]
) -> list[dict[str, Any]]:
    """Return one record per response of a step: the problem, the text, and the verifier's score.

    ``gold`` is the right answer; ``answer`` is the answer that the verifier read. Unknown fields are omitted. ``read``
    returns the exact text of a prompt.
    """
    records, prompts = [], {prompt: read(prompt) for prompt in {each.prompt for each in samples}}  # a group shares one
    for sample in samples:
        gold, answer = gold_answer(task, sample.problem), sample.score.answer
        record = {
            "step": step,
            "problem": sample.problem.id,
            "difficulty": sample.problem.difficulty,
            "prompt": sample.problem.prompt,
            "read": prompts[sample.prompt],
            "text": sample.text,
            "reward": sample.score.reward,
            "correct": sample.score.correct,
            "parts": dict(sample.score.parts),
            "finished": sample.finished,
            **({"gold": gold} if gold is not None else {}),
            **({"answer": answer} if isinstance(answer, str) else {}),
            **({"environment": turns} if (turns := environment_turns(sample)) else {}),
            **({"role": sample.role} if sample.role != FIRST else {}),
            **({"notes": dict(sample.notes)} if sample.notes else {}),
        }
        records.append(record)
    return records


def environment_turns(sample: Trajectory) -> list[tuple[int, str]]:
    """The environment's messages between the replies, each with the number of the model's tokens before it."""
    texts: list[str] = []
    for before, message in pairwise(sample.messages):
        if message["role"] == "assistant":
            continue
        if before["role"] == "assistant":
            texts.append(message["content"])
        else:
            texts[-1] += "\n" + message["content"]
    ends = sample.own[:-1] & ~sample.own[1:]  # the model's tokens directly before a text of the environment
    return list(zip(sample.own.cumsum(0)[:-1][ends].tolist(), texts, strict=False))


def token_arrays(batch: TokenBatch, phases: Sequence[Phase]) -> dict[str, Tensor]:
    """Concatenate the tokens of all responses into arrays. Response i is ``start[i]:start[i + 1]`` of the other arrays.

    ``weight/NAME`` is the policy weight in phase NAME. A regulator's per-token values keep their own names.
    """
    mask = batch.mask
    assert batch.targets is not None
    assert batch.entropy is not None
    arrays = {
        "id": batch.targets[mask].int(),
        "logp": batch.old_logp[mask].float(),
        "entropy": batch.entropy[mask].float(),
        "advantage": batch.token_advantages[mask].float(),
        **{f"weight/{phase.name}": phase.policy[mask].float() for phase in phases},
        **{name: values[mask].float() for phase in phases for name, values in phase.tokens.items()},
    }
    lengths = mask.sum(1)
    arrays["start"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    return {name: values.cpu() for name, values in arrays.items()}


def on_all_rows(phase: Phase, rows: Rows, batch: TokenBatch) -> Phase:
    """Extend a phase of some rows to the whole batch. Other rows get weight 0 and no per-token values.

    If ``rows`` is a slice, the phase already covers all rows.
    """
    if isinstance(rows, slice):
        return phase

    def spread(values: Tensor, fill: float) -> Tensor:
        whole = torch.full(batch.mask.shape, fill, dtype=values.dtype, device=values.device)
        whole[rows] = values
        return whole

    tokens = {name: spread(values, torch.nan) for name, values in phase.tokens.items()}
    return Phase(phase.name, spread(phase.policy, 0.0), spread(phase.kl, 0.0), phase.metrics, tokens)


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and hardware that affect a run's results. ``package`` is a hash of poise's code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "poise": __version__,
        "python": platform.python_version(),
        "package": package_hash()[:12],
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "system": platform.system(),
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
    }


def write_start(folder: RunFolder, here: dict[str, Any], step: int) -> list[str]:
    """Write ``environment.json``: the environment from this step on, and the environments of earlier starts.

    Return notes about differences from the previous start.
    """
    saved, began = folder.read_json("environment.json"), folder.began().isoformat(timespec="seconds")
    last = {key: value for key, value in saved.items() if key != "earlier_starts"} if isinstance(saved, dict) else {}
    starts = saved.get("earlier_starts") if last else None
    earlier = [*(starts if isinstance(starts, list) else []), last] if last else []
    more = {"earlier_starts": earlier} if earlier else {}
    folder.write_json("environment.json", {**here, "began": began, "after_step": step, **more})
    differing = [key for key in STARTS if last and last.get(key) != here[key]]
    names = {"package": "the code of poise"}
    changes = ", ".join(
        f"{names.get(key, key)} {here[key]} instead of {last.get(key, 'an unknown one')}" for key in differing
    )
    return [f"changed since the last start: {changes}; results may differ"] if changes else []
