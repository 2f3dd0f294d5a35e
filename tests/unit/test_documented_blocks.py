"""Every shell block of the documents is run by a test, or is listed with its reason."""

import re
import tomllib
from collections import Counter
from itertools import chain

from tests.documented import (
    BY_NAME,
    MOST_NOT_RUN,
    NOT_RUN,
    OTHER_LANGUAGES,
    SCENES,
    SHELL,
    Why,
    fenced,
    shell_blocks,
)
from tests.documents import ROOT

TESTS = ROOT / "tests"
PLAYERS = ("acceptance/test_documented_commands.py", "acceptance/test_nightly_example.py")


def test_every_block_is_run_or_has_a_reason() -> None:
    run = [*chain.from_iterable(SCENES.values()), *chain.from_iterable(BY_NAME.values())]
    places = Counter([*run, *NOT_RUN])
    assert set(shell_blocks()) - places.keys() == set()
    assert {key: count for key, count in places.items() if count > 1} == {}
    assert len(run) > 40


def test_the_list_of_blocks_that_are_not_run_does_not_grow() -> None:
    assert len(NOT_RUN) <= MOST_NOT_RUN
    assert set(NOT_RUN.values()) <= set(Why)


def test_each_scene_is_played_by_one_test() -> None:
    texts = "\n".join((TESTS / name).read_text(encoding="utf-8") for name in PLAYERS)
    played = Counter(re.findall(r'\b(?:play|alone|playing)\(\s*"([^"]+)"', texts))
    assert played == Counter(dict.fromkeys(SCENES, 1))


def test_the_tests_that_are_named_read_their_pages() -> None:
    for name, keys in BY_NAME.items():
        text = (TESTS / name).read_text(encoding="utf-8")
        for page in {page for page, _ in keys}:
            assert page in text, (name, page)


def test_no_shell_block_hides_behind_another_language() -> None:
    languages = {language for _, language, _ in fenced()}
    assert languages - {*SHELL, *OTHER_LANGUAGES} == set()
    shells = re.compile(r"^(\$ |nightjar |pip |curl |make |export )", re.MULTILINE)
    hidden = [
        (page, text)
        for page, language, text in fenced()
        if language not in SHELL and shells.search(text)
    ]
    assert hidden == []


def test_what_is_not_run_because_it_installs_names_what_there_is() -> None:
    """Extras of the project, targets of the Makefile."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for key, why in NOT_RUN.items():
        if why is Why.INTERNET:
            text = shell_blocks()[key]
            named = re.findall(r"\[([\w,]+)\]", text)
            made = re.findall(r"^make ([\w-]+)", text, re.MULTILINE)
            assert named or made, key
            assert set(named) <= set(extras["optional-dependencies"])
            assert set(made) <= set(targets)
