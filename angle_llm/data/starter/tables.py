"""Reads the lexicon's tables into typed records. A table row may run over several lines, indented by two spaces."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Noun:
    """One kind of thing: its head word, whether it is a mass ("some bread"), hypernyms, adjectives, sisters."""

    word: str
    mass: bool
    hypernyms: tuple[str, ...]
    adjectives: tuple[str, ...]
    category: str


@dataclass(frozen=True)
class Agent:
    """Somebody or something that acts: gender (m, f, n; i for "it"), what the word entails, who it is not."""

    word: str
    gender: str
    broader: tuple[str, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """A kind of place: phrases for it, what they entail, what they exclude."""

    phrases: tuple[str, ...]
    broader: tuple[str, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class Frame:
    """An action: who does it where, in how many wordings, and what cannot go on at the same time."""

    agents: str
    several: bool
    place: str
    act: tuple[str, ...]
    same: tuple[str, ...]
    broad: tuple[str, ...]
    against: tuple[str, ...]


@dataclass
class Block:
    """A template triple: an anchor, its positives and negatives by relation, and slots of its own."""

    anchor: str
    positives: list[tuple[str, str]] = field(default_factory=list)
    negatives: list[tuple[str, str]] = field(default_factory=list)
    slots: dict[str, list[str]] = field(default_factory=dict)


def rows(table: str) -> Iterator[str]:
    """Yield the logical rows of a table, continuation lines joined."""
    row = ""
    for line in table.strip("\n").split("\n"):
        if line.startswith("  "):
            row += " " + line.strip()
            continue
        if row:
            yield row
        row = line.strip()
    if row:
        yield row


def _split(text: str, separator: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(separator) if part.strip())


def read_nouns(table: str) -> dict[str, list[Noun]]:
    """Parse `category > hypernyms ~ adjectives : members`."""
    nouns: dict[str, list[Noun]] = {}
    for row in rows(table):
        head, members = row.split(" : ", 1)
        category, rest = head.split(" > ", 1)
        hypernyms, _, adjectives = rest.partition(" ~ ")
        nouns[category] = [
            Noun(
                word.rstrip("*"),
                word.endswith("*"),
                _split(hypernyms.removesuffix(" :"), ","),
                _split(adjectives, ","),
                category,
            )
            for word in _split(members, ",")
        ]
    return nouns


def read_agents(table: str) -> dict[str, list[Agent]]:
    """Parse `class : word/gender/broader/others; …`."""
    agents: dict[str, list[Agent]] = {}
    for row in rows(table):
        name, members = row.split(" : ", 1)
        agents[name] = []
        for member in _split(members, ";"):
            word, gender, broader, others = member.split("/")
            agents[name].append(Agent(word, gender, _split(broader, ","), _split(others, ",")))
    return agents


def read_places(table: str) -> dict[str, Place]:
    """Parse `tag > broader ! others : phrases`."""
    places: dict[str, Place] = {}
    for row in rows(table):
        head, phrases = row.split(" : ", 1)
        tag, rest = head.split(" > ", 1)
        broader, others = rest.split(" ! ", 1)
        places[tag] = Place(_split(phrases, ","), _split(broader, ","), _split(others, ","))
    return places


def read_frames(table: str) -> list[Frame]:
    """Parse `class @ place | act | same | broad | against`."""
    frames = []
    for row in rows(table):
        head, act, same, broad, against = row.split(" | ")
        agents, place = head.split(" @ ")
        several = agents.endswith("+")
        frames.append(
            Frame(agents.rstrip("+"), several, place, *(_split(part, ";") for part in (act, same, broad, against)))
        )
    return frames


def read_blocks(table: str) -> list[Block]:
    """Parse template triples: "=" opens one, "&" gives it a slot, "+" and "-" add `relation: template`.

    As in `read_fillers`, a comma inside a number does not separate.
    """
    blocks: list[Block] = []
    for row in rows(table):
        mark, rest = row[0], row[2:]
        if mark == "=":
            blocks.append(Block(rest))
            continue
        name, text = rest.split(": ", 1)
        if mark == "&":
            blocks[-1].slots[name] = list(_split(text, ", "))
        elif mark == "+":
            blocks[-1].positives.append((name, text))
        elif mark == "-":
            blocks[-1].negatives.append((name, text))
        else:
            raise ValueError(f"a row of a template table opens with one of = & + -, not {row!r}")
    return blocks


def read_fillers(table: str) -> dict[str, list[str]]:
    """Parse `slot : value > companion, …`; a comma inside a number ("1,200") does not separate."""
    fillers = {}
    for row in rows(table):
        slot, values = row.split(" : ", 1)
        fillers[slot] = list(_split(values, ", "))
    return fillers
