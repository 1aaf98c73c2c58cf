"""Hard negatives for positive pairs, found by any encoder: `angle-llm data mine`.

    pairs, candidates ──► vectors ──► the nearest candidates of each anchor ──► guards ──► triples (anchor, positive, negative)

settings    what `angle-llm data mine` is told
pairs       what is mined: texts by number, positive pairs, candidates, and who is known to belong to whom
vectors     every text's vector in one file on disk, made once and found again
search      exact nearest candidates, block by block; the same whatever the blocks
guards      what may not be a negative, and why
selection   a negative or several for each pair, in parts of some pairs; every pair accounted for
job         one command's output: begun, gone on with, finished, never mixed with another's
report      what is told at the end
command     `angle-llm data mine`
"""

from angle_llm.mining.settings import MineSettings

__all__ = ["MineSettings"]
