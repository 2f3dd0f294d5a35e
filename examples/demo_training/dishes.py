"""How own text about dishes is made: queries with documents to rank, small talk, facts."""

import hashlib
import random
from dataclasses import dataclass

from examples.demo_training.dish_words import (
    ASKS,
    CLOSINGS,
    DISHES,
    ENDINGS,
    FACTS,
    NAMES,
    OPENINGS,
    OVERLAP,
    REPLIES,
    SHORT,
    UNSEEN_CLOSINGS,
    UNSEEN_OPENINGS,
    WHOLE,
)


@dataclass(frozen=True)
class Sample:
    """A query, the wording it is made of, and the form that its documents carry."""

    query: str
    phrasing: str
    ending: str
    space: bool

    def document(self, dish: str) -> str:
        """The document that names `dish` in this sample's form."""
        return (" " if self.space else "") + with_ending(dish, self.ending)


def has_final(word: str) -> bool:
    """Whether the last Hangul syllable of `word` ends in a consonant."""
    code = ord(word[-1]) - 0xAC00
    return 0 <= code < 11172 and code % 28 != 0


def with_ending(dish: str, ending: str) -> str:
    """`dish` with the copula in the form that Korean spelling asks for after it."""
    if ending == "이야":
        return dish + ("이야" if has_final(dish) else "야")
    if ending == "이에요":
        return dish + ("이에요" if has_final(dish) else "예요")
    return dish + ending


def fill(text: str, key: str, word: str) -> str:
    """Puts `word` for `{key}` in `text`, each particle right after it in its fitting form."""
    final = has_final(word)
    rieul = (ord(word[-1]) - 0xAC00) % 28 == 8
    forms = {
        "{을}": "을" if final else "를",
        "{이}": "이" if final else "가",
        "{은}": "은" if final else "는",
        "{으로}": "으로" if final and not rieul else "로",
        "{이라면}": "이라면" if final else "라면",
    }
    for particle, form in forms.items():
        text = text.replace(f"{{{key}}}{particle}", word + form)
    return text.replace(f"{{{key}}}", word)


def is_heldout(phrasing: str, dish: str) -> bool:
    """Whether this pair stays out of training: 10% of all pairs, by hash."""
    digest = hashlib.sha256(f"{phrasing}|{dish}".encode()).digest()
    return digest[0] * 256 + digest[1] < 6554


def make_sample(rng: random.Random, cuisine: str, unseen: bool = False) -> Sample:
    """A random query for `cuisine`; `unseen` takes the wording kept out of training."""
    name = rng.choice(NAMES[cuisine])
    kind = 0.0 if unseen else rng.random()
    if kind < 0.65:
        opening, closing = pick_sentences(rng, unseen)
        text = rng.choice(("\n", " ")).join((opening, closing)) if opening else closing
        phrasing, ending = f"{opening}|{closing}", rng.choice(ENDINGS)
        text = text if opening else f"{name} 이야기야. {text}"
    elif kind < 0.85:
        phrasing, ending = rng.choice(WHOLE), rng.choice(ENDINGS)
        text = phrasing
    else:
        phrasing, ending = rng.choice(SHORT), ""
        text = phrasing
    return Sample(fill(text, "c", name), phrasing, ending, rng.random() < 0.5)


def pick_sentences(rng: random.Random, unseen: bool) -> tuple[str, str]:
    """An opening and a closing, both seen in training or both kept out of it."""
    if unseen:
        return rng.choice(UNSEEN_OPENINGS), rng.choice(UNSEEN_CLOSINGS)
    opening = rng.choice([text for text in OPENINGS if text not in UNSEEN_OPENINGS])
    return opening, rng.choice([text for text in CLOSINGS if text not in UNSEEN_CLOSINGS])


def cuisines_to_rank(rng: random.Random) -> list[str]:
    """The cuisines of one ranking group, without one of the two that overlap."""
    dropped = rng.choice(OVERLAP)
    return [cuisine for cuisine in DISHES if cuisine != dropped]


def pick_dish(rng: random.Random, cuisine: str, phrasing: str, heldout: bool) -> str:
    """A dish of `cuisine` whose pair with `phrasing` is (not) held out; any if there is none."""
    pool = [dish for dish in DISHES[cuisine] if is_heldout(phrasing, dish) == heldout]
    return rng.choice(pool or DISHES[cuisine])


def make_group(rng: random.Random, per_cuisine: int) -> tuple[list[str], list[str], list[int]]:
    """Training queries, one document per cuisine, and the index of each query's document.

    All documents of a group have one form, so that only the dish decides.  Held-out pairs of
    phrasing and dish never meet in a group: the query is drawn again instead.
    """
    cuisines = cuisines_to_rank(rng)
    form = make_sample(rng, cuisines[0])
    dishes = [rng.choice(DISHES[cuisine]) for cuisine in cuisines]
    queries: list[str] = []
    targets: list[int] = []
    for index, cuisine in enumerate(cuisines):
        for _ in range(per_cuisine):
            sample = make_sample(rng, cuisine)
            while is_heldout(sample.phrasing, dishes[index]):
                sample = make_sample(rng, cuisine)
            queries.append(sample.query)
            targets.append(index)
    return queries, [form.document(dish) for dish in dishes], targets


def make_test(rng: random.Random, unseen: bool, candidates: int = 4) -> tuple[str, list[str]]:
    """A held-out query and its documents, the fitting one first, the rest of other cuisines."""
    cuisines = rng.sample(cuisines_to_rank(rng), candidates)
    sample = make_sample(rng, cuisines[0], unseen)
    while not unseen and not any(is_heldout(sample.phrasing, dish) for dish in DISHES[cuisines[0]]):
        sample = make_sample(rng, cuisines[0])
    dishes = [pick_dish(rng, cuisines[0], sample.phrasing, heldout=not unseen)]
    dishes += [rng.choice(DISHES[cuisine]) for cuisine in cuisines[1:]]
    return sample.query, [sample.document(dish) for dish in dishes]


def make_turn(rng: random.Random) -> tuple[str, str]:
    """A question about a cuisine and an answer that names a dish of it."""
    cuisine = rng.choice(list(DISHES))
    ask, reply = rng.choice(ASKS), rng.choice(REPLIES)
    dish = pick_dish(rng, cuisine, ask, heldout=False)
    return fill(ask, "c", rng.choice(NAMES[cuisine])), fill(reply, "d", dish)


def make_fact(rng: random.Random) -> str:
    """A sentence that says which cuisine a dish belongs to."""
    cuisine = rng.choice(list(DISHES))
    text = fill(rng.choice(FACTS), "c", rng.choice(NAMES[cuisine]))
    return fill(text, "d", rng.choice(DISHES[cuisine]))
