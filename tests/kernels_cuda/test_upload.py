"""Tensors on their way to a device."""

import sys

import pytest
import torch

from nightjar.kernels import upload, upload_together


@pytest.mark.parametrize("shape", [(3, 5), (0,), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_what_arrives_is_what_was_sent(device, shape, dtype):
    sent = torch.arange(15).to(dtype).view(3, 5) if shape == (3, 5) else torch.ones(shape).to(dtype)
    found = upload(sent, device)
    assert found.device.type == torch.device(device).type
    assert torch.equal(found.cpu(), sent)
    assert upload(found, device) is found


def of_every_shape():
    shapes = [(3, 5), (0,), (), (2, 0), (7,)]
    return [torch.arange(torch.Size(shape).numel()).add(7).view(shape) for shape in shapes]


def test_what_is_sent_together_arrives_as_it_was(device):
    sent = of_every_shape()
    found = upload_together(sent, device)
    for one, other in zip(found, sent, strict=True):
        assert one.device.type == torch.device(device).type
        assert torch.equal(one.cpu(), other)
    for one, other in zip(upload_together(found, device), found, strict=True):
        assert one is other


def test_it_is_one_copy(monkeypatch):
    """To a device that is not there: what the copy is given stands for what arrives."""
    copied = []

    def copy(tensor, device):
        copied.append(device)
        return tensor

    monkeypatch.setattr(sys.modules["nightjar.kernels.upload"], "upload", copy)
    sent = of_every_shape()
    found = upload_together(sent, "cuda")
    assert copied == ["cuda"]
    for one, other in zip(found, sent, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_the_host_does_not_wait():
    """Where a wait is an error; a plain copy is one."""
    sent = torch.arange(100)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = upload(sent, "cuda")
        with pytest.raises(RuntimeError, match="synchroniz"):
            sent.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(found.cpu(), sent)
