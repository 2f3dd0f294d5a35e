"""Registering prompt vectors: versions, and files that cannot be used."""

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from pydantic import SecretStr
from safetensors.numpy import load, save_file

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.adapters import not_served, unfit
from nightjar.gpu_worker.worker.served import warn_of_adapters
from nightjar.jobs.errors import UnknownVectorError, VectorAliasError
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.records import EncodedRequest, Job, MicroBatchRef, NewMicroBatch
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.vector_tables import job_prompt_vector
from nightjar.jobs.vector_records import LORA, VECTORS, VectorFile, split_reference
from nightjar.pipeline.embedded.line_files import LineFiles
from nightjar.pipeline.embedded.run import RunArguments, run
from nightjar.pipeline.embedded.summary import Listener
from nightjar.pipeline.embedded.workdir import UsageError
from nightjar.pipeline.files.vectors import TRAINED_FOR, VectorsError, register_vectors
from nightjar.pipeline.settings import Settings
from tests.adapters import gpt2_sizes, save_adapter
from tests.jobs import submit
from tests.outcomes import claim, compute
from tests.processes import completion_line, write_lines


@pytest.fixture
def model(tiny_model: Path) -> ModelDirectory:
    return ModelDirectory.open(tiny_model)


def write(path: Path, *arrays: np.ndarray) -> Path:
    save_file({f"t{number}": array for number, array in enumerate(arrays)}, path)
    return path


def test_a_changed_file_is_a_new_version_and_the_same_one_is_not(
    store: Store, tmp_path: Path, model: ModelDirectory
) -> None:
    ones = write(tmp_path / "a", np.ones((3, 32), np.float16))
    twos = write(tmp_path / "b", np.full((2, 32), 2, np.float32))
    versions = [
        register_vectors(store.vectors, "tuned", path, model).version for path in (ones, ones, twos)
    ]
    assert versions == [1, 1, 2]
    first = store.vectors.get("tuned", 1)
    assert first is not None
    (vectors,) = load(first.data).values()
    assert vectors.dtype == np.float32
    assert vectors.tolist() == np.ones((3, 32)).tolist()
    newest = store.vectors.get("tuned")
    assert newest is not None
    assert (newest.version, newest.length, newest.width) == (2, 2, 32)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ([np.ones((3, 33), np.float32)], "33 wide; this model needs 32"),
        ([np.ones(32, np.float32)], "must be [rows, width]"),
        ([np.ones((0, 32), np.float32)], "must be [rows, width]"),
        ([np.ones((3, 32), np.int32)], "int32"),
        ([np.full((3, 32), np.nan, np.float32)], "NaN"),
        ([np.ones((3, 32), np.float32)] * 2, "2 tensors"),
    ],
)
@pytest.mark.sampled
def test_tensors_that_cannot_be_used(
    store: Store, tmp_path: Path, model: ModelDirectory, arrays: list[np.ndarray], said: str
) -> None:
    with pytest.raises(VectorsError) as caught:
        register_vectors(store.vectors, "tuned", write(tmp_path / "v", *arrays), model)
    assert said in str(caught.value)
    assert store.vectors.get("tuned") is None


def test_files_and_names_that_cannot_be_used(
    store: Store, tmp_path: Path, model: ModelDirectory
) -> None:
    good = write(tmp_path / "good", np.ones((3, 32), np.float32))
    (tmp_path / "cut").write_bytes(good.read_bytes()[:-4])
    for name, path, said in [
        ("tuned", tmp_path / "absent", "cannot be read"),
        ("tuned", tmp_path / "cut", "not a whole safetensors file"),
        ("a@b", good, "without @"),
        ("", good, "1 to 255"),
    ]:
        with pytest.raises(VectorsError, match=said):
            register_vectors(store.vectors, name, path, model)


