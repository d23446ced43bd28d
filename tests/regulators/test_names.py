"""Regulators by name, by text and by dotted path."""

import sys
import types
from dataclasses import dataclass

import pytest
import torch

import poise
from poise import Phase, Regulator, regulators
from poise.regulators import get, parse, text
from support.batches import random_batch


@dataclass(frozen=True)
class Mine(Regulator):
    """A user's own, as CONTRIBUTING.md says to write one."""

    gain: float = 2.0

    def phases(self, batch):
        return [Phase.of(batch, self.gain)]


@poise.regulator
@dataclass(frozen=True)
class Duck:
    """A user's own that knows nothing of our base class."""

    gain: float = 3.0
    needs = frozenset({"entropy"})

    def __call__(self, batch):
        return [Phase.of(batch, self.gain)]


@poise.regulator
def plain(batch, gain=4.0):
    return [Phase.of(batch, gain)]


def unmarked(batch, gain=4.0):
    return plain(batch, gain)


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    module = types.ModuleType("users_module")
    for thing in (Mine, Duck, plain, unmarked):
        monkeypatch.setattr(thing, "__module__", "users_module")
        setattr(module, thing.__name__, thing)
    module.number, module.ready = 3, Mine(0.25)
    monkeypatch.setitem(sys.modules, "users_module", module)


def test_a_class_without_phases_is_told_what_it_lacks(monkeypatch):
    bare = type("Bare", (Regulator,), {"__module__": "users_module"})
    monkeypatch.setattr(sys.modules["users_module"], "Bare", bare, raising=False)
    with pytest.raises(TypeError, match=r"users_module\.Bare has no method phases\(self, batch\)"):
        parse("users_module.Bare")


def test_every_name_has_working_defaults():
    batch = random_batch()
    for name, kind in regulators.TABLE.items():
        assert isinstance(get(name), kind)
        assert get(name)(batch)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("ar", regulators.AdvantageReweighting()),
        ("ar()", regulators.AdvantageReweighting(0.2)),
        (" ar( 0.3 ) ", regulators.AdvantageReweighting(alpha=0.3)),
        ("tr-grpo(tau=1e-1, kl_weighted=False)", regulators.TokenRegulation(tau=0.1, kl_weighted=False)),
        ("nthr(eta=None)", regulators.NTHR()),
        ("lopti(order='high-first')", regulators.Lopti(order="high-first")),
        (
            "ar(alpha=0.3) | lopti(threshold=0.5)",
            regulators.Compose((regulators.AdvantageReweighting(0.3), regulators.Lopti(0.5))),
        ),
    ],
)
def test_text_form(written, meant):
    assert parse(written) == meant
    assert parse(text(meant)) == meant


def test_every_way_of_naming_one_is_understood():
    both = regulators.Compose((regulators.AdvantageReweighting(0.3), regulators.Lopti()))
    assert get("ar(alpha=0.3) | lopti") == parse("ar(alpha=0.3) | lopti") == parse(both) == both
    assert parse(plain)(random_batch())[0].policy.max() == 4.0
    with pytest.raises(ValueError, match="has no text form"):
        text(parse(lambda batch: plain(batch)))


def test_text_leaves_defaults_out():
    assert text(parse("ar(alpha=0.2)|lopti(threshold=0.5, order='low-first')")) == "ar | lopti(threshold=0.5)"


@pytest.mark.parametrize("path", ["users_module.Mine", "users_module:Mine", "users_module.Duck", "users_module.plain"])
def test_a_dotted_path_leads_to_a_users_own(path):
    batch = random_batch()
    made = parse(f"{path}(gain=0.5) | lopti")
    assert made(batch)[0].policy.max() == 0.5
    assert parse(text(made)) == made
    assert isinstance(get(path), Regulator)


def test_a_dotted_path_may_lead_to_a_finished_regulator():
    made = parse("users_module.ready | lopti")
    assert made(random_batch())[0].policy.max() == 0.25
    assert parse(text(made)) == made


