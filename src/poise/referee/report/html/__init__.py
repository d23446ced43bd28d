"""``poise report``: run folders as one HTML page, written to disk or served while training runs."""

from poise.referee.report.html.page import write_report
from poise.referee.report.html.server import serve

__all__ = ["serve", "write_report"]
