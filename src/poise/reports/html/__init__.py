"""``poise report``: run folders as one page that opens from disk, or that is served while training goes on."""

from poise.reports.html.page import write_report
from poise.reports.html.server import serve

__all__ = ["serve", "write_report"]
