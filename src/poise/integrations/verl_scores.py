"""Scores from hidden states inside verl (NTHR). Workers compute them in the pass for the old log-probabilities.

The trainer calls ``request``, which adds entries for the workers to the batch, and orders the rows so that each group
goes to one worker. During the pass over its rows, a worker stores the hidden states of its response tokens and a copy
of the output weight, which is whole while the head runs, even if verl shards it. Then the worker scores its groups, and
puts one score per token into verl's queue, together with the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
import transfer_queue as tq
from torch import Tensor
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import response_from_nested, response_to_nested

from poise.batch import TokenBatch
from poise.integrations.demands import CannotRegulateError
from poise.lm_head import Head
from poise.regulators import parse
from poise.regulators.base import scorers

SCORES = "poise_scores"  # the prefix of fields in verl's queue: poise_scores0 for the first regulator with scores
_REGULATOR, _CORRECT_AT, _ROW = "poise_regulator", "poise_correct_at", "poise_row"
_SPLIT_GROUPS = "poise_split_groups"
_ACTORS = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)
COMPARED = 64  # tokens per micro-batch whose log-probabilities are compared with verl's


def is_correct(rewards: Tensor, correct_at: float | None) -> Tensor:
    """Whether each reward is at least ``correct_at``. If this is None, rewards must be 1 (correct), 0 or −1."""
    if correct_at is not None:
        return rewards >= correct_at
    odd = (rewards != 1) & (rewards != 0) & (rewards != -1)
    if odd.any():
        raise CannotRegulateError(
            f"a reward is {float(rewards[odd][0]):g}, but poise reads only 1 as correct, and 0 and -1 as wrong: "
            "set trainer.v1.poise_sync.correct_at, the smallest reward of a correct response"
        )
    return rewards == 1


def request(batch: Any, processes: int, regulator: str, correct_at: float | None) -> Any:
    """Prepare the batch for a pass that computes scores. With several workers, reorder the rows."""
    split_groups: list[str] = []
    if processes > 1:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["uid"])
        load = calculate_workload(torch.tensor([tag["seq_len"] for tag in batch.tags])).tolist()
        order, split_groups = together(owners(batch, list(data["uid"])), load, processes)
        batch = batch.select_keys([batch.keys[row] for row in order])
    batch.extra_info |= {_REGULATOR: regulator, _CORRECT_AT: correct_at, _SPLIT_GROUPS: split_groups}
    return batch


def owners(batch: Any, uids: Sequence[Any]) -> list[str]:
    """The group of each row. verl pads batches with empty rows that share a uid; each becomes its own group."""
    rows = zip(batch.keys, batch.tags, uids, strict=True)
    return [key if tag.get("is_padding", False) else str(uid) for key, tag, uid in rows]


def together(owners: Sequence[str], load: Sequence[float], processes: int) -> tuple[list[int], list[str]]:
    """Order the rows so that each worker's block has whole groups and about the same load.

    Returns the order and the groups that are split: all blocks have the same number of rows, so groups of unequal size
    may not fit.
    """
    groups: dict[str, list[int]] = {}
    for row, owner in enumerate(owners):
        groups.setdefault(owner, []).append(row)
    room = len(owners) // processes
    ways = [_blocks(groups, load, processes, room, even=even) for even in (True, False)]
    blocks, cut = min(ways, key=lambda way: len(way[1]))  # the even one, if both split the same number of groups
    rest = [row for owner in cut for row in groups[owner]]
    for block in blocks:
        while len(block) < room:
            block.append(rest.pop())
    return [row for block in blocks for row in block], cut


def _blocks(
    groups: dict[str, list[int]], load: Sequence[float], processes: int, room: int, *, even: bool
) -> tuple[list[list[int]], list[str]]:
    """Put whole groups into blocks, largest first. Returns the blocks, and the groups that do not fit.

    A group goes to the block with the lightest load (``even``), or to the block with the least free space.
    """
    blocks: list[list[int]] = [[] for _ in range(processes)]
    loads, cut = [0.0] * processes, []
    for owner, rows in sorted(groups.items(), key=lambda item: (-len(item[1]), -sum(load[row] for row in item[1]))):
        fits = [place for place in range(processes) if len(blocks[place]) + len(rows) <= room]
        if not fits:
            cut.append(owner)
            continue
        place = min(fits, key=lambda place: loads[place] if even else -len(blocks[place]))
        blocks[place] += rows
        loads[place] += sum(load[row] for row in rows)
    return blocks, cut


def use_scoring_workers(workers: dict[Any, Any]) -> None:
    """Replace the actor worker in verl's table of worker classes by a scoring worker."""
    for role in _ACTORS:
        if role not in workers:
            continue
        theirs = workers[role].__ray_actor_class__
        if theirs is ActorRolloutRefWorker:
            workers[role] = ray.remote(ScoringActorWorker)
        elif not issubclass(theirs.actor_worker_cls, ScoringWorker):
            raise CannotRegulateError(
                f"the trainer's worker {theirs.__name__} computes no scores: set its actor_worker_cls to "
                "poise.integrations.verl_scores.ScoringWorker, or to a subclass of it"
            )


