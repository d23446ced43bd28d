"""What a comparison's folder remembers, so that the same command goes on, and another one is refused.

plan.json          the variants and seeds of the plan, with how many seeds results were shown, and which versions of the
                   user's code may stand beside today's
arms/…/seed-0/     the runs, ordinary run folders
logs/              what each run has said
failures.json      the runs that ended without a result, with the last lines of their logs
comparison.json    the results
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poise._lib.errors import short
from poise._lib.files import dumps, read_json, replacing
from poise._lib.user_code import Code, edited
from poise.comparison.plan import Plan, PlannedRun
from poise.config.documents import ConfigError, Document
from poise.config.run_settings import differences
from poise.runs.folder import RunFolder
from poise.runs.listing import PLAN
from poise.tasks import data_fingerprint

ANOTHER = "or begin another comparison with run=DIR"


def check(plan: Plan, *, trust_changed: bool = False) -> None:
    """Refuse a folder that holds something else, or a comparison whose runs would not fit this plan.

    With ``trust_changed``, runs that were trained with other versions of the user's code fit.
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
    elif any(plan.folder.glob("arms/*/seed-*/config.json")):  # else there is nothing to be compared with
        _check_plan(plan, recorded)
        _check_runs(plan)
        if not trust_changed:
            _check_code(plan, recorded.get("accepted", []))


def _check_plan(plan: Plan, recorded: Document) -> None:
    """Refuse changed settings, arms and seeds that are missing, and rates or tuning seeds that were changed."""
    there = f"the comparison in {plan.folder}"
    before = recorded["variants"]
    now = {variant.name: variant.identity for arm in plan.arms for variant in arm.variants}
    for name, saved in before.items():
        if name not in now:
            raise ConfigError(
                [f"{there} also has the arm {name!r}, and a result is never dropped: name it too, {ANOTHER}"]
            )
        for key, old, new in differences(saved, now[name]):
            raise ConfigError(
                [
                    f"{key} = {short(new)}, but {there} has {short(old)}: its runs could not be compared with new "
                    f"ones; leave {key} as it was, {ANOTHER}"
                ]
            )
    if missing := sorted(set(recorded["seeds"]) - set(plan.seeds)):
        raise ConfigError(
            [
                f"{there} also has seed {missing[0]}, and a result is never dropped: add seeds instead of taking some "
                f"away, {ANOTHER}"
            ]
        )
    rates = [[variant.name in before for variant in arm.variants] for arm in plan.arms]
    if recorded["tuning_seeds"] != list(plan.tuning_seeds) or any(any(known) > all(known) for known in rates):
        raise ConfigError(
            [
                f"{there} was begun with other learning rates, or another tune=N: an arm might get another rate, and "
                f"a result is never dropped; leave them as they were, {ANOTHER}"
            ]
        )


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


def _check_code(plan: Plan, accepted: list[Code]) -> None:
    """Refuse a run that was trained with a version of the user's code that is neither today's nor accepted."""
    for run, code in _other_code(plan):
        if code not in accepted:
            raise ConfigError(
                [
                    f"{', '.join(edited(code, run.config.code))}: this code was edited since {run.folder} was trained, "
                    f"and one arm would mix both versions: put it back, {ANOTHER}; or move the folder away, and the "
                    "same command trains this run anew; or go on knowingly with --trust-changed"
                ]
            )


def _other_code(plan: Plan) -> list[tuple[PlannedRun, Code]]:
    """The runs that were trained with another version of the user's code than today's, and that version."""
    runs = (run for run in plan.all_runs() if run.config.code)
    codes = ((run, code) for run in runs for code in RunFolder(run.folder).code_versions())
    return [(run, code) for run, code in codes if code != run.config.code]


def mixed_code(plan: Plan) -> dict[str, list[str]]:
    """The files of the user's code that were edited between the runs of a variant, by the variant's name."""
    return {run.variant.name: edited(code, run.config.code) for run, code in _other_code(plan)}


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


def write(plan: Plan, looks: Sequence[int] | None = None) -> None:
    """Remember a plan that passed ``check``, and the ``looks`` at its results; None: as they were."""
    variants = {variant.name: variant.identity for arm in plan.arms for variant in arm.variants}
    looks = read_looks(plan) if looks is None else looks
    accepted = {repr(code): code for _, code in _other_code(plan)}  # ``check`` has passed
    data = {"variants": variants, "seeds": plan.seeds, "tuning_seeds": plan.tuning_seeds, "looks": looks}
    with replacing(plan.folder / PLAN) as file:
        file.write(dumps({**data, **({"accepted": list(accepted.values())} if accepted else {})}, indent=1))


def read_looks(plan: Plan) -> list[int]:
    """The numbers of seeds with which results were shown so far."""
    looks = (_read(plan.folder) or {}).get("looks", [])
    return [look for look in looks if type(look) is int] if isinstance(looks, list) else []


def _read(folder: Path) -> Document | None:
    path = folder / PLAN
    if not path.exists():
        return None
    try:
        data = read_json(path)
    except ValueError:
        data = None
    match data:
        case {"variants": dict(variants), "seeds": list(), "tuning_seeds": list()} if all(
            isinstance(variant, dict) for variant in variants.values()
        ):
            return dict(data)
    raise ConfigError([f"{path} does not hold a plan as poise writes it: put the file back from a copy, {ANOTHER}"])
