"""Settings: what belongs together is checked; a fault names its variable, and what mends it."""

import re
from pathlib import Path

import pytest

from nightjar.pipeline.settings import Settings, SettingsError
from nightjar.pipeline.settings.variables import unknown_variables


@pytest.mark.parametrize(
    ("given", "count", "devices"),
    [
        ({}, 1, ()),
        ({"shards": 4}, 4, ()),
        ({"devices": "0,1"}, 2, ("0", "1")),
        ({"devices": "3", "shards": 1}, 1, ("3",)),
    ],
)
def test_a_shard_a_device(given, count, devices):
    settings = Settings.read(**given)
    assert settings.shard_count == count
    assert settings.device_list == devices


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"dtype": "int4"}, "NIGHTJAR_DTYPE: Input should be 'auto', .* 'int8' or 'fp8'"),
        ({"engine": "real"}, "NIGHTJAR_ENGINE: Input should be 'model' or 'fake'"),
        ({"device": "gpu"}, "NIGHTJAR_DEVICE: 'gpu': give cpu, cuda or cuda:<number>"),
        ({"devices": "0,1", "shards": 3}, "NIGHTJAR_DEVICES: 0,1 names 2 devices for 3 shards"),
        ({"devices": "1,1"}, "NIGHTJAR_DEVICES.*twice"),
        ({"devices": "cuda:0"}, "NIGHTJAR_DEVICES: 'cuda:0': give numbers with commas between"),
        ({"devices": "0,"}, "NIGHTJAR_DEVICES: '0,': give numbers with commas between"),
        ({"shards": 0}, "NIGHTJAR_SHARDS"),
        ({"webhook_timeout_s": 0}, "NIGHTJAR_WEBHOOK_TIMEOUT_S: Input should be greater than 0"),
        ({"file_lifetime_s": 0}, "NIGHTJAR_FILE_LIFETIME_S: Input should be greater than 0"),
        ({"worker_niceness": -1}, "NIGHTJAR_WORKER_NICENESS.*greater than or equal to 0"),
        ({"api_key": "secret" * 5}, "NIGHTJAR_API_KEY: must have at least 32 characters.*openssl"),
        ({"api_key": "secret " * 5}, "NIGHTJAR_API_KEY: must have .* without spaces"),
        ({"api_key": "secret밤" * 5}, "NIGHTJAR_API_KEY: must have .* of ASCII"),
        ({"broker_url": "127.0.0.1:6379/0"}, "NIGHTJAR_BROKER_URL: .* begins with redis://"),
        ({"broker_url": "amqp://owl:secret@host//"}, "NIGHTJAR_BROKER_URL: .* begins with redis"),
        ({"shards": 2, "device": "cuda"}, "NIGHTJAR_DEVICES.*none for 2 shards on a GPU"),
        ({"devices": "0,1", "device": "cuda"}, "NIGHTJAR_DEVICES.*0,1 beside NIGHTJAR_DEVICE cuda"),
    ],
)
def test_what_does_not_fit_is_named(given, fault):
    with pytest.raises(SettingsError, match=fault) as caught:
        Settings.read(**given)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        ({}, {}),
        ({"model": "/models/tiny/"}, {"tiny": "/models/tiny"}),
        ({"model": "/models/tiny", "model_name": "org/demo"}, {"org/demo": "/models/tiny"}),
        ({"models": "a=/m/a"}, {"a": "/m/a"}),
        ({"models": " a = /m/a, org/b=/m=b "}, {"a": "/m/a", "org/b": "/m=b"}),
        ({"models": "a=/m/a", "accept_any_model": True}, {"a": "/m/a"}),
    ],
)
def test_the_directory_of_each_model(given, paths):
    found = Settings.read(**given).model_paths
    assert found == {name: Path(path) for name, path in paths.items()}


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"models": "/m/a"}, "NIGHTJAR_MODELS: '/m/a' is not NAME=DIRECTORY; write NAME=DIRECTORY"),
        ({"models": "a=/m/a,"}, "'' is not NAME=DIRECTORY"),
        ({"models": "=/m/a"}, "'=/m/a' is not NAME=DIRECTORY"),
        ({"models": "a= "}, "'a=' is not NAME=DIRECTORY"),
        ({"models": "a=/m/a,a=/m/b"}, "'a' comes twice"),
        ({"models": "a=/m/a,b=/m/a"}, "'/m/a' comes twice"),
        ({"models": "a\x07=/m/a"}, "cannot be a name"),
        ({"models": f"{'a' * 256}=/m/a"}, "more than 255 characters"),
        ({"models": "a=/m/a", "model": "/m/a"}, "NIGHTJAR_MODELS: set beside NIGHTJAR_MODEL: set"),
        ({"models": "a=/m/a", "model_name": "a"}, "set beside NIGHTJAR_MODEL_NAME: set one"),
        ({"models": "a=/a,b=/b", "accept_any_model": True}, "beside NIGHTJAR_ACCEPT_ANY_MODEL"),
        ({"models": ",".join(f"m{n}=/m/{n}" for n in range(33))}, "names 33 models; at most 32"),
    ],
)
def test_models_that_cannot_be_named(given, fault):
    with pytest.raises(SettingsError, match=re.escape(fault)):
        Settings.read(**given)


