"""Writes the starter triples: (anchor, what it entails, what contradicts it), composed from the lexicon beside it.

Two engines share the work. `TemplateWriter` fills whole-sentence templates (news, questions, forum, still scenes).
`CaptionWriter` builds a scene, that is an agent, an action frame, things, a place and what else is seen, and words it
three times: fully, as something that follows from it, and as something that cannot be true of it.

    python -m angle_llm.data.starter.generator      rewrites nli_triples.jsonl.gz, byte for byte the same every time
"""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from angle_llm.data.starter.caption_writer import CaptionWriter, Triple
from angle_llm.data.starter.captions_things import SCENES
from angle_llm.data.starter.everyday import EVERYDAY
from angle_llm.data.starter.fillers import FILLERS
from angle_llm.data.starter.forum import FORUM
from angle_llm.data.starter.grammar import Deck, Filling
from angle_llm.data.starter.headlines import HEADLINES
from angle_llm.data.starter.news import NEWS
from angle_llm.data.starter.news_world import WORLD_NEWS
from angle_llm.data.starter.questions import QUESTIONS
from angle_llm.data.starter.tables import Block, read_blocks, read_fillers
from angle_llm.files import write_file

COMMITTED_COUNT = 6800
COMMITTED_SEED = 20240

# Shares of the domains, in percent.
SHARES = {"caption": 41, "scene": 4, "news": 25, "question": 15, "forum": 15}


class TemplateWriter:
    """Fills the template triples of one domain, every block in turn."""

    def __init__(self, domain: str, table: str, rng: random.Random) -> None:
        self.domain = domain
        self.rng = rng
        self.blocks = read_blocks(table)
        self.order: list[int] = []
        shared = {slot: Deck(values, rng) for slot, values in read_fillers(FILLERS).items()}
        self.decks = [
            shared | {slot: Deck(values, rng) for slot, values in block.slots.items()} for block in self.blocks
        ]
        self.relations = [self._relation_decks(block) for block in self.blocks]

    def _relation_decks(self, block: Block) -> tuple[Deck, Deck]:
        if not block.positives or not block.negatives:
            raise ValueError(f"the block {block.anchor!r} needs at least one positive (+) and one negative (-)")
        return (
            Deck([str(place) for place in range(len(block.positives))], self.rng),
            Deck([str(place) for place in range(len(block.negatives))], self.rng),
        )

    def triple(self) -> Triple:
        """Write one triple from the next block."""
        if not self.order:
            self.order = list(range(len(self.blocks)))
            self.rng.shuffle(self.order)
        place = self.order.pop()
        block = self.blocks[place]
        positives, negatives = self.relations[place]
        relation, positive = block.positives[int(positives.draw())]
        opposition, negative = block.negatives[int(negatives.draw())]
        filling = Filling(self.decks[place], self.rng)
        pair = [filling.sentence(block.anchor), filling.sentence(positive)]
        if relation == "paraphrase" and self.rng.random() < 0.4:
            pair.reverse()
        return {
            "anchor": pair[0],
            "positive": pair[1],
            "negative": filling.sentence(negative),
            "kind": f"{self.domain}/{relation}/{opposition}",
        }


def generate_triples(count: int, seed: int) -> list[Triple]:
    """Return `count` distinct triples, shuffled, in the proportions of SHARES; the same seed gives the same list.

    No sentence serves as anchor twice, and the three sentences of a triple differ.
    """
    rng = random.Random(seed)
    writers: dict[str, Callable[[], Triple]] = {
        "caption": CaptionWriter(rng).triple,
        "scene": TemplateWriter("scene", SCENES, rng).triple,
        "news": TemplateWriter("news", NEWS + WORLD_NEWS + HEADLINES, rng).triple,
        "question": TemplateWriter("question", QUESTIONS, rng).triple,
        "forum": TemplateWriter("forum", FORUM + EVERYDAY, rng).triple,
    }
    triples: list[Triple] = []
    anchors: set[str] = set()
    for domain, wanted in _quotas(count).items():
        made = tries = 0
        while made < wanted:
            tries += 1
            if tries > 50 * wanted + 1000:
                raise ValueError(f"the lexicon holds too few distinct {domain} triples for a count of {count}")
            triple = writers[domain]()
            sentences = {triple["anchor"], triple["positive"], triple["negative"]}
            if len(sentences) == 3 and triple["anchor"] not in anchors:
                anchors.add(triple["anchor"])
                triples.append(triple)
                made += 1
    rng.shuffle(triples)
    return triples


def _quotas(count: int) -> dict[str, int]:
    quotas = {domain: count * share // 100 for domain, share in SHARES.items()}
    quotas["caption"] += count - sum(quotas.values())
    return quotas


def to_lines(triples: Sequence[Triple]) -> bytes:
    """One JSON object per line, UTF-8."""
    return "".join(json.dumps(triple, ensure_ascii=False) + "\n" for triple in triples).encode()


def write_committed() -> None:
    """Rewrite the committed file, whole or not at all."""
    target = Path(__file__).with_name("nli_triples.jsonl.gz")
    content = gzip.compress(to_lines(generate_triples(COMMITTED_COUNT, COMMITTED_SEED)), mtime=0)
    write_file(target, lambda file: file.write(content))


if __name__ == "__main__":
    write_committed()
