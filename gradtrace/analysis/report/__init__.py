"""A run as one HTML file that opens from disk.

``grid``, ``cells``, ``course``, ``modules`` and ``path`` ask the run and hold plain data; ``markup`` and ``page`` make
HTML of it; ``writing`` puts it into a file. What draws it in the browser is in ``assets``.
"""

from gradtrace.analysis.report.writing import report_html, write_report

__all__ = ["report_html", "write_report"]