def test_versions_that_are_registered_at_once_are_all_kept(store: Store) -> None:
    def put(number: int) -> int:
        data = bytes([number]) * 8
        digest = hashlib.sha256(data).hexdigest()
        return store.vectors.put("tuned", data, length=1, width=2, sha256=digest).version

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(put, range(24)))
    assert sorted(versions) == list(range(1, 25))
    for number, version in enumerate(versions):
        found = store.vectors.get("tuned", version)
        assert found is not None
        assert found.data == bytes([number]) * 8


def put(store: Store, name: str, number: int) -> int:
    data = bytes([number]) * 8
    return store.vectors.put(name, data, 1, 2, hashlib.sha256(data).hexdigest()).version


def meant(store: Store, *references: str, job_id: str | None = None) -> dict[str, int]:
    found = store.vectors.resolve(references, job_id)
    return {reference: vectors.version for reference, vectors in found.items()}


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("a", ("a", "latest")),
        ("a@3", ("a", 3)),
        ("a@03", ("a", 3)),
        ("a@production", ("a", "production")),
        ("a@", ("a", "latest")),
        ("a@1b", ("a", "1b")),
        ("a@9999999999", ("a", "9999999999")),
        ("a@\u0663", ("a", "\u0663")),
        ("a@b@1", ("a", "b@1")),
    ],
)
def test_how_a_request_refers_to_a_version(reference: str, said: tuple[str, object]) -> None:
    assert split_reference(reference) == said


def test_a_name_means_the_latest_and_an_alias_its_version(store: Store) -> None:
    assert meant(store, "tuned", "tuned@latest", "tuned@1") == {}
    for number in (1, 2, 3):
        assert put(store, "tuned", number) == number
    put(store, "other", 9)
    assert store.vectors.tag("tuned", "production", 2).version == 2
    assert store.vectors.tag("tuned", "newest-then").version == 3
    put(store, "tuned", 4)
    asked = "tuned", "tuned@latest", "tuned@1", "tuned@production", "tuned@newest-then", "other"
    assert list(meant(store, *asked).values()) == [4, 4, 1, 2, 3, 1]
    assert meant(store, "tuned@5", "tuned@9999999999", "tuned@nothing", "nobody@1", "") == {}
    store.vectors.tag("tuned", "production", 4)
    assert meant(store, "tuned@production") == {"tuned@production": 4}
    told = [(one.name, one.alias, one.version) for one in store.vectors.aliases(["tuned"])]
    assert told == [
        ("tuned", "latest", 4),
        ("tuned", "newest-then", 3),
        ("tuned", "production", 4),
    ]
    assert [one.version for one in store.vectors.versions("tuned")] == [4, 3, 2, 1]
    listed = store.vectors.versions()
    assert [(one.name, one.version, one.data) for one in listed] == [
        ("other", 1, b""),
        ("tuned", 4, b""),
    ]


@pytest.mark.parametrize("alias", ["latest", "3", "", "a b", "x" * 65, "a@b"])
@pytest.mark.sampled
def test_what_no_alias_can_be(store: Store, alias: str) -> None:
    put(store, "tuned", 1)
    with pytest.raises(VectorAliasError):
        store.vectors.tag("tuned", alias, 1)


def test_a_rollback_holds_until_the_next_version(store: Store) -> None:
    for number in (1, 2, 3):
        put(store, "tuned", number)
    assert store.vectors.roll_back("tuned").version == 2
    assert store.vectors.roll_back("tuned").version == 1
    with pytest.raises(UnknownVectorError, match="no version before the latest"):
        store.vectors.roll_back("tuned")
    with pytest.raises(UnknownVectorError, match="no version 9"):
        store.vectors.roll_back("tuned", 9)
    assert meant(store, "tuned") == {"tuned": 1}
    assert store.vectors.roll_back("tuned", 3).version == 3
    store.vectors.roll_back("tuned", 1)
    assert put(store, "tuned", 3) == 3  # registered again: it is meant again
    assert meant(store, "tuned") == {"tuned": 3}
    store.vectors.roll_back("tuned")
    assert put(store, "tuned", 4) == 4
    assert meant(store, "tuned") == {"tuned": 4}


