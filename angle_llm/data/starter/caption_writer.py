"""Composes caption triples from action frames: a scene worded in full, as what follows, as what cannot be."""

import random
import re
from dataclasses import dataclass, field, replace

from angle_llm.data.starter.captions import PEOPLE
from angle_llm.data.starter.captions_things import THINGS
from angle_llm.data.starter.grammar import Deck, finish, ing, participle, plural, third
from angle_llm.data.starter.lexicon import (
    AGENTS,
    CLOTHES,
    COLORS,
    COMPANY,
    NOT_FOR_MEN,
    NOUNS,
    OPPOSITES,
    PLACES,
    SYNONYMS,
    WEATHER,
)
from angle_llm.data.starter.tables import Agent, Frame, Noun, read_agents, read_frames, read_nouns, read_places

Triple = dict[str, str]

_SLOT = re.compile(r"\{(?:(a|some) )?([a-z_]+)\}")
_TRANSITIVE = re.compile(r"^(\w+)((?: (?:up|down|off|out|away|in))?) (\{(?:a |some )?[a-z_]+\})(.*)$")
_LOCATED = re.compile(
    r" (on|in|at|under|behind|outside|from|near|by|onto|into|around) (\{?a|an|the|\{his\}|their)(?!\w)"
)
_NUMBERS = ("two", "three", "four", "five", "six")
_MANY = ("several", "a few", "some")


@dataclass(frozen=True)
class Thing:
    """An object of the scene as it is there: a noun, how many, perhaps an adjective."""

    noun: Noun
    count: int
    adjective: str

    @property
    def plural(self) -> bool:
        """Whether a verb with this subject is plural."""
        return self.count > 1 and not self.noun.mass


@dataclass(frozen=True)
class Scene:
    """All there is to see; each of the three sentences words a part of it."""

    frame: Frame
    agent: Agent
    count: int
    act: str
    look: str
    color: str
    place: str
    extra: str
    against_extra: str
    things: dict[str, Thing] = field(default_factory=dict)


@dataclass(frozen=True)
class Wording:
    """What one sentence says: the words for each part of the scene, empty where it is silent."""

    subject: str
    plural: bool
    gender: str
    act: str
    look: str = ""
    place: str = ""
    extra: str = ""
    detail: bool = False
    broader_things: bool = False
    swap_thing: str = ""
    swap_adjective: bool = False
    any_thing: bool = False


def _group(noun: str, count: int) -> str:
    return f"a {noun}" if count == 1 else f"{_NUMBERS[count - 2]} {plural(noun)}"


