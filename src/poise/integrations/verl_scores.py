"""Scores from hidden states inside verl (NTHR): the workers compute them in the pass of the old log-probabilities.

The trainer asks for them by ``request``, which adds entries to the batch that goes to the workers, and orders the rows
so that whole groups go to the same worker. A worker keeps the hidden states of its response tokens until the pass over
its rows ends, and a copy of the output weight, which is whole while the head runs, however verl shards it. Then it
scores its groups, and one number per token goes into verl's queue, beside the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
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

SCORES = "poise_scores"  # the fields in verl's queue: poise_scores0 for the first regulator that scores, and so on
_REGULATOR, _CORRECT_AT, _APART, _ROW = "poise_regulator", "poise_correct_at", "poise_apart", "poise_row"
_ACTORS = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)
COMPARED = 64  # tokens of a micro-batch whose log-probabilities are compared with verl's


def is_correct(rewards: Tensor, correct_at: float | None) -> Tensor:
    """Which responses are correct: their reward reaches ``correct_at``; None: it is 1, and others have 0 or −1."""
    if correct_at is not None:
        return rewards >= correct_at
    odd = (rewards != 1) & (rewards != 0) & (rewards != -1)
    if odd.any():
        raise CannotRegulateError(
            f"a reward is {float(rewards[odd][0]):g}, so it does not say what is correct (1; else 0 or -1): set "
            "correct_at beside regulator, in trainer.v1.poise_sync; a response is correct if its reward reaches it"
        )
    return rewards == 1


def request(batch: Any, processes: int, regulator: str, correct_at: float | None) -> Any:
    """The batch for a pass with scores: its rows in another order, if there are several workers."""
    apart: list[str] = []
    if processes > 1:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["uid"])
        load = calculate_workload(torch.tensor([tag["seq_len"] for tag in batch.tags])).tolist()
        order, apart = together(owners(batch, list(data["uid"])), load, processes)
        batch = batch.select_keys([batch.keys[row] for row in order])
    batch.extra_info |= {_REGULATOR: regulator, _CORRECT_AT: correct_at, _APART: apart}
    return batch


def owners(batch: Any, uids: Sequence[Any]) -> list[str]:
    """The group of each row. verl pads batches with rows without a token, all of one uid: each is alone."""
    rows = zip(batch.keys, batch.tags, uids, strict=True)
    return [key if tag.get("is_padding", False) else str(uid) for key, tag, uid in rows]


def together(owners: Sequence[str], load: Sequence[float], processes: int) -> tuple[list[int], list[str]]:
    """An order of the rows in which each worker's block of rows has whole groups, as even a load as that allows.

    Blocks have the same number of rows. Groups of unequal size may not fit, or no place is found for them; those that
    are cut are returned.
    """
    groups: dict[str, list[int]] = {}
    for row, owner in enumerate(owners):
        groups.setdefault(owner, []).append(row)
    room = len(owners) // processes
    ways = [_blocks(groups, load, processes, room, even=even) for even in (True, False)]
    blocks, cut = min(ways, key=lambda way: len(way[1]))  # the even one if neither cuts fewer
    rest = [row for owner in cut for row in groups[owner]]
    for block in blocks:
        while len(block) < room:
            block.append(rest.pop())
    return [row for block in blocks for row in block], cut


def _blocks(
    groups: dict[str, list[int]], load: Sequence[float], processes: int, room: int, *, even: bool
) -> tuple[list[list[int]], list[str]]:
    """Blocks of whole groups, the largest first, and the groups that found no place.

    A group goes where the load is lightest (``even``), or where it leaves the least room.
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
    """Replace verl's actor worker, in its table of worker classes, by one that scores."""
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
        self._places = mask.flatten().cumsum(0).view_as(mask) - 1  # (B, T) where a token's state is kept
        self._config, self._temperature = config, temperature
        self._gaps: list[Tensor] = []
        self._seen: Tensor | None = None
        self._kept: Tensor | None = None  # (N, d)
        self.head: Head | None = None

    def see(self, output: Any, inputs: tuple[Any, ...]) -> None:
        """A hook before the output layer: its input is the last hidden states, and its weight is whole now."""
        self._seen = inputs[0].detach()
        if self.head is None:
            head = Head.of(output, self._config, self._temperature)
            bias = None if head.bias is None else head.bias.detach().clone()
            self.head = replace(head, weight=head.weight.detach().clone(), bias=bias)

    def keep(self, model_output: Any, data: Any, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        """In the place of verl's loss, once for each micro-batch: keep the states of its response tokens."""
        if self._seen is None or self.head is None:
            raise CannotRegulateError("the model did not run its output layer, so poise has no hidden states to score")
        seen, self._seen = self._seen, None
        offsets = data["input_ids"].offsets()
        before = offsets.diff() - data["response_mask"].offsets().diff() - 1  # the first token's state stands here
        packed = tu.get_non_tensor_data(data, "use_remove_padding", True)
        begin = offsets[:-1] if packed else torch.arange(len(offsets) - 1, device=offsets.device) * seen.shape[1]
        rows = data[_ROW]
        row, column = self.mask[rows].nonzero(as_tuple=True)
        found = seen.flatten(0, -2)[(begin + before)[row] + column].to(self.head.weight.dtype)
        if self._kept is None:
            self._kept = found.new_empty(int(self.mask.sum()), found.shape[-1])
        self._kept[self._places[rows[row], column]] = found
        verls = (offsets[:-1] + before)[row] + column
        self._compare(found, model_output["log_probs"].values()[verls], data["input_ids"].values()[verls + 1])
        return torch.zeros((), device=seen.device), {}

    def _compare(self, hidden: Tensor, logp: Tensor, targets: Tensor) -> None:
        """Note how far log-probabilities from these states are from verl's, for some tokens."""
        assert self.head is not None
        places = torch.linspace(0, len(hidden) - 1, min(COMPARED, len(hidden)), device=hidden.device).long()
        ours = self.head(hidden[places]).log_softmax(-1).gather(-1, targets[places, None])[:, 0]
        self._gaps.append((ours - logp[places].float()).abs())

    def check(self) -> None:
        """Raise unless our log-probabilities are verl's on average: the model may do more behind its head."""
        gaps = torch.cat(self._gaps)
        gap = float(gaps.mean()) if len(gaps) else 0.0
        assert self._kept is not None
        if not gap <= (1e-3 if self._kept.dtype == torch.float32 else 0.1):
            raise CannotRegulateError(
                "the model does something at its output layer that poise does not support: log-probabilities from its "
                f"hidden states differ by {gap:.2g} from verl's"
            )

    def hidden(self, rows: Tensor) -> Tensor:
        """(n, T, d) for some rows; a state of another token where the mask is False."""
        assert self._kept is not None
        return self._kept[self._places[rows].clamp(min=0)]


class ScoringWorker(TrainingWorker):  # type: ignore[misc]
    """verl's training worker; its forward pass also scores tokens, if the trainer asks for it."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)  # type: ignore[untyped-decorator, unused-ignore]
    def infer_batch(self, data: Any) -> Any:
        """verl's method; with scores beside log-probabilities and entropies."""
        text = tu.pop(data, _REGULATOR, default=None)
        if text is None:
            return super().infer_batch(data)
        correct_at, apart = tu.pop(data, _CORRECT_AT, default=None), set(tu.pop(data, _APART, default=()))
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
            torch.zeros(len(mask), device=mask.device),  # not known yet
            groups=_groups(list(data["uid"]), apart).to(mask.device),
            rewards=rewards,
            correct=is_correct(rewards, correct_at) if any("correct" in part.needs for part in parts) else None,
            hidden=states.hidden,
            head=states.head,
            targets=_padded(data["responses"], mask),
        )
        cut = torch.tensor([str(uid) in apart for uid in data["uid"]], device=mask.device)[:, None]
        with torch.no_grad():
            for number, part in enumerate(parts):
                found = part.scores(batch)
                found = found if part.scope == "token" else found.masked_fill(cut, torch.nan)
                output[f"{SCORES}{number}"] = response_to_nested(found.cpu(), lengths)
        return output

    def _run(self, data: Any, states: _States) -> Any:
        """verl's forward pass over all rows, in which ``states`` sees every micro-batch."""
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
    """verl's worker of actor, rollout and reference, with an actor that scores."""

    actor_worker_cls = ScoringWorker


def _padded(nested: Tensor, mask: Tensor) -> Tensor:
    return nested.to_padded_tensor(0, output_size=tuple(mask.shape)).to(mask.device)


def _groups(owners: Sequence[Any], apart: set[str]) -> Tensor:
    """(B,) group numbers; a row of a group that is not all here is alone."""
    numbers: dict[tuple[str, int], int] = {}
    keys = [(str(owner), row if str(owner) in apart else -1) for row, owner in enumerate(owners)]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
