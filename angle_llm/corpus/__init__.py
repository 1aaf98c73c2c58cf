"""Vectors of a whole corpus: from files of any size to shards on disk, and a first look into them.

reading     rows of text, JSONL, CSV, TSV and Parquet files, one after another, each with its place
vectors     what is kept of a vector: length 1, fewer dimensions, fewer bits, two halves; and the way back
shards      a folder that is filled shard by shard, each whole or not counted, by one process or several
finished    such a folder read again
embed       the work: blocks of rows in, shards out
search      exact nearest rows, shard by shard
command     `angle-llm embed` and `angle-llm search`
"""

from angle_llm.corpus.command import EmbedSettings, SearchSettings, embed_main, search_main

__all__ = ["EmbedSettings", "SearchSettings", "embed_main", "search_main"]
