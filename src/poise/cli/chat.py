"""``poise chat``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from poise._lib.imports import quick_imports
from poise.cli.common import Model, Settings, Trust, explained, fail

if TYPE_CHECKING:
    from poise.config.schema import Config


def chat(
    model: Model,
    args: Settings = None,
    instruction: Annotated[
        bool, typer.Option("--instruction", help="Put the instruction of the model's task before the first message.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Talk with a model, to try it. Ctrl-D ends it. If something is piped in, that is the one message.

    A run samples as its evaluations do. Settings: `temperature` (0 is greedy), `max_tokens`, `top_p`, `top_k`, `seed`,
    `device`, `dtype`; with `--instruction` also `task.name` and the task's own.

    Examples:

    - `poise chat runs/demo --instruction`
    - `poise chat Qwen/Qwen2.5-0.5B-Instruct temperature=0.7`
    - `echo "What is 2 + 2?" | poise chat runs/qwen temperature=0`
    """
    with quick_imports():
        from poise.config.run_settings import to_chat
        from poise.models.errors import ModelError
        from poise.runs.console import visible
        from poise.tasks.base import readable

    with explained():
        config = to_chat(model, args or [], instruction=instruction, trust=trust)
        first = _instruction(config) if instruction else ""
        offer = _only_task(model, config.evaluation.seed)
        if sys.stdin is None or not sys.stdin.isatty():  # None: closed
            text = sys.stdin.buffer.read().decode("utf-8", "replace").strip() if sys.stdin else ""
            if not text:
                fail("there is no message: pipe one in, as in: echo Hello | poise chat MODEL")
            print(visible(_dialogue(config, first)(text)))
            return
        reply = _dialogue(config, first)
        print("Ctrl-D ends the dialogue")
        while True:
            try:
                text = readable(input("\nyou: ").strip())
                if not text and offer:
                    print(visible(offer))
                text, offer = text or offer, ""
                if text:
                    print(visible(f"\nmodel: {reply(text)}"))
            except EOFError:
                print()
                return
            except ModelError as error:  # such as a dialogue that has become too long
                fail(error)


def _only_task(model: str, seed: int) -> str:
    """Say it if the model knows the language of one task only; return a problem of that task to begin with."""
    from poise.config.run_settings import only_task
    from poise.tasks import draw, several_turns

    if (task := only_task(model)) is None:
        return ""
    note = f"This model has learned the language of one task only ({task.name}): it has no answer to other questions."
    if several_turns(task) or sys.stdin is None or not sys.stdin.isatty():
        print(note, file=sys.stderr)
        return ""
    print(f"{note} Press Enter to begin with a problem of that task.", file=sys.stderr)
    return draw(task, "test", seed, 1)[0].prompt


def _instruction(config: Config) -> str:
    """What the task tells the model before a problem."""
    task = config.task.build()
    told = next((text for name in ("instruction", "system") if isinstance(text := getattr(task, name, None), str)), "")
    if not told:
        fail(f"task {config.task.name!r} has no instruction: leave --instruction out")
    return told


def _dialogue(config: Config, first: str) -> Callable[[str], str]:
    """A function from the user's next message to the model's reply."""
    with quick_imports():
        from poise.engines.choose import choose
        from poise.engines.limits import most_tokens
        from poise.models.errors import ModelError
        from poise.models.policy import load_policy
        from poise.rollout.sampling import Sampling
        from poise.rollout.types import Request
        from poise.tasks import Message

    rollout, said = config.rollout, list[Message]()
    policy = load_policy(
        config.model, device=config.device, dtype=config.dtype, remote_code=config.remote_code, longest=rollout.longest
    )
    engine = choose(policy, note=partial(print, file=sys.stderr))
    sampling = Sampling(config.test_temperature, rollout.top_p, rollout.top_k)

    def reply(text: str) -> str:
        begun = said or not first or text.startswith(first)  # as a problem of the task does
        said.append({"role": "user", "content": text if begun else f"{first}\n\n{text}"})
        prompt = policy.encode(said)
        room = min(rollout.max_tokens, most_tokens(policy) - len(prompt))
        if room < 1:
            raise ModelError(f"the dialogue has {len(prompt)} tokens, and the model reads no more: begin anew")
        requests = [Request(prompt, room, policy.end_tokens)]
        found = engine.sample(requests, sampling, config.evaluation.seed + len(said))
        answer = policy.decode(found.tokens[0][found.mask[0]].tolist())
        said.append({"role": "assistant", "content": answer})
        return answer if found.finished[0] else f"{answer} … (cut off at {room} tokens)"

    return reply
