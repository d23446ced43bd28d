"""Settings typed as key=value, and what mistakes are answered with."""

import pytest

from poise import tasks
from poise.training.config import messages
from poise.training.config.documents import split_overrides
from poise.training.config.messages import unknown_key
from poise.training.config.schema import keys, load
from support.configs import problem, problems


def test_overrides_reach_every_corner():
    config = load("grpo", [
        "task.people=2-3",
        "steps=1e1", "seed = 3", "optim.lr=3e-7", "optim.betas=[0.8, 0.9]", "objective.dual_clip=null",
        "lora.rank=4", "lora.targets=[q_proj, v_proj]", "tracking=wandb", "run=2026-01-02", "model=some/folder",
        "evaluation={every: 5, problems: 9}", "stop_at=0.9", "rollout.temperature=1", "remote_code=true",
    ])  # fmt: skip
    assert (config.steps, config.seed, config.optim.lr, config.optim.betas) == (10, 3, 3e-7, (0.8, 0.9))
    assert config.objective.dual_clip is None
    assert config.task.settings == {"people": "2-3"}
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (4, 32, ("q_proj", "v_proj"))
    assert (config.tracking, config.run, config.model) == (("wandb",), "2026-01-02", "some/folder")
    assert (config.evaluation.every, config.evaluation.problems, config.evaluation.temperature) == (5, 9, 0)
    assert (config.stop_at, config.rollout.temperature, config.remote_code) == (0.9, 1.0, True)
    assert config.optim.mini_batch == 256


