"""The planner's memory while it plans rows of several MB for a model with a long context."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import NewJob, NewRequest
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from tests.databases import SQLITE_FIRST
from tests.models import Gpt2Shape, save_gpt2

CONTEXT = 131_072
ROW_BYTES = 4_000_000
ROOM_MIB = 250  # over what the process had before; 1,300 where a row is tokenized at once

# In a process of its own, whose peak is its own as well.
PLAN = """
import json, sys
from pathlib import Path
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.settings import Settings

def peak_kib():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))

model, url = sys.argv[1:]
store = Store(url)
settings = Settings.read(model=Path(model), accept_any_model=True)
planner = Planner(settings, store, PlanningModels.open(settings, store))
before = peak_kib()
done = 0
while planned := planner.plan_next():
    done += planned
print(json.dumps({"done": done, "more_mib": (peak_kib() - before) / 1024}))
"""


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context of 131,072 tokens, and a token of 128 bytes, as Llama 3 and GPT-2 have it.

    So a row of 4 MB may fit by its bytes, and its tokens have to be counted.
    """
    shape = Gpt2Shape(n_layer=1, n_embd=8, n_head=2, n_positions=CONTEXT, vocab_size=600)
    directory = save_gpt2(tmp_path_factory.mktemp("models") / "long", shape)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    entry = "-"
    while len(entry) < 128:
        merges.append([entry, entry])
        entry *= 2
        vocabulary.setdefault(entry, len(vocabulary))
    path.write_text(json.dumps(tokenizer))
    return directory


def long_bodies() -> list[dict[str, Any]]:
    texts = ["word " * (ROW_BYTES // 5), "ab\n" * (ROW_BYTES // 3), "1a2b3c4d" * (ROW_BYTES // 8)]
    texts.append("김치찌개가 좋겠어요. " * (ROW_BYTES // 29))
    bodies: list[dict[str, Any]] = [{"prompt": text, "max_tokens": 4} for text in texts]
    # As large, and each document fits.
    bodies.append({"query": "q", "documents": ["word " * 80] * (ROW_BYTES // 400)})
    return bodies


@pytest.mark.parametrize("database_url", SQLITE_FIRST, indirect=True)
def test_rows_of_4_mb_take_little_memory_where_the_context_is_long(
    store: Store, long_model: Path
) -> None:
    rows = []
    for index, body in enumerate(long_bodies()):
        kind = RequestKind.RANK if "query" in body else RequestKind.GENERATE
        rows.append(NewRequest(index, index + 1, f"row-{index}", kind, validate_body(kind, body)))
    with store.jobs.submit(NewJob("long", merge_equal=False)) as submission:
        submission.add(rows)
    url = store.database.url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, "-c", PLAN, str(long_model), url],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=True,
        text=True,
        timeout=240,
    )
    told = json.loads(done.stdout)
    assert told["done"] == len(rows)
    assert told["more_mib"] < ROOM_MIB, told
    results = store.results.read(submission.job_id)
    assert [record.index for record in results] == [0, 1, 2, 3]
    for record in results:
        assert record.error is not None
        assert record.error.code == "context_length_exceeded"
        assert (counted := re.match(r"the prompt has at least (\d+) tokens", record.error.message))
        assert CONTEXT < int(counted[1]) < 3 * CONTEXT  # and the others were not
    assert len(store.planning.dispatchable(9)) == 1