class CaptionWriter:
    """Composes triples about what a picture could show, from the action frames."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.nouns = read_nouns(NOUNS)
        self.agents = read_agents(AGENTS)
        self.places = read_places(PLACES)
        self.frames = read_frames(PEOPLE) + read_frames(THINGS)
        self.order: list[Frame] = []
        self.noun_decks = {name: Deck([noun.word for noun in nouns], rng) for name, nouns in self.nouns.items()}
        self.agent_decks = {name: Deck([agent.word for agent in agents], rng) for name, agents in self.agents.items()}
        self.looks = Deck([" ".join(part.split()) for part in CLOTHES.split(";")], rng)
        self.colors = Deck(COLORS, rng)
        self.weather = Deck(WEATHER, rng)
        self.company = Deck(COMPANY, rng)

    def triple(self) -> Triple:
        """Write one caption triple; its kind names the relations that were used."""
        scene = self._scene()
        anchor = self._anchor(scene)
        relation, positive = self._positive(scene)
        opposition, negative = self._negative(scene)
        return {
            "anchor": anchor, "positive": positive, "negative": negative, "kind": f"caption/{relation}/{opposition}",
        }  # fmt: skip

    def _scene(self) -> Scene:
        rng = self.rng
        if not self.order:
            self.order = list(self.frames)
            rng.shuffle(self.order)
        frame = self.order.pop()
        word = self.agent_decks[frame.agents].draw()
        agent = next(agent for agent in self.agents[frame.agents] if agent.word == word)
        count = rng.choice((2, 2, 3, 4, 5)) if frame.several else rng.choice((1, 1, 1, 1, 1, 1, 2, 3))
        if "{his}" in "".join(frame.act + frame.same + frame.broad + frame.against):
            count = 1
        act = rng.choice(frame.act)
        things = {}
        for article, name in _SLOT.findall("".join(frame.act + frame.same + frame.against)):
            if name != "his" and name not in things:
                things[name] = self._thing(name, article)
        person = agent.gender != "i"
        look = self.looks.draw(NOT_FOR_MEN) if person and rng.random() < 0.3 else ""
        if agent.gender in "mn" and "dress" in look:
            look = "wearing a {color} hat"
        if " in " in agent.word or "garment" in things:
            look = ""
        if count > 1 and " a {" in look:
            before, _, garment = look.partition(" a {color} ")
            look = f"{before} {{color}} {plural(garment)}"
        place = rng.choice(self.places[frame.place].phrases) if rng.random() < 0.7 and not _LOCATED.search(act) else ""
        extra = against_extra = ""
        outdoors = "outdoors" in self.places[frame.place].broader[0]
        if outdoors and frame.place != "snow" and rng.random() < 0.25:
            extra, against_extra = self.weather.draw().split("/")
        elif person and frame.place != "pool" and rng.random() < 0.12:
            extra = self.company.draw()
        return Scene(frame, agent, count, act, look, self.colors.draw(), place, extra, against_extra, things)

    def _thing(self, name: str, article: str) -> Thing:
        if name not in self.nouns:
            raise ValueError(f"unknown category {name!r}; the known ones are: {', '.join(sorted(self.nouns))}")
        word = self.noun_decks[name].draw()
        noun = next(noun for noun in self.nouns[name] if noun.word == word)
        count = self.rng.choice({"a": (1,), "some": (2, 3, 4, 9, 9), "": (1, 1, 2, 3, 9)}[article])
        adjective = self.rng.choice(noun.adjectives) if noun.adjectives and self.rng.random() < 0.35 else ""
        return Thing(noun, count, adjective)

    def _noun_phrase(self, thing: Thing, article: str, wording: Wording) -> str:
        word, mass = thing.noun.word, thing.noun.mass
        adjective = thing.adjective if wording.detail else ""
        if wording.broader_things:
            word, adjective = self.rng.choice(thing.noun.hypernyms), ""
            if mass and not word.endswith("*"):
                return f"a {word}"
            word = word.rstrip("*")
        elif wording.swap_thing == thing.noun.category:
            word = self.noun_decks[thing.noun.category].draw(without=(word,))
            mass = next(noun.mass for noun in self.nouns[thing.noun.category] if noun.word == word)
        elif not wording.detail and not wording.swap_thing and self.rng.random() < 0.6:
            word = SYNONYMS.get(word, word)
        if wording.swap_adjective and thing.adjective:
            adjective = OPPOSITES[thing.adjective]
        some = "any" if wording.any_thing else "some"
        if mass:
            return f"{some if article else ''} {adjective} {word}"
        if article == "a" or thing.count == 1:
            return f"a {adjective} {word}"
        number = _NUMBERS[thing.count - 2] if thing.count < 9 and wording.detail else some
        return f"{number} {adjective} {plural(word)}"

    def _fill(self, text: str, scene: Scene, wording: Wording) -> str:
        def noun_phrase(match: re.Match[str]) -> str:
            article, name = match.groups()
            if name == "his":
                return "their" if wording.plural else {"m": "his", "f": "her", "n": "their", "i": "its"}[wording.gender]
            return self._noun_phrase(scene.things[name], article or "", wording)

        text = _SLOT.sub(noun_phrase, text.replace("{color}", scene.color))
        return text.replace("hisself", "himself").replace("theirself", "themselves")

    def _clause(self, scene: Scene, wording: Wording, form: str) -> str:
        """Word a clause; `form` is progressive, present, fragment, existential, negated or passive."""
        act = self._fill(wording.act, scene, wording)
        verb, _, rest = act.partition(" ")
        subject = f"{wording.subject} {self._fill(wording.look, scene, wording)}"
        place = "" if _LOCATED.search(wording.act) or wording.place in act else wording.place
        tail = f"{place} {wording.extra}"
        be = "are" if wording.plural else "is"
        if form == "passive" and (match := _TRANSITIVE.match(wording.act)):
            verb, particle, slot, rest = match.groups()
            patient = self._fill(slot, scene, wording)
            thing = scene.things[slot.strip("{}").split(" ")[-1]]
            were = "are" if thing.plural and "{a " not in slot else "is"
            rest = self._fill(rest, scene, wording)
            return finish(f"{patient} {were} being {participle(verb)}{particle}{rest} by {subject} {tail}.")
        if form == "negated":
            return finish(f"{subject} {be} not {ing(verb)} {rest} {tail}.")
        if form == "present":
            return finish(f"{subject} {verb if wording.plural else third(verb)} {rest} {tail}.")
        if form == "fragment":
            return finish(f"{subject} {ing(verb)} {rest} {tail}.")
        if form == "existential":
            return finish(f"There {be} {subject} {ing(verb)} {rest} {tail}.")
        if form == "fronted" and place:
            return finish(f"{place}, {subject} {be} {ing(verb)} {rest} {wording.extra}.")
        return finish(f"{subject} {be} {ing(verb)} {rest} {tail}.")

    def _wording(self, scene: Scene, subject: str = "", act: str = "", **parts: str | bool) -> Wording:
        wording = Wording(
            subject or _group(scene.agent.word, scene.count), scene.count > 1, scene.agent.gender, act or scene.act
        )
        return replace(wording, **parts)  # type: ignore[arg-type]

    def _passive_fits(self, scene: Scene) -> bool:
        match = _TRANSITIVE.match(scene.act)
        return match is not None and "{his}" not in scene.act and match[1] not in ("have", "sit", "get")

    def _anchor(self, scene: Scene) -> str:
        forms = ["progressive"] * 5 + ["present"] * 2 + ["fragment", "existential", "fronted"]
        if self._passive_fits(scene) and not scene.look:
            forms += ["passive"] * 2
        full = self._wording(scene, look=scene.look, place=scene.place, extra=scene.extra, detail=True)
        return self._clause(scene, full, self.rng.choice(forms))

    def _broad_subject(self, scene: Scene) -> str:
        broader = self.rng.choice(scene.agent.broader)
        if scene.count > 1:
            many = self.rng.choice(_MANY if scene.count > 2 else ("some", "a couple of", "a pair of", "two"))
            return f"{many} {plural(broader)}"
        if scene.agent.gender != "i" and self.rng.random() < 0.35:
            return self.rng.choice(("someone", "somebody", "a person"))
        return f"a {broader}"

    def _said_otherwise(self, scene: Scene) -> str:
        return self.rng.choice(scene.frame.same)

    def _positive(self, scene: Scene) -> tuple[str, str]:
        rng = self.rng
        relations = ["hypernym", "hypernym", "synonym", "synonym", "synonym"]
        if scene.look or scene.place or scene.extra:
            relations += ["drop"]
        if (scene.place and scene.look) or scene.extra:
            relations += ["reorder"]
        if self._passive_fits(scene):
            relations += ["passive", "passive"]
        if scene.count > 1:
            relations += ["number"]
        relation = rng.choice(relations)
        form = rng.choice(("progressive", "progressive", "progressive", "existential", "present", "fragment"))
        place = scene.place if rng.random() < 0.4 else ""
        broad_place = rng.choice(self.places[scene.frame.place].broader) if scene.place and rng.random() < 0.5 else ""
        if relation == "hypernym":
            if rng.random() < 0.5:
                wording = self._wording(
                    scene, self._broad_subject(scene), rng.choice(scene.frame.broad), place=broad_place
                )
            else:
                act = rng.choice((scene.act, self._said_otherwise(scene)))
                wording = self._wording(scene, self._broad_subject(scene), act, broader_things=True, place=broad_place)
        elif relation == "synonym":
            subject = self._broad_subject(scene) if rng.random() < 0.5 else ""
            look = scene.look if rng.random() < 0.25 else ""
            wording = self._wording(scene, subject, self._said_otherwise(scene), place=place, look=look)
        elif relation == "reorder":
            form = rng.choice(("fronted", "existential"))
            wording = self._wording(scene, look=scene.look, place=scene.place, extra=scene.extra)
        elif relation == "passive":
            form = "passive"
            subject = self._broad_subject(scene) if rng.random() < 0.4 else ""
            wording = self._wording(scene, subject, place=place, broader_things=rng.random() < 0.2)
        elif relation == "number":
            subject = f"{rng.choice(_MANY if scene.count > 2 else ('some', 'a couple of'))} {plural(scene.agent.word)}"
            act = rng.choice((scene.act, self._said_otherwise(scene)))
            wording = self._wording(scene, subject, act, place=place)
        else:
            wording = self._wording(scene)
        return relation, self._clause(scene, wording, form)

    def _negative(self, scene: Scene) -> tuple[str, str]:
        rng = self.rng
        things = [name for name in re.findall(r"\{(?:a |some )?([a-z_]+)\}", scene.act) if name != "his"]
        relations = ["antonym"] * 5 + ["negation"] * 2 + ["agent"]
        relations += ["object"] * 3 if things else []
        relations += ["number"] if scene.count > 1 else []
        relations += ["place"] if scene.place and scene.agent.gender != "i" else []
        relations += ["attribute"] * 2 if scene.look or any(scene.things[name].adjective for name in things) else []
        relations += ["circumstance"] if scene.against_extra else []
        relation = rng.choice(relations)
        form = rng.choice(("progressive", "progressive", "progressive", "present", "fragment", "existential"))
        place = scene.place if rng.random() < 0.5 else ""
        look = scene.look if rng.random() < 0.3 else ""
        act = rng.choice((scene.act, scene.act, self._said_otherwise(scene)))
        if relation == "antonym":
            subject = self._broad_subject(scene) if rng.random() < 0.25 else ""
            wording = self._wording(scene, subject, rng.choice(scene.frame.against), place=place, look=look)
        elif relation == "negation":
            return relation, self._negation(scene, act, place)
        elif relation == "agent":
            other = rng.choice(scene.agent.others)
            wording = self._wording(scene, _group(other, scene.count), act, place=place)
            wording = replace(wording, gender="n" if scene.agent.gender in "mf" else wording.gender)
        elif relation == "object":
            wording = self._wording(scene, act=scene.act, place=place, look=look, swap_thing=rng.choice(things))
        elif relation == "number":
            other_count = rng.choice([number for number in (1, 2, 3, 4, 5, 6) if number != scene.count])
            subject = f"only one {scene.agent.word}" if other_count == 1 else _group(scene.agent.word, other_count)
            wording = replace(self._wording(scene, subject, act, place=place), plural=other_count > 1)
        elif relation == "place":
            elsewhere = rng.choice(self.places[scene.frame.place].others)
            wording = self._wording(scene, place=elsewhere, look=look)
        elif relation == "attribute":
            color = OPPOSITES[scene.color]
            recolored = replace(scene, color=color)
            wording = self._wording(scene, look=scene.look, place=place, detail=True, swap_adjective=True)
            return relation, self._clause(recolored, wording, form)
        else:
            wording = self._wording(scene, act=act, place=place, extra=scene.against_extra)
        return relation, self._clause(scene, wording, form)

    def _negation(self, scene: Scene, act: str, place: str) -> str:
        wording = self._wording(scene, act=act, place=place, any_thing=True)
        if scene.count == 1 and self.rng.random() < 0.6:
            nobody = f"no {scene.agent.word}" if scene.agent.gender == "i" else self.rng.choice(("nobody", "no one"))
            negated = replace(wording, subject=nobody, plural=False, gender="i" if scene.agent.gender == "i" else "n")
            return self._clause(scene, negated, self.rng.choice(("progressive", "existential")))
        subject = f"the {scene.agent.word if scene.count == 1 else plural(scene.agent.word)}"
        return self._clause(scene, replace(wording, subject=subject), "negated")
