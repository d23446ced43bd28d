"""Writes ``plan.json``, and checks that a comparison's folder fits the plan: only the same comparison may continue.

plan.json          the plan (``described``); the seed counts at which results were shown; the registered plan, if any
arms/…/seed-0/     the runs, which are ordinary run folders
logs/              the output of each run
failures.json      the runs that ended without a result, with the last lines of their output
comparison.json    the results
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from poise._lib.errors import short
from poise._lib.files import SEAL, dumps, read_json, replacing, sealed, was_changed
from poise._lib.user_code import Code, edited
from poise.referee.compare import registration
from poise.referee.compare.plan import Plan, PlannedRun
from poise.referee.compare.statistics import LEVEL
from poise.runs.folder import RunFolder
from poise.runs.listing import PLAN
from poise.tasks import data_fingerprint
from poise.training.config.documents import ConfigError, Document
from poise.training.config.run_settings import differences

ANOTHER = "or start another comparison with run=DIR"
TEST = f"two-sided sign flips over seeds, Holm's correction over the arms that are no controls, level {LEVEL}"


def check(plan: Plan, *, trust_changed: bool = False) -> None:
    """Raise ConfigError if the folder has other contents, or a comparison whose runs do not fit this plan.

    With ``trust_changed``, runs with other versions of the user's code fit too.
    """
    if plan.folder.exists() and not plan.folder.is_dir():
        raise ConfigError(f"run={plan.folder} is a file: choose another run=DIR")
    earlier = _read(plan.folder)
    if earlier is None:
        others = [path.name for path in plan.folder.iterdir()] if plan.folder.is_dir() else []
        others = [name for name in others if name != "owner.json" and not name.startswith(".tmp-")]
        if others:
            what = "is the folder of a run" if "config.json" in others else "is not empty, and holds no comparison"
            raise ConfigError(f"run={plan.folder} {what}: choose another run=DIR")
        return
    if registered := earlier.get("registered"):
        if was_changed(registered) or SEAL not in registered:
            raise ConfigError(
                f"the plan registered in {plan.folder / PLAN} was edited since (its checksum does not match): restore "
                "the file"
            )
        _check_same(plan, registered, f"the plan registered in {plan.folder}", ("measure", "baseline", "test"))
    if _has_begun(plan):
        _check_same(plan, earlier, f"the comparison in {plan.folder}", ("measure.name", "measure.longer"))
        _check_runs(plan)
        if not trust_changed:
            _check_code(plan)


def register(plan: Plan) -> str:
    """Freeze a plan that passed ``check``, before its first run; return its checksum."""
    registered = read_registered(plan)
    if registered is None:
        if _has_begun(plan):
            raise ConfigError(f"runs in {plan.folder} have begun, but a plan must be registered before its first run")
        registered = sealed(described(plan))
        write(plan, registered=registered)
    elif extra := registration.added(plan, registered):
        raise ConfigError(f"the plan in {plan.folder} is registered already, without {extra}")
    return str(registered[SEAL])


def read_registered(plan: Plan) -> Document | None:
    """The registered plan; None if there is none."""
    return (_read(plan.folder) or {}).get("registered")


def _has_begun(plan: Plan) -> bool:
    return any(plan.folder.glob("arms/*/seed-*/config.json"))


def described(plan: Plan) -> Document:
    """What the runs and results of a comparison depend on."""
    return {
        "arms": {arm.name: {each.name: each.identity for each in arm.variants} for arm in plan.arms},
        "baseline": plan.baseline.name,
        "controls": {arm.name: arm.control for arm in plan.arms if arm.control},
        "seeds": list(plan.seeds),
        "tuning_seeds": list(plan.settings.tuning_seeds),
        "measure": plan.settings.compared,
        "test": TEST,
    }


def _check_same(plan: Plan, saved: Document, there: str, fixed: Sequence[str]) -> None:
    """Raise ConfigError if settings, rates or the keys ``fixed`` have changed, or if arms or seeds are missing."""
    now = described(plan)
    before, variants = (
        {name: identity for arm in document["arms"].values() for name, identity in arm.items()}
        for document in (saved, now)
    )
    for name, identity in before.items():
        if name not in variants:
            raise ConfigError(f"{there} also has the arm {name!r}, and poise never drops an arm: include it, {ANOTHER}")
        _check_equal(differences(identity, variants[name]), there)
    if missing := sorted(set(saved["seeds"]) - set(plan.seeds)):
        raise ConfigError(f"{there} also has seed {missing[0]}, and poise never drops a seed: include it, {ANOTHER}")
    rates = [[name in before for name in arm] for arm in now["arms"].values()]
    if saved["tuning_seeds"] != now["tuning_seeds"] or any(any(known) > all(known) for known in rates):
        raise ConfigError(
            f"{there} has other learning rates, or another tune=N: an arm might now get another rate; restore both "
            f"settings, {ANOTHER}"
        )
    _check_equal((each for each in differences(saved, now) if each[0].startswith(tuple(fixed))), there)


def _check_equal(different: Iterable[tuple[str, Any, Any]], there: str) -> None:
    for key, old, new in different:
        raise ConfigError(f"{key} = {short(new)}, but {there} has {short(old)}: leave {key} as it was, {ANOTHER}")


def _check_runs(plan: Plan) -> None:
    """Raise ConfigError if a run's settings differ from the plan: the run would count for the wrong arm."""
    for run in plan.all_runs():
        if not (run.folder / "config.json").exists():
            continue
        _check_data(run)
        planned = run.config.model_dump(mode="json")
        for key, before, now in differences(RunFolder(run.folder).config | {"run": planned["run"]}, planned):
            raise ConfigError(
                f"the run in {run.folder} has {key} = {short(before)}, but the comparison plans {short(now)} for "
                f"{run.name}: if its config.json was edited, undo the edit; otherwise move the folder away, and "
                "run the command again to retrain this run"
            )


