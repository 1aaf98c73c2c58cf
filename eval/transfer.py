"""Measure the accuracy of linear classifiers on frozen embeddings (SentEval). Same as `angle-llm eval transfer`.

python eval/transfer.py --model DIR --data-dir DATA
python eval/transfer.py --model DIR --data-dir SentEval/data/downstream --json transfer.json
python eval/transfer.py --model DIR --data-dir DATA --tasks mr cr trec --limit-train 2000

Needs scikit-learn: pip install 'angle_llm[transfer]'.
"""

import sys

from angle_llm.cli import run, run_cli

if __name__ == "__main__":
    run_cli(run, ["eval", "transfer", *sys.argv[1:]])
