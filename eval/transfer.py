"""Accuracy of linear classifiers on frozen embeddings: SentEval's transfer tasks, with published scores.

python eval/transfer.py --model DIR --data-dir DATA
python eval/transfer.py --model DIR --data-dir SentEval/data/downstream --json transfer.json
python eval/transfer.py --model DIR --data-dir DATA --tasks mr cr trec --limit-train 2000

It needs scikit-learn: pip install 'angle_llm[transfer]'.
"""

import sys

from angle_llm.cli import guarded, run

if __name__ == "__main__":
    guarded(run, ["eval", "transfer", *sys.argv[1:]])