def plan_one(store: Store, job_id: str, reference: str) -> tuple[str, MicroBatchRef]:
    """Plan the job's next request as the planner does; gives the version that it means."""
    (queued,) = store.backlog.queued_requests(job_id, 1)
    vectors = store.vectors.resolve([reference], job_id)[reference]
    encoded = EncodedRequest(queued.id, [[1, 2]], vectors.key, reference)
    batch = NewMicroBatch(RequestKind.GENERATE, 32, [queued.id], 7)
    (ref,) = store.planning.save_plan(job_id, [encoded], [batch])
    return vectors.key, ref


def test_a_job_keeps_the_version_that_it_began_with(store: Store) -> None:
    put(store, "tuned", 1)
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "prompt_vector": "tuned"}
    before, after = submit(store, [body] * 3), submit(store, [body])
    assert plan_one(store, before, "tuned")[0] == "tuned@1"
    put(store, "tuned", 2)
    assert plan_one(store, before, "tuned")[0] == "tuned@1"
    assert plan_one(store, after, "tuned")[0] == "tuned@2"
    store.vectors.tag("tuned", "live", 2)
    assert plan_one(store, before, "tuned@live")[0] == "tuned@2"
    store.vectors.tag("tuned", "live", 1)
    assert meant(store, "tuned@live", job_id=before) == {"tuned@live": 2}
    assert meant(store, "tuned@live") == {"tuned@live": 1}


def test_a_purged_job_keeps_no_versions(store: Store) -> None:
    put(store, "tuned", 1)
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "prompt_vector": "tuned"}
    purged, other = submit(store, [body]), submit(store, [body])
    _, ref = plan_one(store, purged, "tuned")
    plan_one(store, other, "tuned")
    compute(store, ref)
    store.shares.settle()
    store.retention.sweep(PurgeScope(job_id=purged))
    with store.database.reading() as connection:
        kept = list(connection.scalars(sa.select(job_prompt_vector.c.job_id)))
    assert kept == [other]
    assert store.purging.marked(PurgeScope()) == []


def test_many_names_are_found_at_once_and_read_at_once(store: Store) -> None:
    names = [f"v{number}" for number in range(900)]
    for number, name in enumerate(names):
        put(store, name, number % 250)
    assert meant(store, *names) == dict.fromkeys(names, 1)
    data = store.vectors.data([f"{name}@1" for name in names] + ["v1@2", "nobody@1"])
    assert data == {f"v{n}@1": VectorFile(bytes([n % 250]) * 8) for n in range(900)}


def test_vectors_of_another_model_are_refused(
    store: Store, tmp_path: Path, model: ModelDirectory
) -> None:
    ones = {"vectors": np.ones((2, 32), np.float32)}
    save_file(ones, tmp_path / "own", {TRAINED_FOR: model.fingerprint})
    save_file(ones, tmp_path / "other", {TRAINED_FOR: "0" * 64})
    own = register_vectors(store.vectors, "tuned", tmp_path / "own", model)
    assert own.fingerprint == model.fingerprint
    with pytest.raises(VectorsError, match="trained for another model"):
        register_vectors(store.vectors, "tuned", tmp_path / "other", model)


def test_an_adapter_is_registered_as_vectors_are(
    store: Store, tmp_path: Path, model: ModelDirectory
) -> None:
    sizes = gpt2_sizes(2, 32, 128)
    folder = save_adapter(tmp_path / "polite", sizes, rank=3)
    added = register_vectors(store.vectors, "polite", folder, model)
    assert (added.key, added.kind, added.length, added.width) == ("polite@1", LORA, 3, 32)
    assert added.fingerprint == model.fingerprint
    assert register_vectors(store.vectors, "polite", folder, model).version == 1
    save_adapter(folder, sizes, rank=3, seed=9)
    assert register_vectors(store.vectors, "polite", folder, model).key == "polite@2"
    file = store.vectors.data(["polite@1"])["polite@1"]
    assert file.kind == LORA
    assert unfit(load(file.data), model.config) is None
    assert {one.kind for one in store.vectors.versions("polite")} == {LORA}
    vectors = write(tmp_path / "v", np.ones((3, 32), np.float32))
    with pytest.raises(VectorsError, match="'polite' is the name of a LoRA adapter"):
        register_vectors(store.vectors, "polite", vectors, model)
    register_vectors(store.vectors, "tuned", vectors, model)
    with pytest.raises(VectorsError, match="'tuned' is the name of prompt vectors"):
        register_vectors(store.vectors, "tuned", folder, model)
    save_adapter(folder, sizes, use_dora=True)
    with pytest.raises(VectorsError, match="DoRA"):
        register_vectors(store.vectors, "polite", folder, model)


