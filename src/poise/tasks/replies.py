"""Reading replies. They are untrusted: each function takes time linear in the text."""

from __future__ import annotations


def spoken(reply: str) -> str:
    """What comes after the reasoning: the text behind the last ``</think>``, or all of it."""
    return reply.rpartition("</think>")[2]


def last_answer(reply: str) -> str | None:
    """What stands in the last ``<answer>…</answer>``; None where there is none."""
    end = reply.rfind("</answer>")
    start = reply.rfind("<answer>", 0, max(end, 0))
    return reply[start + len("<answer>") : end].strip() if start >= 0 else None
