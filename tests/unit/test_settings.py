"""Settings: what belongs together is checked; a fault names its variable, and what mends it."""

import pytest

from nightjar.pipeline.settings import Settings, SettingsError


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
        ({"dtype": "int4"}, "NIGHTJAR_DTYPE: Input should be 'auto', .* 'fp16' or 'int8'"),
        ({"engine": "real"}, "NIGHTJAR_ENGINE: Input should be 'model' or 'fake'"),
        ({"device": "gpu"}, "NIGHTJAR_DEVICE: 'gpu': give cpu, cuda or cuda:<number>"),
        ({"devices": "0,1", "shards": 3}, "NIGHTJAR_DEVICES: 0,1 names 2 devices for 3 shards"),
        ({"devices": "1,1"}, "NIGHTJAR_DEVICES.*twice"),
        ({"devices": "cuda:0"}, "NIGHTJAR_DEVICES: 'cuda:0': give numbers with commas between"),
        ({"devices": "0,"}, "NIGHTJAR_DEVICES: '0,': give numbers with commas between"),
        ({"shards": 0}, "NIGHTJAR_SHARDS"),
        ({"shards": 2, "device": "cuda"}, "NIGHTJAR_DEVICES.*none for 2 shards on a GPU"),
        ({"devices": "0,1", "device": "cuda"}, "NIGHTJAR_DEVICES.*0,1 beside NIGHTJAR_DEVICE cuda"),
    ],
)
def test_what_does_not_fit_is_named(given, fault):
    with pytest.raises(SettingsError, match=fault):
        Settings.read(**given)