@pytest.mark.parametrize(
    "written",
    ["subprocess.Popen('touch x', shell=True)", "os.system('touch x')", "builtins.exec('open(\"x\", \"w\")')",
     "builtins.open('x', 'w')", "poise.regulators:inspect.getfile", "users_module.unmarked", "pathlib.Path('x')"],
)  # fmt: skip
def test_a_name_reaches_nothing_but_regulators(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        TypeError, match=r"is not a regulator: let a class inherit from poise\.Regulator, or write @poise"
    ):
        parse(written)
    assert not list(tmp_path.iterdir())


def test_python_callers_need_no_mark():
    assert parse(unmarked)(random_batch())[0].policy.max() == 4.0
    assert (regulators.get("lopti") | unmarked)(random_batch())


def test_needs_of_a_users_own_are_honoured():
    with pytest.raises(ValueError, match=r"needs TokenBatch\.entropy"):
        get("users_module.Duck")(random_batch(entropy=None))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("lopty", "did you mean 'lopti'"),
        ("AR", r"unknown regulator 'AR'; did you mean 'ar'\? \(allowed: grpo, ar,"),
        ("ar(alfa=0.3)", "unknown setting of ar 'alfa'; did you mean 'alpha'"),
        ("ar(0.3, 0.4)", "at most 1 settings"),
        ("lopti(treshold=0.3)", "did you mean 'threshold'"),
        ("lopti(order='low')", "did you mean 'low-first'"),
        ("ar(alpha=1.5)", "ar: alpha must be between 0.0 and 1.0, got 1.5"),
        ("ar(alpha='x')", "ar: alpha must be a number, got 'x'"),
        ("ar(alpha=float('nan'))", "cannot read the settings of 'ar'"),
        ("ar(alpha=__import__('os'))", "cannot read the settings of 'ar'"),
        ("ar(**{'alpha': 1})", "unknown setting of ar 'None'|cannot read"),
        ("ar(alpha=0.3", "cannot read"),
        ("ar | ", "cannot read ''"),
        ("", "cannot read ''"),
        ("no_such_module.Thing", "there is no module 'no_such_module'"),
        ("users_module.Mime", "did you mean 'Mine'"),
        ("users_module.number", "is not callable"),
        ("users_module.plain(gian=1)", "did you mean 'gain'"),
        ("users_module.ready(gain=1)", "unknown setting of users_module.ready 'gain' .allowed: there are none"),
        ("users_module:number.bit", "unknown name in users_module 'bit'"),
        ("poise.regulators.Compose(('ar',))", "AttributeError"),
        (".users_module.Mine", "importing .users_module failed"),
        ("users_module:", "unknown name in users_module ''"),
        ("ar(alpha=" + "(" * 1000, "cannot read 'ar"),
        ("ar(alpha=" + "-" * 100_000 + "1)", "cannot read the settings of 'ar'"),
        ("ar(alpha=0x" + "f" * 10_000 + ")", "ar: alpha must be between 0.0 and 1.0, got a whole number of 40000 bits"),
    ],
)
def test_mistakes_are_answered_with_what_was_meant(written, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        parse(written)
    assert len(str(caught.value)) < 600


def test_a_broken_import_inside_a_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "users_broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"users_broken\.py, line 1: ModuleNotFoundError.*not_installed_anywhere"):
        get("users_broken.Thing")


def test_regulators_are_frozen_and_comparable():
    with pytest.raises(AttributeError):
        get("ar").alpha = 0.5
    assert get("ar", alpha=0.3) == get("ar", alpha=0.3) != get("ar")
    assert len({get("ar"), get("ar"), get("lopti")}) == 2


def test_regulators_run_without_gradients():
    batch = random_batch()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    (phase,) = regulators.Function(lambda b: [Phase.of(b, b.prob * weight)])(batch)
    assert not phase.policy.requires_grad
