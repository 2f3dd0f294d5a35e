"""The reference of the settings is made from their declarations, and names who reads each."""

import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from nightjar.pipeline.settings import PARTS, Settings
from nightjar.pipeline.settings.read_by import API, BEAT, GPU_WORKER, PLANNER, RUN, TASK_RUNNER
from nightjar.pipeline.settings.reference import read_by_of, reference_page
from nightjar.pipeline.settings.variables import OTHER_VARIABLES

ROOT = Path(__file__).parents[2]
# The processes that run the code of a file, where it is one alone.
READERS = {
    "gpu_worker/worker/*.py": GPU_WORKER,
    "pipeline/planning/tasks.py": PLANNER,
    "pipeline/planning/planner.py": PLANNER,
    "pipeline/planning/calls.py": API,
    "pipeline/queue/clock.py": BEAT,
    "pipeline/queue/scheduling.py": PLANNER,
    "pipeline/runner/*.py": TASK_RUNNER,
}


def test_the_page_is_that_of_the_declarations() -> None:
    page = ROOT / "docs" / "reference" / "settings.md"
    assert page.read_text(encoding="utf-8") == reference_page()


def test_every_setting_is_in_one_part_and_has_a_row() -> None:
    within = [name for part in PARTS for name in part.model_fields]
    assert sorted(within) == sorted(Settings.model_fields)
    rows = re.findall(r"^\| `(NIGHTJAR_\w+)` \|", reference_page(), re.MULTILINE)
    assert len(set(rows)) == len(rows) == len(within) + len(OTHER_VARIABLES)


@pytest.mark.parametrize("pattern", READERS)
def test_a_process_that_uses_a_setting_is_named(pattern: str) -> None:
    files = list(ROOT.glob(pattern))
    texts = [path.read_text(encoding="utf-8") for path in files]
    used = {name for text in texts for name in re.findall(r"\bsettings\.([a-z]\w*)", text)}
    fields = used & set(Settings.model_fields)
    assert files
    unnamed = {
        name
        for name in fields
        if READERS[pattern] not in read_by_of(Settings.model_fields[name]).processes
    }
    assert unnamed == set()


def test_readers_are_processes_of_the_structure() -> None:
    text = (ROOT / "docs" / "explanations" / "structure.md").read_text(encoding="utf-8")
    table = text.partition("## The processes")[2]
    listed = set(re.findall(r"^\| ([^|`]+) \|", table, re.MULTILINE))
    told = {
        name for field in Settings.model_fields.values() for name in read_by_of(field).processes
    }
    assert told - listed == {"every process", "commands", RUN}


def test_a_declaration_without_readers_is_refused() -> None:

    with pytest.raises(LookupError, match="no readers"):
        read_by_of(FieldInfo(description="told"))
