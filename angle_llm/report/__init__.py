"""From saved result files to one page and one file of tables: no model, no data, no network.

    docs/results/ ──► material (read, checked) ──► sections (a document of tables and plots) ──► page (HTML), markdown

A document is made once and written twice, so both say the same figures.
"""

from angle_llm.report.command import ReportSettings, report_main

__all__ = ["ReportSettings", "report_main"]