class _States:
    """The hidden states of a worker's response tokens, and its head, collected while verl runs its micro-batches."""

    def __init__(self, mask: Tensor, config: Any, temperature: float) -> None:
        self.mask = mask  # (B, T)
        self._places = mask.flatten().cumsum(0).view_as(mask) - 1  # (B, T): the index of a token's state
        self._config, self._temperature = config, temperature
        self._gaps: list[Tensor] = []
        self._head_input: Tensor | None = None
        self._states: Tensor | None = None  # (N, d)
        self.head: Head | None = None

    def see(self, output: Any, inputs: tuple[Any, ...]) -> None:
        """Keep the input of the output layer, which is the last hidden states, and copy the head.

        This hook runs before the output layer, when the layer's weight is whole.
        """
        self._head_input = inputs[0].detach()
        if self.head is None:
            head = Head.of(output, self._config, self._temperature)
            bias = None if head.bias is None else head.bias.detach().clone()
            self.head = replace(head, weight=head.weight.detach().clone(), bias=bias)

    def keep(self, model_output: Any, data: Any, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        """Store the states of a micro-batch's response tokens. verl calls this in place of its loss."""
        if self._head_input is None or self.head is None:
            raise CannotRegulateError("the model did not run its output layer, so poise has no hidden states to score")
        head_input, self._head_input = self._head_input, None
        offsets = data["input_ids"].offsets()
        before = offsets.diff() - data["response_mask"].offsets().diff() - 1  # the index of the first token's state
        packed = tu.get_non_tensor_data(data, "use_remove_padding", True)
        begin = offsets[:-1] if packed else torch.arange(len(offsets) - 1, device=offsets.device) * head_input.shape[1]
        rows = data[_ROW]
        row, column = self.mask[rows].nonzero(as_tuple=True)
        hidden = head_input.flatten(0, -2)[(begin + before)[row] + column].to(self.head.weight.dtype)
        if self._states is None:
            self._states = hidden.new_empty(int(self.mask.sum()), hidden.shape[-1])
        self._states[self._places[rows[row], column]] = hidden
        places = (offsets[:-1] + before)[row] + column
        self._compare(hidden, model_output["log_probs"].values()[places], data["input_ids"].values()[places + 1])
        return torch.zeros((), device=head_input.device), {}

    def _compare(self, hidden: Tensor, logp: Tensor, targets: Tensor) -> None:
        """Record the differences of log-probabilities from these states to verl's, for some tokens."""
        assert self.head is not None
        places = torch.linspace(0, len(hidden) - 1, min(COMPARED, len(hidden)), device=hidden.device).long()
        ours = self.head(hidden[places]).log_softmax(-1).gather(-1, targets[places, None])[:, 0]
        self._gaps.append((ours - logp[places].float()).abs())

    def check(self) -> None:
        """Raise an error if log-probabilities from the collected states differ from verl's on average."""
        gaps = torch.cat(self._gaps)
        gap = float(gaps.mean()) if len(gaps) else 0.0
        assert self._states is not None
        if not gap <= (1e-3 if self._states.dtype == torch.float32 else 0.1):
            raise CannotRegulateError(
                "the model does something at its output layer that poise does not support: log-probabilities from its "
                f"hidden states differ by {gap:.2g} from verl's"
            )

    def hidden(self, rows: Tensor) -> Tensor:
        """The states (n, T, d) of some rows. Where the mask is False, the states are those of other tokens."""
        assert self._states is not None
        return self._states[self._places[rows].clamp(min=0)]


class ScoringWorker(TrainingWorker):  # type: ignore[misc]
    """verl's training worker. Its forward pass also scores tokens if the trainer requests scores."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)  # type: ignore[untyped-decorator, unused-ignore]
    def infer_batch(self, data: Any) -> Any:
        """Extend verl's method: also return scores if the trainer requests them."""
        text = tu.pop(data, _REGULATOR, default=None)
        if text is None:
            return super().infer_batch(data)
        correct_at, split_groups = tu.pop(data, _CORRECT_AT, default=None), set(tu.pop(data, _SPLIT_GROUPS, default=()))
        lengths = data["response_mask"]
        mask = lengths.to_padded_tensor(0).bool().to(self.device_name)
        states = _States(mask, self.model_config.hf_config.get_text_config(), float(tu.get(data, "temperature")))
        output = self._run(data, states)
        states.check()
        parts = scorers(parse(text))
        rewards = _padded(data["rm_scores"], mask).float().sum(1)
        batch = TokenBatch(
            _padded(response_from_nested(output["log_probs"], lengths), mask).float(),
            mask,
            torch.zeros(len(mask), device=mask.device),  # unknown at this point
            groups=group_numbers(list(data["uid"]), split_groups).to(mask.device),
            rewards=rewards,
            correct=is_correct(rewards, correct_at) if any("correct" in part.needs for part in parts) else None,
            hidden=states.hidden,
            head=states.head,
            targets=_padded(data["responses"], mask),
        )
        cut = torch.tensor([str(uid) in split_groups for uid in data["uid"]], device=mask.device)[:, None]
        with torch.no_grad():
            for number, part in enumerate(parts):
                scores = part.scores(batch)
                scores = scores if part.scope == "token" else scores.masked_fill(cut, torch.nan)
                output[f"{SCORES}{number}"] = response_to_nested(scores.cpu(), lengths)
        return output

    def _run(self, data: Any, states: _States) -> Any:
        """Run verl's forward pass over all rows; ``states`` stores the hidden states of every micro-batch."""
        data[_ROW] = torch.arange(len(data))
        tu.assign_non_tensor(data, compute_loss=True)
        head = self.engine.module.get_output_embeddings()
        hook = getattr(head, "_fsdp_wrapped_module", head).register_forward_pre_hook(states.see)
        loss: Any = self.loss_fn
        self.loss_fn: Any = states.keep
        try:
            return super().infer_batch(data)
        finally:
            self.loss_fn = loss
            hook.remove()


class ScoringActorWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's combined actor, rollout and reference worker; its actor also computes scores."""

    actor_worker_cls = ScoringWorker


def _padded(nested: Tensor, mask: Tensor) -> Tensor:
    return nested.to_padded_tensor(0, output_size=tuple(mask.shape)).to(mask.device)


def group_numbers(owners: Sequence[Any], split_groups: Collection[str] = ()) -> Tensor:
    """Group numbers (B,). Each row of a group in ``split_groups`` becomes its own group."""
    numbers: dict[tuple[str, int], int] = {}
    keys = [(str(owner), row if str(owner) in split_groups else -1) for row, owner in enumerate(owners)]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
