"""Exact retrieval by cosine similarity: BEIR folders, questions with answers, groups of texts, Flickr30k captions.

python eval/retrieval.py --model DIR scifact issues@title_to_body.valid --against BASE
python eval/retrieval.py --model DIR --pairs held_out.csv --columns text1 question text2 answer --json retrieval.json
python eval/retrieval.py --model DIR --groups my_groups.jsonl --column texts
python eval/retrieval.py --model DIR --data-dir DATA
"""

import sys

from angle_llm.cli import guarded, run

if __name__ == "__main__":
    guarded(run, ["eval", "retrieval", *sys.argv[1:]])