def test_so_many_models_are_served():
    assert len(Settings.read(models=",".join(f"m{n}=/m/{n}" for n in range(32))).model_paths) == 32


@pytest.mark.parametrize("url", ["redis://h/0", "rediss://:p@h:1/0", "redis+socket:///a/b.sock"])
def test_brokers_that_celery_reaches(url):
    assert Settings.read(broker_url=url).broker_url.get_secret_value() == url


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NIGHTJAR_WORKER_THREDS", "NIGHTJAR_WORKER_THREADS"),
        ("NIGHTJAR_MODELNAME", "NIGHTJAR_MODEL_NAME"),
        ("NIGHTJAR_KERNELS_CACHE", "NIGHTJAR_KERNEL_CACHE"),
    ],
)
def test_a_mistyped_variable_is_refused_with_what_was_meant(name, meant, monkeypatch):
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=f"{name}: there is no such setting.*mean {meant}"):
        Settings.read()


def test_a_variable_that_resembles_none_is_warned_of(monkeypatch, caplog):
    monkeypatch.setenv("NIGHTJAR_OWL", "secret")
    monkeypatch.setenv("OWL", "of another program")
    Settings.read()
    assert len(caplog.records) == 1
    assert "NIGHTJAR_OWL: no setting has that name" in caplog.text
    assert "secret" not in caplog.text


def test_no_part_of_nightjar_reads_a_variable_that_it_would_refuse():
    """One list of names: what is read beside the settings stands in it."""
    root = Path(__file__).parents[2]
    rooms = ("checkpoints", "gpu_worker", "jobs", "kernels", "nightjar", "pipeline", "tests/gpu")
    files = [path for room in rooms for path in (root / room).rglob("*.py")]
    quoted = re.compile(r"""["'](NIGHTJAR_[A-Z][A-Z0-9_]*)["']""")
    read = {name for path in files for name in quoted.findall(path.read_text(encoding="utf-8"))}
    shell = (root / "docker-compose.yml").read_text() + (root / "Dockerfile").read_text()
    read |= set(re.findall("NIGHTJAR_[A-Z0-9_]*[A-Z0-9]", shell))
    assert read >= {"NIGHTJAR_CPU_KERNELS", "NIGHTJAR_FLOWER_AUTH", "NIGHTJAR_MODEL_DIR"}
    assert "NIGHTJAR_COMPUTE_SANITIZER" in read
    assert unknown_variables(read, Settings.model_fields) == []


def test_the_least_values_are_taken():
    taken = Settings(request_crashes=1, upload_deadline_s=0.5, worker_niceness=0)
    assert (taken.request_crashes, taken.upload_deadline_s, taken.worker_niceness) == (1, 0.5, 0)
