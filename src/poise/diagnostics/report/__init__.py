"""``poise report``: run folders as one page that opens from disk, or that is served while training goes on."""

from poise.diagnostics.report.page import write_report
from poise.diagnostics.report.server import serve

__all__ = ["serve", "write_report"]
