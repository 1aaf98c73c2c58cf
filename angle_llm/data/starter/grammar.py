"""English in small: inflection, articles, and a template language for whole sentences.

A template is text with choices and slots::

    Shares of {company} (rose|climbed) {pct} percent in {city}.

* `(a|b|c)`   one of the alternatives, nested as you like;
* `{slot}`    a filler of that name, the same one wherever the slot recurs in the triple; `{slot2}` is a second one;
* `{slot!}`   another filler than the one the triple already uses (for contradictions);
* `{slot^}`   the companion of the filler: its hypernym, its country, whatever the lexicon wrote after ">".

Write "a" everywhere: `finish` turns it into "an" where the next word is spoken with a vowel.
"""

import random
import re
from collections.abc import Mapping, Sequence


def _pairs(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\w+)", text))


_PARTICIPLES = _pairs(
    """
    beat=beaten begin=begun bend=bent bite=bitten blow=blown break=broken bring=brought build=built buy=bought
    catch=caught choose=chosen cut=cut dig=dug do=done draw=drawn drink=drunk drive=driven eat=eaten feed=fed
    fight=fought find=found fly=flown fold=folded give=given grind=ground grow=grown hang=hung hide=hidden
    hit=hit hold=held keep=kept knit=knitted lay=laid lead=led leave=left lend=lent let=let light=lit lose=lost
    make=made meet=met pay=paid put=put read=read ride=ridden ring=rung say=said see=seen sell=sold send=sent
    set=set sew=sewn shake=shaken shear=shorn shoot=shot show=shown shut=shut sing=sung sow=sown spin=spun
    split=split spread=spread steal=stolen stick=stuck string=strung sweep=swept take=taken teach=taught
    tear=torn tell=told throw=thrown tow=towed weave=woven wind=wound write=written overtake=overtaken
    hear=heard swing=swung
    """
)
_PLURALS = _pairs(
    """
    man=men woman=women child=children person=people goose=geese mouse=mice sheep=sheep deer=deer fish=fish
    foot=feet knife=knives leaf=leaves loaf=loaves shelf=shelves calf=calves wolf=wolves scarf=scarves
    tomato=tomatoes potato=potatoes mango=mangoes hero=heroes aircraft=aircraft salmon=salmon bison=bison
    half=halves cod=cod trout=trout tuna=tuna sportsperson=sportspeople
    """
)
_DOUBLING = re.compile(r"^[^aeiou]*[aeiou][^aeiouwxy]$")
_ALSO_DOUBLING = {"equip", "unplug", "unzip", "unwrap", "begin", "quit", "unpin", "kidnap", "control", "propel"}

_AFTER_HEAD = (" of ", " in ", " with ", " without ")
_AN_ANYWAY = ("hour", "honest", "honour", "honor", "heir", "MRI", "X-ray", "SUV", "LED", "FM", "11", "18")
_A_ANYWAY = ("uni", "use", "usu", "euro", "Euro", "one", "once", "ukulele", "U-", "ute", "urin", "uran", "Ural", "ewe")
_A_NOT_UNI = ("unin", "unim")


def _doubles(verb: str) -> bool:
    return verb in _ALSO_DOUBLING or bool(_DOUBLING.match(verb))


def ing(verb: str) -> str:
    """Present participle: carry → carrying, lie → lying, chop → chopping, bake → baking."""
    if verb.endswith("ie"):
        return verb[:-2] + "ying"
    if verb.endswith("e") and not verb.endswith(("ee", "oe", "ye")):
        return verb[:-1] + "ing"
    return verb + (verb[-1] if _doubles(verb) else "") + "ing"


def third(verb: str) -> str:
    """Third person singular: carry → carries, push → pushes, have → has."""
    if verb == "have":
        return "has"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")


def participle(verb: str) -> str:
    """Past participle: write → written, carry → carried, chop → chopped."""
    if verb in _PARTICIPLES:
        return _PARTICIPLES[verb]
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + (verb[-1] if _doubles(verb) else "") + "ed"


def plural(noun: str) -> str:
    """Plural of a noun phrase; the head of "piece of fruit" or "man with a beard" is its first part."""
    head, of, rest = next((parts for parts in map(noun.partition, _AFTER_HEAD) if parts[1]), (noun, "", ""))
    if rest.startswith("a "):
        rest = plural(rest[2:])
    before, space, last = head.rpartition(" ")
    for irregular, form in _PLURALS.items():
        if last == irregular or (last.endswith(irregular) and irregular in ("man", "woman", "child")):
            last = last[: -len(irregular)] + form
            break
    else:
        last = third(last) if not last.endswith("o") else last + "s"
    return before + space + last + of + rest


def _spoken_with_vowel(word: str) -> bool:
    if word.startswith(_AN_ANYWAY):
        return True
    if word.startswith(_A_ANYWAY) and not word.startswith(_A_NOT_UNI):
        return False
    return word[0] in "aeiouAEIOU8"


def finish(text: str) -> str:
    """Turn generated words into a sentence: single spaces, a/an, a capital first letter."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" ([,.?!;:])", r"\1", text)
    text = re.sub(
        r"\b([Aa])n? (?=([A-Za-z0-9][\w-]*))", lambda m: m[1] + ("n " if _spoken_with_vowel(m[2]) else " "), text
    )
    return text[:1].upper() + text[1:]


class Deck:
    """A shuffled deck of values, reshuffled when used up: every value comes up before any comes up twice."""

    def __init__(self, values: Sequence[str], rng: random.Random) -> None:
        self.values = list(values)
        self.rng = rng
        self.left: list[str] = []

    def draw(self, without: Sequence[str] = ()) -> str:
        """Draw the next value that is not in `without`."""
        if all(value in without for value in self.values):
            raise ValueError(f"no value left in {self.values} without {list(without)}")
        while True:
            for place in range(len(self.left) - 1, -1, -1):
                if self.left[place] not in without:
                    return self.left.pop(place)
            self.left = list(self.values)
            self.rng.shuffle(self.left)


_CHOICE = re.compile(r"\(([^()]*)\)")
_SLOT = re.compile(r"\{([a-z_]+)(\d?)(!?)(\^?)\}")


def choose(template: str, rng: random.Random) -> str:
    """Resolve every `(a|b)` of a template, innermost first."""
    while match := _CHOICE.search(template):
        template = template[: match.start()] + rng.choice(match[1].split("|")) + template[match.end() :]
    return template


class Filling:
    """The fillers one triple has drawn so far: the same slot gets the same words in all three sentences."""

    def __init__(self, decks: Mapping[str, Deck], rng: random.Random) -> None:
        self.decks = decks
        self.rng = rng
        self.drawn: dict[str, str] = {}

    def _fill(self, match: re.Match[str]) -> str:
        slot, number, other, beside = match.groups()
        if slot not in self.decks:
            raise ValueError(f"unknown slot {match[0]}; the known ones are: {', '.join(sorted(self.decks))}")
        key = slot + number + other
        if key not in self.drawn:
            taken = [value for name, value in self.drawn.items() if name.rstrip("0123456789!") == slot]
            self.drawn[key] = self.decks[slot].draw(without=taken)
        word, _, companion = self.drawn[key].partition(">")
        return (companion if beside else word).strip()

    def sentence(self, template: str) -> str:
        """Resolve the choices and slots of a template to a finished sentence."""
        return finish(_SLOT.sub(self._fill, choose(template, self.rng)))
