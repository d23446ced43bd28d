"""Questions over a small made-up world, answered with a search and a calculator tool."""

from poise.tasks.search_qa.task import SearchQA

__all__ = ["SearchQA"]
