"""Tensors on their way to a device."""

import pytest
import torch

from nightjar.kernels import upload


@pytest.mark.parametrize("shape", [(3, 5), (0,), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_what_arrives_is_what_was_sent(device, shape, dtype):
    sent = torch.arange(15).to(dtype).view(3, 5) if shape == (3, 5) else torch.ones(shape).to(dtype)
    found = upload(sent, device)
    assert found.device.type == torch.device(device).type
    assert torch.equal(found.cpu(), sent)
    assert upload(found, device) is found


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