def _check_code(plan: Plan) -> None:
    """Raise ConfigError if a run was trained with another version of the user's code."""
    for run, code in _other_code(plan):
        raise ConfigError(
            f"{', '.join(edited(code, run.config.code))}: this code was edited since {run.folder} was trained, and one "
            f"arm would mix both versions: restore it, {ANOTHER}; or move the folder away and run the command again "
            "to retrain this run; or accept the mix with --trust-changed"
        )


def _other_code(plan: Plan) -> list[tuple[PlannedRun, Code]]:
    """The runs that were trained with another version of the user's code, each with that version."""
    runs = (run for run in plan.all_runs() if run.config.code)
    codes = ((run, code) for run in runs for code in RunFolder(run.folder).code_versions())
    return [(run, code) for run, code in codes if code != run.config.code]


def mixed_code(plan: Plan) -> dict[str, list[str]]:
    """The files of the user's code that were edited between runs of the same variant, by variant name."""
    return {run.variant.name: edited(code, run.config.code) for run, code in _other_code(plan)}


def _check_data(run: PlannedRun) -> None:
    """Raise ConfigError if a run's data file was edited: new runs would have other problems."""
    path, now = run.folder / "data.json", data_fingerprint(run.config.task.build())
    if path.exists() and now is not None and RunFolder(run.folder).read_json(path.name) != {"fingerprint": now}:
        raise ConfigError(
            f"the data were edited since {run.folder} was trained, so new runs would have other problems: restore "
            f"the data, {ANOTHER}; or move the folder away and run the command again to retrain this run"
        )


def write(plan: Plan, looks: Sequence[int] | None = None, *, registered: Document | None = None) -> None:
    """Write ``plan.json`` for a plan that passed ``check``, with its ``looks`` (see ``read_looks``).

    If ``looks`` or ``registered`` is None, the value in the file stays.
    """
    data = described(plan) | {"looks": read_looks(plan) if looks is None else looks}
    if registered := registered or read_registered(plan):
        data["registered"] = registered
    with replacing(plan.folder / PLAN) as file:
        file.write(dumps(data, indent=1))


def read_looks(plan: Plan) -> list[int]:
    """The seed counts at which results were shown so far."""
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
        case {"arms": dict(arms), "seeds": list(), "tuning_seeds": list(), "measure": dict()} if all(
            isinstance(arm, dict) and all(isinstance(variant, dict) for variant in arm.values())
            for arm in arms.values()
        ) and isinstance(data.get("registered", {}), dict):
            return dict(data)
    raise ConfigError(f"{path} is not a plan of this version of poise: restore the file from a copy, {ANOTHER}")
