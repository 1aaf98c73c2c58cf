"""Exact retrieval by cosine similarity, with AnglE's published scores on Flickr30k captions.

python eval/retrieval.py --model DIR --data-dir DATA
python eval/retrieval.py --model DIR --groups my_groups.jsonl --column texts --json retrieval.json
python eval/retrieval.py --model DIR --judged scifact
"""

import tyro

import angle_llm
from angle_llm.cli import guarded
from angle_llm.evaluate.retrieval import RetrievalSettings, retrieval_main

if __name__ == "__main__":
    guarded(lambda: retrieval_main(tyro.cli(RetrievalSettings), angle_llm.SentenceEncoder.from_pretrained))
