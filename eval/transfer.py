"""Accuracy of linear classifiers on frozen embeddings: SentEval's transfer tasks, with published scores.

python eval/transfer.py --model DIR --data-dir DATA
python eval/transfer.py --model DIR --data-dir SentEval/data/downstream --json transfer.json
python eval/transfer.py --model DIR --data-dir DATA --tasks mr cr trec --limit-train 2000

It needs scikit-learn: pip install 'angle_llm[transfer]'.
"""

import tyro

import angle_llm
from angle_llm.cli import guarded
from angle_llm.evaluate.transfer import TransferSettings, transfer_main

if __name__ == "__main__":
    guarded(lambda: transfer_main(tyro.cli(TransferSettings), angle_llm.SentenceEncoder.from_pretrained))