def test_another_task_drops_the_settings_of_the_one_before(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "other", lambda size=3: ("other", size))
    assert load("grpo", ["task.name=other"]).task.settings == {}
    assert load("grpo", ["task.size=4", "task.name=other"]).task.settings == {"size": 4}
    assert load("grpo", ["task.name=kk"]).task.settings == {"people": "3-7"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=1e-6", "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("learning_rate=1e-4", "unknown key 'learning_rate'; did you mean 'optim.lr'?"),
        ("num_generations=4", "unknown key 'num_generations'; did you mean 'group'?"),
        ("beta=0.1", "unknown key 'beta'; did you mean 'objective.kl_coef'?"),
        ("chat_template_kwargs={a: 1}", "unknown key 'chat_template_kwargs'; did you mean 'template'?"),
        ("model_revision=v2", "unknown key 'model_revision'; did you mean 'revision'?"),
        ("num_train_epochs=2", "unknown key 'num_train_epochs': poise counts steps, not epochs: set steps="),
        ("optim.lr_scheduler_type=cosine", "the learning rate is constant after optim.warmup_steps"),
        ("lora_rank=8", "unknown key 'lora_rank'; did you mean 'lora.rank'?"),
        ("rollout_max_tokens=8", "unknown key 'rollout_max_tokens'; did you mean 'rollout.max_tokens'?"),
        ("stpes=3", "unknown key 'stpes'; did you mean 'steps'?"),
        ("optm.lr=3", "unknown key 'optm'; did you mean 'optim'?"),
        ("optim.clip_low=0.1", "unknown key 'optim.clip_low'; did you mean 'objective.clip_low'?"),
        ("rollout.temprature=1", "did you mean 'rollout.temperature'?"),
        ("temprature=1", "did you mean 'rollout.temperature' or 'evaluation.temperature'?"),
        (
            "objective.num_iterations=2",
            "unknown key 'objective.num_iterations'; did you mean 'regulator'? "
            'num_iterations=2 is regulator="grpo(passes=2)"',
        ),
        ("scale_rewards=none", "unknown key 'scale_rewards'; did you mean 'advantage'?"),
        ("task.environment=x.py:Y", "unknown key 'task.environment'; did you mean 'environment'?"),
        ("group=10000000", "prompts × group = 16 × 10,000,000: a step samples 160,000,000 responses"),
        ("rollout.temperature=1e-9", "rollout.temperature = 1e-09: must be at least 0.000001"),
        ("optim.zzz=1", "unknown key 'optim.zzz' (allowed in optim: average_over, betas, eight_bit, grad_clip, lr,"),
        ("zzz=1", "unknown key 'zzz' (allowed: advantage, algorithm, budget, checkpoint_every, compile,"),
        ("task.poeple=3", "unknown key 'task.poeple'; did you mean 'task.people'?"),
        ("people=3", "unknown key 'people'; did you mean 'task.people'?"),
        ("task.people=99", "task: knights and knaves: people must be between 2 and 12, got 99"),
        ("task.people=5-3", "task: KnightsKnaves: people = '5-3' is empty; in a range the smaller number comes first"),
        ("task.people=two", "task: KnightsKnaves: people must be like 5, (3, 4) or '3-7', got 'two'"),
        ("task.depth=much", "task: knights and knaves: depth must be a number, got 'much'"),
        ("task.name=kq", "task: unknown task 'kq'; did you mean 'kk'? (allowed: kk, "),
        ("task=kk", "task = 'kk': must be a group of settings, {key: value}"),
        ("steps=0", "steps = 0: must be at least 1"),
        ("steps=1.5", "steps = 1.5: must be a whole number"),
        ("steps=true", "steps = True: must be a number"),
        ("steps='3'", "steps = '3': must be a number"),
        ("steps=", "steps = None: must be a whole number"),
        ("model=", "model = None: must be text"),
        ("task.name=[1,2]", "task.name = [1, 2]: must be text: the name of a task (poise tasks lists them), or"),
        ("task.name={a: 1}", "task.name = {'a': 1}: must be text: the name of a task"),
        ("task=[kk]", "task = ['kk']: must be a group of settings, {key: value}"),
        ("task.instruction=[1]", "task: kk: instruction must be text, got [1]"),
        ("task.names=3", "task: kk: names must be a list of texts, got 3"),
        ("task.file={}", "task: kk: file must be text or null, got {}"),
        ("regulator=[ar, lopti]", "regulator = ['ar', 'lopti']: must be text: a method, or several joined by |, such"),
        ("algorithm=[1]", "algorithm = [1]: must be text: a name such as grpo"),
        ("advantage=[1]", "advantage = [1]: must be text: a name such as group-zscore, or your own function"),
        ("run=3", "run = 3: must be text: a folder; a number goes in quotes: run='\"3\"'"),
        ("run={}", "run = {}: must be text: a folder"),
        ("model=''", "model = '': must not be empty"),
        ("optim.lr=-1", "optim.lr = -1: must be greater than 0"),
        ("optim.lr=.inf", "optim.lr = inf: must be a finite number"),
        ("optim.betas=[0.9]", "optim.betas.1 = [0.9]: is missing"),
        ("optim.betas=[0.9, 1.0]", "optim.betas.1 = 1.0: must be less than 1"),
        ("stop_at=90", "stop_at = 90: must be at most 1"),
        ("stop_at=0.9", "stop_at = 0.9: accuracy is measured only before and after training; set evaluation.every"),
        ("group=1", "group = 1: advantage 'group-zscore' compares the responses to a prompt with each other"),
        ("advantage=zscore", "unknown advantage 'zscore'; did you mean 'group-zscore'?"),
        ("objective.surrogate=gpso", "unknown surrogate 'gpso'; did you mean 'gspo'?"),
        ("objective.surrogate=dppo(delta=x)", "cannot read the settings of 'dppo'"),
        ("algorithm=rltr(transfer=abc)", "'transfer=abc': write a number, true, false, null, a list, or text in"),
        ("algorithm=rltr(receiver=runs/demo)", "'receiver=runs/demo': write a number, true, false, null, a list, or"),
        ("algorithm=erl(reflection=yes)", "in 'erl(reflection=yes)': 'reflection=yes': write a number, true, false,"),
        ("algorithm=erl(reflection='yes')", "reflection must be true or false, got 'yes'"),
        ("objective.surrogate=dppo(delta='x')", "dppo: delta must be a number, got 'x'"),
        ("objective.surrogate=gspo(sequence_mean='no')", "gspo: sequence_mean must be True or False, got 'no'"),
        ("objective.surrogate=5", "objective: unknown surrogate '5' (allowed: clip, "),
        ("objective.surrogate=clip | gspo", "cannot read 'clip | gspo'"),
        ("dtype=bf16", "dtype = 'bf16': must be 'auto', 'float32' or 'bfloat16'; did you mean 'bfloat16'?"),
        ("device=gpu", "device = 'gpu': must be auto, or a device of torch such as cpu, cuda or cuda:1"),
        ("remote_code=perhaps", "remote_code = 'perhaps': must be true or false"),
        ("tracking=3", "tracking = 3: must be a list"),
        ("lora.targets=all", "lora.targets = 'all': must be all-linear, or a list of module names such as"),
        ("evaluation.temperature=0", "evaluation: samples = 4 at temperature 0: greedy samples are all the same"),
        ("objective.clip_low=3", "objective: clip_low must be between 0.0 and 1.0, got 3.0"),
        ("objective.kl=k4", "objective: unknown kl 'k4'; did you mean 'k3'? (allowed: k1, k2, k3)"),
        ("objective.aggregation=fixed-length", "objective: aggregation 'fixed-length' needs max_length"),
        ("regulator=lopty", "regulator = 'lopty': unknown regulator 'lopty'; did you mean 'lopti'?"),
        ("regulator=ar(alfa=1)", "regulator = 'ar(alfa=1)': unknown setting of ar 'alfa'; did you mean 'alpha'?"),
        ("regulator.alpha=1", "settings of the regulator go in brackets, regulator='NAME(alpha=1)'"),
        ("algorithm.transfer=1", "settings of the algorithm go in brackets, algorithm='NAME(transfer=1)'"),
        ("regulator." + "a" * 9000 + "=1" * 9000, "settings of the regulator go in brackets, regulator='NAME(aaaa"),
        ("regulator={alpha: 1}", "regulator = {'alpha': 1}: must be text: a method, or several joined by |"),
        ("regulator=a." + "a" * 9000, "...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa': is too long"),
        ("regulator=ar(alpha=" + "-" * 3000 + "1)", "cannot read the settings of 'ar' in 'ar(alpha=---"),
        ("regulator=subprocess.Popen('true')", "'subprocess.Popen' is not a regulator: let a class inherit from"),
        ("regulator=no_such_module.Mine", "there is no module 'no_such_module' to import"),
        ("a." * 5000 + "a=1", ": the key has 5001 levels, more than 20"),
        ("a" * 90_000 + "=1", "unknown key 'aaaa"),
        ("model=" + "a" * 90_000, "aaaa': is too long"),
        ("dtype=" + "a" * 90_000, "aaaa': must be 'auto', 'float32' or 'bfloat16'"),
        ("model=" + "a" * 200_000, "aaaa': cannot read the value: it has more than 100,000 characters"),
        ("steps=1e999999", "steps = inf: must be a finite number"),
        ("steps=1e30", "steps = 1e+30: is too large"),
        ("seed=99999999999999999999", "seed = 99999999999999999999: must be at most 2147483647"),
        ("optim.lr=1e999999", "optim.lr = inf: must be a finite number"),
        ("optim.betas=[" + "1," * 3000 + "]", "optim.betas = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ...]: must have at most 2"),
        ("steps=!!int x", "override 'steps=!!int x': cannot read the value: cannot read a value: invalid literal"),
        ("steps=\0", "cannot read the value: unacceptable character #x0000"),
        ("lr", "override 'lr': write key=value, such as optim.lr=1e-6"),
        ("=3", "override '=3': write key=value, such as optim.lr=1e-6"),
        ("optim.=3", "override 'optim.=3': write key=value, such as optim.lr=1e-6"),
        ("optim.betas=[1", "override 'optim.betas=[1': cannot read the value: it ends too early: a bracket or a quote"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_with_what_was_meant(override, message):
    line = problem(override)
    assert message in line
    assert len(line) < 600


def test_all_problems_are_told_at_once():
    assert len(problems("stpes=3", "lr=1", "group=0", "dtype=half")) == 4
    assert len(problems("lr", "x=[")) == 2
    assert len(problems("regulator.alpha=1", "algorithm.passes=0")) == 2


def test_a_setting_of_the_method_is_answered_with_its_brackets():
    told = problem("regulator=ar(alpha=1) | lopti", "threshold=0.3")
    assert told == "unknown key 'threshold'; did you mean 'regulator=lopti(threshold=…)'?"
    assert problem("algorithm=rltr", "trnsfer=1").endswith("did you mean 'algorithm=rltr(transfer=…)'?")
    assert "optim" in problem("regulator=ar", "zzz=3")
    assert "regulator=ar(" not in problem("regulator=ar", "zzz=3")


@pytest.mark.parametrize(
    "text",
    [
        "Question {question} End with #### and the number.",
        "You are brief: answer with a number.",
        "{question} Answer with a number.",
        "{question}",
        "Q: {question} A: [1, 2]",
        "a: b: c",
        "- one",
    ],
)
def test_sentences_stay_as_they_are_typed(text):
    assert split_overrides([f"task.template={text}"]) == {"task": {"template": text}}


def test_lists_groups_numbers_and_quotes_are_yaml():
    typed = {
        "[1, 2]": [1, 2], "{a: 1}": {"a": 1}, "1e-6": 1e-6, "true": True, "null": None, "'5'": "5", "3-7": "3-7",
        "off": "off", "2026-01-02": "2026-01-02",
        '"a # b"': "a # b", "ar(alpha=0.3) | lopti": "ar(alpha=0.3) | lopti", "": None,
    }  # fmt: skip
    for text, value in typed.items():
        assert split_overrides([f"x={text}"]) == {"x": value}


def test_names_of_other_trainers_lead_to_settings_that_exist():
    known = keys({})
    assert set(messages._ELSEWHERE.values()) <= set(known)
    assert not set(messages._ELSEWHERE) & set(known)
    assert not set(messages._NOT_HERE) & {*known, *messages._ELSEWHERE}
    assert all(f"{ours!r}?" in unknown_key(theirs, known) for theirs, ours in messages._ELSEWHERE.items())
