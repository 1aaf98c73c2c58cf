"""Measure retrieval: BEIR folders, questions with answers, groups, Flickr30k. Same as `angle-llm eval retrieval`.

python eval/retrieval.py --model DIR scifact issues@title_to_body.valid --against BASE
python eval/retrieval.py --model DIR --pairs held_out.csv --columns text1 question text2 answer --json retrieval.json
python eval/retrieval.py --model DIR --groups my_groups.jsonl --column texts
python eval/retrieval.py --model DIR --groups DATA/flickr30k/test_2016.jsonl.gz
"""

import sys

from angle_llm.cli import run, run_cli

if __name__ == "__main__":
    run_cli(run, ["eval", "retrieval", *sys.argv[1:]])
