"""`tools.measure_tree` on a made-up checkout whose figures are known."""

import json
from pathlib import Path

import pytest

from tools import measure_tree

TREE = {
    "room/__init__.py": "",
    "room/first.py": (
        '"""One short sentence.  Another: of two parts."""\n'
        "from .second import work\n\n\n"
        "def ask(temperature, top_p, top_k, min_p):\n"
        "    # It says\n"
        "    # why.\n"
        '    return work(seed=1, logprobs=2)["max_tokens"].bad_words\n'
    ),
    "room/second.py": (
        "def work(seed, logprobs):\n    from nightjar.room import first\n\n    return first\n"
    ),
    "other/third.py": "from nightjar.room.second import work\n\nprint(work, 'temperature')\n",
    "nightjar/__init__.py": '"""The package."""\n',
    "tests/test_it.py": (
        "class Own:\n    def read(self, other):\n        self._own = 1\n"
        "        return other._own, other._theirs, other.__dict__\n"
    ),
    "docs/" + "page.md": (
        "# A heading is no sentence\n\n" + "word " * 31 + "end. Two `words in code`.\n\n"
        "| a | table |\n\n```\ncode; here\n```\n- An item\n- another [item](address.md)\n"
    ),
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    # Linked folders are measured once, where they really are.
    (tmp_path / "nightjar" / "room").symlink_to("../room")
    return tmp_path


def test_measures_a_tree_whose_figures_are_known(checkout, capsys):
    assert measure_tree.main([str(checkout), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["circles"] == [["room.first", "room.second"]]
    assert found["imports_a_module"] == 1
    assert (found["source_files"], found["file_lines_median"], found["file_lines_max"]) == (3, 4, 8)
    assert (found["function_lines_p50"], found["function_lines_max"]) == (4, 4)
    assert found["sampling_copies"] == ["room.first"]
    assert (found["private_reaches"], found["private_reach_files"]) == (1, 1)
    assert found["lines"]["tests"] == 4
    # The page: 32 words, 2, and two items of 2; `room.first`: 3 words, 1, 3 and 3.
    assert found["prose_docs"] == {
        "sentences": 4,
        "words_mean": 9.5,
        "words_p90": 32,
        "over_30_percent": 25.0,
        "words_max": 32,
    }
    assert found["prose_source"] == {
        "sentences": 4,
        "words_mean": 2.5,
        "words_p90": 3,
        "over_30_percent": 0.0,
        "words_max": 3,
    }


def test_prints_a_line_a_figure(checkout, capsys):
    measure_tree.main([str(checkout)])
    printed = capsys.readouterr().out
    assert "2: room.first room.second" in printed
    assert "sentences 4, words_mean 9.5" in printed