def test_a_job_keeps_its_adapter_and_workers_are_told_it(store: Store) -> None:
    for kind, name in ((VECTORS, "tuned"), (LORA, "polite"), (LORA, "polite")):
        number = len(store.vectors.versions(name)) + len(name)
        data = bytes([number]) * 8
        store.vectors.put(name, data, 1, 2, hashlib.sha256(data).hexdigest(), kind=kind)
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "prompt_vector": "tuned"}
    job_id = submit(store, [body | {"adapter": "polite@1"}])
    (queued,) = store.backlog.queued_requests(job_id, 1)
    assert queued.body["adapter"] == "polite@1"
    encoded = EncodedRequest(queued.id, [[1, 2]], "tuned@1", "tuned", "polite@1", "polite@1")
    batch = NewMicroBatch(RequestKind.GENERATE, 32, [queued.id], 7)
    (ref,) = store.planning.save_plan(job_id, [encoded], [batch])
    (request,) = claim(store, ref).requests
    assert (request.prompt_vector, request.adapter) == ("tuned@1", "polite@1")
    assert meant(store, "tuned", "polite@1", job_id=job_id) == {"tuned": 1, "polite@1": 1}


class SubmittedError(Exception):
    def __init__(self, *, resumed: bool) -> None:
        super().__init__()
        self.resumed = resumed


class StopsWhenSubmitted(Listener):
    def submitted(self, job: Job, *, resumed: bool) -> None:
        raise SubmittedError(resumed=resumed)


def test_a_run_with_other_vectors_is_another_run(tmp_path: Path, model: ModelDirectory) -> None:
    lines = write_lines(tmp_path / "in.jsonl", [completion_line("a", prompt="a")])
    vectors = tmp_path / "v.safetensors"
    work = LineFiles(lines, tmp_path / "out.jsonl")
    arguments = RunArguments(work, model.path, prompt_vectors={"tuned": vectors})
    work.workdir.mkdir()

    def submit_or_resume() -> bool:
        with pytest.raises(SubmittedError) as caught:
            run(arguments, StopsWhenSubmitted())
        return caught.value.resumed

    write(vectors, np.ones((2, 32), np.float32))
    assert [submit_or_resume(), submit_or_resume()] == [False, True]
    write(vectors, np.zeros((2, 32), np.float32))
    with pytest.raises(UsageError, match="another run: the prompt vectors have changed since"):
        submit_or_resume()


def test_a_worker_warns_of_adapters_that_it_cannot_serve(
    store: Store, tmp_path: Path, model: ModelDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # a model that is read for the first time is told, too
    split = Settings(database_url=SecretStr("sqlite://"), shards=2)
    warn_of_adapters(split, store, {"tiny": model})
    assert caplog.records == []
    folder = save_adapter(tmp_path / "polite", gpt2_sizes(2, 32, 128))
    refused = not_served(model, split.dtype, split.shard_count)
    with pytest.raises(VectorsError, match="is a LoRA adapter, which is not served"):
        register_vectors(store.vectors, "polite", folder, model, refused)
    register_vectors(store.vectors, "polite", folder, model)
    warn_of_adapters(Settings(database_url=SecretStr("sqlite://")), store, {"tiny": model})
    assert caplog.records == []
    warn_of_adapters(split, store, {"tiny": model})
    (record,) = caplog.records
    assert "'tiny' has LoRA adapters" in record.getMessage()
    assert "serve it without shards" in record.getMessage()
