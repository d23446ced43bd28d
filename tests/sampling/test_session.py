"""Keys kept between turns: what comes out is what comes out when every turn reads its dialogue again."""

import gc
import weakref
from dataclasses import dataclass
from itertools import count, islice

import pytest
import torch

from poise.models.loading import load_policy
from poise.models.policy import ModelError
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.draws import Sampling
from poise.sampling.native import session as kept_rows
from poise.sampling.native.decoder import Decoder
from poise.sampling.native.engine import NativeEngine, continues
from poise.sampling.native.kv_cache import SharedPromptCache
from poise.sampling.requests import Request, Session, session
from poise.sampling.sampler import Sampler
from poise.tasks import Problem, Score, get
from poise.training.evaluation import evaluate
from poise.training.steps import counted_metrics
from support.dialogues import GREEDY, Anew, dialogues, said_after
from support.native_engines import ENGINES, NATIVE, SlotEngine
from support.sampled import ask
from support.tiny_models import LEARNED, exact, learned, prompts, tiny


def assert_same(found, expected, tolerance=1e-4):
    for a, b in zip(found, expected, strict=True):
        assert a.prompts == b.prompts
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.mask, b.mask)
        assert torch.equal(a.finished, b.finished)
        torch.testing.assert_close(a.logp, b.logp, atol=tolerance, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", *LEARNED])
def test_greedy_tokens_are_those_of_reading_anew(name, engine):
    policy = learned(name, positions=128) if name in LEARNED else tiny(name)
    expected, plain = dialogues(Anew(engine(policy)))
    assert [len(out.prompts) for out in expected] == [7, 7, 5, 3]
    assert (plain.continued, plain.reread) == (0, 15)
    for batch in (0, 3):  # all at once; and more episodes than rows
        found, kept = dialogues(engine(policy, batch=batch))
        assert_same(found, expected)
        assert (kept.continued, kept.reread) == (15, 0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sampled_tokens_too(name, engine):
    policy, sampling = exact(tiny(name)), Sampling(1.1, 0.95, 60)
    expected, _ = dialogues(Anew(CachedEngine(policy)), sampling)
    for batch in (0, 2):
        found, _ = dialogues(engine(policy, batch=batch), sampling)
        assert_same(found, expected, 1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_log_probabilities_are_those_of_the_training_forward(engine):
    policy = tiny("gemma3")
    with engine(policy).session() as calls:
        asked = [Request(prompt, 12, (), keep=True) for prompt in prompts(5)]
        out = ask(calls, asked, Sampling(), 0)
        more = [
            Request([*p, *row[:n], *said_after(3, i)], 12, (), continues=i)
            for i, (p, row, n) in enumerate(zip(out.prompts, out.tokens.tolist(), out.lengths, strict=True))
        ]
        out = ask(calls, more, Sampling(), 1)
    with torch.no_grad():
        logp, entropy = policy.score(out.batch)
    torch.testing.assert_close(logp[out.mask], out.logp[out.mask], atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy[out.mask], out.entropy[out.mask], atol=1e-4, rtol=0)


def reference_kernel(q, keys, values, starts_q, starts_k, longest_q, longest_k, dropout, causal, debug, **more):
    """torch's variable-length flash kernel in plain words: causal from the last key backwards, ``seqused_k`` keys."""
    assert (dropout, causal, debug) == (0.0, True, False)
    assert more["window_size_right"] == 0
    outs, sharing = [], q.shape[1] // keys.shape[1]
    for i, used in enumerate(more["seqused_k"].tolist()):
        own = q[starts_q[i] : starts_q[i + 1]]
        assert len(own) <= longest_q
        assert used <= longest_k
        k, v = (x[starts_k[i] : starts_k[i] + used].repeat_interleave(sharing, 1) for x in (keys, values))
        scores = torch.einsum("nhd,thd->hnt", own, k) * (more["scale"] or q.shape[-1] ** -0.5)
        back = torch.arange(used - len(own), used)[:, None] - torch.arange(used)
        left = more["window_size_left"]
        scores = scores.masked_fill((back < 0) | ((back > left) if left >= 0 else (back < 0)), -torch.inf)
        outs.append(torch.einsum("hnt,thd->nhd", scores.softmax(-1), v))
    return (torch.cat(outs),)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_flash_kernel_is_told_where_rows_begin_and_end(name, monkeypatch):
    """As on CUDA, with the kernel's rules in plain torch."""
    policy = tiny(name)
    expected, _ = dialogues(Anew(SlotEngine(policy, batch=4)))
    called = []
    kernel = lambda *rest, **more: (called.append(1), reference_kernel(*rest, **more))[1]  # noqa: E731
    monkeypatch.setattr("poise.models.attention._kernel", kernel)
    monkeypatch.setattr("poise.sampling.native.slot_cache.flash_takes", lambda *_: True)
    found, calls = dialogues(SlotEngine(policy, batch=4))
    assert called
    assert calls.reread == 0
    assert_same(found, expected)


def test_half_precision_is_as_close_as_without():
    policy, whole = tiny("llama"), tiny("llama")
    policy.model.bfloat16()
    whole.model.bfloat16().float()  # the same weights, in float32
    gaps = []
    for engine in (NativeEngine(policy), Anew(NativeEngine(policy))):
        with session(engine) as calls:
            first = ask(calls, [Request(p, 8, keep=True) for p in prompts(6)], Sampling(), 0)
            more = [Request([*p, *t, 9, 8], 20, continues=i)
                    for i, (p, t) in enumerate(zip(first.prompts, first.tokens.tolist(), strict=True))]  # fmt: skip
            out = ask(calls, more, Sampling(), 1)
        with torch.no_grad():
            gaps.append((whole.score(out.batch)[0] - out.logp)[out.mask].norm())
    assert gaps[0] < 2 * gaps[1]


def test_only_new_tokens_run_through_the_model(monkeypatch):
    run, trunk = [], Decoder._trunk
    engine = NativeEngine(tiny("llama"))
    assert engine.keeps_keys

    def counted(self, ids, *rest, **more):
        run.append((ids.numel(), "packing" in more))
        return trunk(self, ids, *rest, **more)

    monkeypatch.setattr(Decoder, "_trunk", counted)
    with engine.session() as calls:
        out = ask(calls, [Request([7] * 50, 4, keep=True), Request([8] * 30, 4, keep=True)], GREEDY, 0)
        assert sum(n for n, read in run if read) == 80
        run.clear()
        said = [[*p, *t, 9, 10, 11] for p, t in zip(out.prompts, out.tokens.tolist(), strict=True)]
        calls.sample([Request(said[1], 4, continues=1), Request(said[0], 4, continues=0)], GREEDY, 1)
    assert sum(n for n, read in run if read) == 2 * (1 + 3)  # the reply's last token, and the new ones


def test_several_requests_may_continue_the_same_one():
    engine = NativeEngine(tiny("llama"))
    with engine.session() as calls:
        first = ask(calls, [Request([7, 8, 9], 6, keep=True)], GREEDY, 0)
        said = [7, 8, 9, *first.tokens[0].tolist()]
        more = [Request([*said, token], 6, continues=0) for token in (20, 21, 20)]
        found = ask(calls, more, GREEDY, 1)
    fresh = ask(engine, [Request([*said, token], 6) for token in (20, 21, 20)], GREEDY, 1)
    assert torch.equal(found.tokens, fresh.tokens)


@pytest.mark.parametrize("engine", [*ENGINES, CachedEngine])
class TestMistakes:
    def begin(self, engine):
        calls = session(engine(tiny("llama")))
        out = ask(calls, [Request([7, 8], 3, number=4, keep=True), Request([9], 3)], GREEDY, 0)
        return calls, [7, 8, *out.tokens[0].tolist()]

    def test_no_new_token(self, engine):
        calls, said = self.begin(engine)
        with pytest.raises(ValueError, match=r"request 0 continues request number 4.*5 tokens.*at least one new token"):
            calls.sample([Request(said, 3, continues=4)], GREEDY, 1)

    def test_another_dialogue(self, engine):
        calls, said = self.begin(engine)
        with pytest.raises(ValueError, match="must be that request's prompt and response"):
            calls.sample([Request([*said[:-1], 3, 3, 3], 3, continues=4)], GREEDY, 1)

    @pytest.mark.parametrize("number", [1, 7])  # one that did not ask to be kept, and one that was not there
    def test_nothing_kept(self, engine, number):
        calls, said = self.begin(engine)
        with pytest.raises(ValueError, match=f"continues request number {number}, which the previous call did not"):
            calls.sample([Request([*said, 3], 3, continues=number)], GREEDY, 1)

    def test_only_the_call_before_can_be_continued(self, engine):
        calls, said = self.begin(engine)
        calls.sample([Request([9], 3)], GREEDY, 1)
        with pytest.raises(ValueError, match="the previous call did not keep"):
            calls.sample([Request([*said, 3], 3, continues=4)], GREEDY, 2)

    def test_numbers_given_twice(self, engine):
        with session(engine(tiny("llama"))) as calls, pytest.raises(ValueError, match="the same number"):
            calls.sample([Request([7], 3, number=1, keep=True), Request([8], 3, keep=True)], GREEDY, 0)

    def test_a_session_that_has_ended(self, engine):
        calls, said = self.begin(engine)
        calls.close()
        with pytest.raises(ValueError, match="has ended"):
            calls.sample([Request([*said, 3], 3, continues=4)], GREEDY, 1)

    def test_positions_count_over_the_whole_dialogue(self, engine):
        policy = learned("gpt2", positions=32)
        with session(engine(policy)) as calls:
            out = ask(calls, [Request([7] * 12, 10, keep=True)], GREEDY, 0)
            said = [*[7] * 12, *out.tokens[0].tolist(), 9]
            with pytest.raises(ModelError, match=r"32 positions.*need 33"):
                calls.sample([Request(said, 10, continues=0)], GREEDY, 1)


class TestMemory:
    def test_rows_that_do_not_fit_are_read_again_and_counted(self, monkeypatch):
        engine = NativeEngine(tiny("llama"))
        assert engine.keeps_keys
        expected, whole = dialogues(Anew(engine))
        for tokens in (0, 60):  # none, and some
            monkeypatch.setattr(kept_rows, "KEPT_BYTES", tokens * engine.token_bytes)
            found, calls = dialogues(engine)
            assert_same(found, expected)
            assert calls.continued + calls.reread == whole.reread
            assert (calls.continued > 0) == (tokens > 0)
            assert calls.reread > 0

    @pytest.mark.parametrize("engine", ENGINES)
    def test_the_count_of_bytes_is_right(self, engine):
        calls = engine(tiny("llama")).session()
        calls.sample([Request([7] * n, 5, keep=True) for n in (3, 9)], GREEDY, 0)
        blocks = {id(row.block): row.block for row in calls._rows.values()}
        held = sum(x.nbytes for block in blocks.values() for x in block)
        assert held == 2 * (9 + 5 - 1) * calls.engine.token_bytes

    def test_nothing_is_left_when_a_session_ends_or_is_forgotten(self):
        engine = NativeEngine(tiny("llama"))
        for end in (Session.close, lambda _: None):
            calls = engine.session()
            calls.sample([Request([7, 8], 5, keep=True)], GREEDY, 0)
            tensors = weakref.ref(calls._rows[0].block[0])
            assert tensors() is not None
            end(calls)
            del calls
            gc.collect()
            assert tensors() is None

    def test_a_call_drops_the_rows_of_the_call_before(self):
        calls = NativeEngine(tiny("llama")).session()
        calls.sample([Request([7, 8], 5, keep=True)], GREEDY, 0)
        tensors = weakref.ref(calls._rows[0].block[0])
        calls.sample([Request([7, 8], 5, number=3, keep=True)], GREEDY, 0)
        gc.collect()
        assert tensors() is None
        assert set(calls._rows) == {3}


def test_an_interrupted_call_leaves_nothing_to_continue(monkeypatch):
    with NativeEngine(tiny("llama")).session() as calls:
        out = ask(calls, [Request([7, 8], 4, keep=True)], GREEDY, 0)
        more = [Request([7, 8, *out.tokens[0].tolist(), 9], 4, continues=0)]
        monkeypatch.setattr(Decoder, "run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            calls.sample(more, GREEDY, 1)
        assert not calls._rows
        with pytest.raises(ValueError, match="did not keep"):
            calls.sample(more, GREEDY, 1)


class TestTrial:
    @pytest.mark.parametrize("name", [*NATIVE, *LEARNED])
    def test_which_models_can(self, name):
        assert continues(learned(name, positions=64) if name in LEARNED else tiny(name))

    @pytest.mark.parametrize("wrong", ["number", "error"])
    def test_a_model_that_cannot_reads_again_and_is_named(self, wrong, monkeypatch):
        right = SharedPromptCache.attend_text

        def broken(self, *rest):
            if wrong == "error":
                raise RuntimeError("no kernel")
            return right(self, *rest) * 1.1

        engine = NativeEngine(tiny("llama"))
        expected, _ = dialogues(Anew(engine))
        monkeypatch.setattr(SharedPromptCache, "attend_text", broken)
        with pytest.warns(UserWarning, match="LlamaForCausalLM: keys cannot be kept between turns"):
            found, calls = dialogues(engine)
        assert_same(found, expected)
        assert calls.continued == 0
        assert calls.reread > 0


@dataclass(frozen=True)
class Questions:
    """Up to four turns; an episode ends when its number of turns is reached."""

    name: str = "questions"

    def problems(self, split, seed):
        del split
        return (Problem(f"{seed}/{i}", f"Is A a knight {i}?", str(1 + i % 4), {}) for i in count())

    def episode(self, problem):
        return Asked(problem)


class Asked:
    def __init__(self, problem):
        self.problem, self.replies = problem, []

    def start(self):
        return [{"role": "user", "content": self.problem.prompt}]

    def step(self, reply):
        self.replies.append(reply)
        over = len(self.replies) == int(self.problem.difficulty)
        return [] if over else [{"role": "user", "content": "Are you sure? " * len(self.replies)}]

    def score(self):
        return Score(float(len(self.replies)), correct=True)


def test_the_sampler_keeps_the_keys_of_its_episodes(monkeypatch):
    policy = load_policy("embedded", device="cpu")
    problems, opened, read = list(islice(Questions().problems("train", 0), 6)), [], []
    engine = NativeEngine(policy)
    open_session = engine.session
    monkeypatch.setattr(engine, "session", lambda n: (opened.append(open_session(n)), read.append(n))[0] or opened[-1])
    settings = {"task": Questions(), "sampling": GREEDY, "max_tokens": 12, "max_episode": 200}
    kept = Sampler(policy, engine, **settings).play(problems, seed=3)
    anew = Sampler(policy, Anew(NativeEngine(policy)), **settings).play(problems, seed=3)
    assert len(opened) == 1
    assert opened[0].continued == sum(i % 4 for i in range(6))
    assert opened[0].reread == 0
    assert not opened[0]._rows
    longest = max(len(sample.prompt.tokens) for sample in kept)
    assert read == [longest + 200]
    for a, b in zip(kept, anew, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert torch.equal(a.own, b.own)
        torch.testing.assert_close(a.logp, b.logp, atol=1e-4, rtol=0)
        assert a.score == b.score


def turn_metrics(sampler):
    return {name: value for name, value in counted_metrics(sampler.counts).items() if name.startswith("rollout/")}


def test_a_task_of_one_turn_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_rows.KeptRows, "save", lambda *_: pytest.fail("a row was copied"))
    policy = load_policy("embedded", device="cpu")
    (tmp_path / "data.jsonl").write_text('{"question": "Is A a knight?", "answer": "yes"}\n' * 3)
    data = get("data", file=str(tmp_path / "data.jsonl"), reward="exact", held_out=0)
    for task in (get("kk", people="2"), data):
        sampler = Sampler(policy, NativeEngine(policy), task, max_tokens=8)
        sampler.play(list(islice(task.problems("train", 0), 3)), seed=0)
        assert turn_metrics(sampler) == {}


def test_a_step_tells_how_many_turns_continued_and_how_many_were_read_again():
    """A step's two calls add up; an evaluation in between does not count."""
    policy, task = load_policy("embedded", device="cpu"), Questions()
    problems = list(islice(task.problems("train", 0), 6))
    later = sum(i % 4 for i in range(6))
    for engine, kept in ((NativeEngine(policy), True), (Anew(NativeEngine(policy)), False)):
        whole = Sampler(policy, engine, task, GREEDY, max_tokens=4)
        for _ in range(2):
            sampler = whole.at()
            sampler.play(problems, seed=3)
            evaluate(sampler, problems=5, samples=1)
            sampler.greedy().play(problems, seed=4)
            expected = {"rollout/continued": 2 * later * kept, "rollout/reread": 2 * later * (not kept)}
            assert turn_metrics(sampler) == expected
