"""One page and one file of tables from saved results: no model, no data, no network.

python eval/report.py
python eval/report.py --results docs/results --page docs/report.html --tables docs/RESULTS.md
"""

import tyro

from angle_llm.cli import guarded
from angle_llm.report import ReportSettings, report_main

if __name__ == "__main__":
    guarded(lambda: report_main(tyro.cli(ReportSettings, description=__doc__)))
