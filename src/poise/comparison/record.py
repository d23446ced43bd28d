"""What a comparison's folder remembers, so that the same command goes on, and another one is refused.

plan.json          the variants and seeds of all plans so far
arms/…/seed-0/     the runs, ordinary run folders
logs/              what each run has said
failures.json      the runs that ended without a result, with the last lines of their logs
comparison.json    the results
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from poise._lib.errors import short
from poise._lib.files import dumps, read_json, replacing
from poise.comparison.arms import RATE, Variant, shown_rate
from poise.comparison.plan import Plan, PlannedRun
from poise.config.differences import differences
from poise.config.documents import ConfigError, Document
from poise.runs.folder import RunFolder
from poise.runs.listing import PLAN
from poise.tasks import data_fingerprint

ANOTHER = "or begin another comparison with run=DIR"


def check(plan: Plan) -> Plan:
    """The plan, with the folders of runs that are there already.

    A folder that holds something else is refused, and so is a comparison whose runs would not fit this plan.
    """
    if plan.folder.exists() and not plan.folder.is_dir():
        raise ConfigError([f"run={plan.folder} is a file: choose another run=DIR"])
    recorded = _read(plan.folder)
    if recorded is None:
        others = [path.name for path in plan.folder.iterdir()] if plan.folder.is_dir() else []
        others = [name for name in others if name != "owner.json" and not name.startswith(".tmp-")]
        if others:
            what = "is the folder of a run" if "config.json" in others else "is not empty, and holds no comparison"
            raise ConfigError([f"run={plan.folder} {what}: choose another run=DIR"])
        return plan
    now = {variant.name: variant.identity for arm in plan.arms for variant in arm.variants}
    former: dict[str, str] = {}
    for name, saved in recorded["variants"].items():
        for key, before, after in differences(saved, now.get(name, saved)):
            raise ConfigError(
                [
                    f"{key} = {short(after)}, but the comparison in {plan.folder} has {short(before)}: its runs could "
                    f"not be compared with new ones; leave {key} as it was, {ANOTHER}"
                ]
            )
        same = [other for other, identity in now.items() if not [*differences(saved, identity)]]
        if not same and RATE not in name and (rate := _rate_alone(saved, now.values())):
            raise ConfigError(
                [
                    f"the comparison in {plan.folder} was begun without learning rates to choose from: its arm "
                    f"{name!r} has {RATE}={shown_rate(rate)}, and a result is never dropped; add this rate to "
                    f"{RATE}, {ANOTHER}"
                ]
            )
        if not same:
            raise ConfigError(
                [
                    f"the comparison in {plan.folder} also has the arm {name!r}, and a result is never dropped: "
                    f"name it too, {ANOTHER}"
                ]
            )
        former[same[0]] = name  # an axis that was added changes the names of arms
    if missing := sorted(set(recorded["seeds"]) - set(plan.seeds)):
        raise ConfigError(
            [
                f"the comparison in {plan.folder} also has seed {missing[0]}, and a result is never dropped: add seeds "
                f"instead of taking some away, {ANOTHER}"
            ]
        )
    plan = replace(plan, former=former)
    _check_runs(plan)
    return plan


def _rate_alone(saved: Document, now: Iterable[Document]) -> float | None:
    """The learning rate of a saved variant, if one of today's differs from it in nothing else."""
    for identity in now:
        for key, before, _ in (found := [*differences(saved, identity)]):
            if key == RATE and len(found) == 1:
                return float(before)
    return None


def _check_runs(plan: Plan) -> None:
    """Refuse a run in the folder that has other settings than the plan gives it: it would count as what it is not."""
    for run in plan.all_runs():
        if not (run.folder / "config.json").exists():
            continue
        _check_data(run)
        planned = run.config.model_dump(mode="json")
        for key, before, now in differences(RunFolder(run.folder).config | {"run": planned["run"]}, planned):
            raise ConfigError(
                [
                    f"the run in {run.folder} has {key} = {short(before)}, but the comparison plans {short(now)} for "
                    f"{run.name}: if its config.json was edited, undo that; otherwise move the folder away, and the "
                    "same command trains this run anew"
                ]
            )


def _check_data(run: PlannedRun) -> None:
    """Refuse a run that was trained and measured on other problems than its data hold now."""
    path, now = run.folder / "data.json", data_fingerprint(run.config.task.build())
    if path.exists() and now is not None and RunFolder(run.folder).read_json(path.name) != {"fingerprint": now}:
        raise ConfigError(
            [
                f"the data were edited since {run.folder} was trained, so that its problems are not those of new runs: "
                f"put the data back, {ANOTHER}; or move the folder away, and the same command trains this run anew"
            ]
        )


def write(plan: Plan) -> None:
    """Remember this plan."""
    recorded = _read(plan.folder) or {"variants": {}, "seeds": []}
    new = (variant for arm in plan.arms for variant in arm.variants if variant.name not in plan.former)
    variants = {variant.name: variant.identity for variant in new}
    seeds = sorted({*recorded["seeds"], *plan.seeds})
    with replacing(plan.folder / PLAN) as file:
        file.write(dumps({"variants": recorded["variants"] | variants, "seeds": seeds}, indent=1))


def log_of(plan: Plan, variant: Variant, seed: int) -> Path:
    """Where a run's words are written."""
    return plan.folder / "logs" / f"{plan.place(variant)}-seed-{seed}.log"


def _read(folder: Path) -> Document | None:
    path = folder / PLAN
    if not path.exists():
        return None
    try:
        data = read_json(path)
    except ValueError:
        data = None
    match data:
        case {"variants": dict(variants), "seeds": list()} if all(isinstance(v, dict) for v in variants.values()):
            begun = any(folder.glob("arms/*/seed-*/config.json"))  # else there is nothing to be compared with
            return dict(data) if begun else {"variants": {}, "seeds": []}
    raise ConfigError([f"{path} does not hold a plan as poise writes it: put the file back from a copy, {ANOTHER}"])
