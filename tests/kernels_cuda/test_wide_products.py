"""Products of FP16 weights whose rows or results pass 65,504, on the CPU and with CUDA kernels."""

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import Wide
from nightjar.kernels.cuda import packing

FP16_MAX = 65_504.0
WIDE = Wide(rows=True, results=True)


def wide_operands(count, device="cpu"):
    """Rows, weight, bias and the exact product, whose largest numbers FP16 cannot hold."""
    generator = torch.Generator().manual_seed(count)
    weight = torch.randn(48, 64, generator=generator).half()
    bias = torch.randn(48, generator=generator).half()
    rows = torch.randn(count, 64, generator=generator) * 50_000
    exact = rows.double() @ weight.double().t() + bias.double()
    assert float(exact.abs().max()) > FP16_MAX
    return rows.to(device), weight.to(device), bias.to(device), exact


def check_wide(wide, rows, exact):
    assert wide.rows_dtype == torch.float32
    found = wide.linear(rows, None, None)
    assert found.dtype == torch.float32
    largest = exact.abs().max()
    assert float((found.double().cpu() - exact).abs().max() / largest) < 2**-10
    stream = torch.ones_like(found)
    assert wide.linear_onto(stream, rows)
    assert float((stream - 1 - found).abs().max() / largest) < 1e-6
    return found


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_wide_products_on_the_cpu(count):
    rows, weight, bias, exact = wide_operands(count)
    wide = kernels.pack_linear(weight, bias, wide=WIDE)
    found = check_wide(wide, rows, exact)
    alone = [wide.linear(rows[i : i + 1], None, None) for i in range(count)]
    assert torch.equal(torch.cat(alone), found)


@pytest.mark.parametrize("count", [1, 8, 9])
def test_wide_products_on_a_gpu(count, device):
    rows, weight, bias, exact = wide_operands(count, device)
    check_wide(packing.pack_linear(weight, bias, wide=WIDE), rows, exact)
    # A bias that FP16 cannot hold stays in FP32.
    large = bias.float() + 100_000
    check_wide(packing.pack_linear(weight, large, wide=WIDE), rows, exact + 100_000)


def gated_operands(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(32, 64, generator=generator).half() for _ in range(2))
    rows = (torch.randn(5, 64, generator=generator) * 200).half()
    exact = torch.nn.functional.silu(rows.double() @ gate.double().t()) * (
        rows.double() @ up.double().t()
    )
    assert float(exact.abs().max()) > FP16_MAX
    return rows.to(device), (gate.to(device), None), (up.to(device), None), exact


def check_gated(pack, rows, gate, up, exact):
    wide = pack(gate, up, wide=Wide(results=True)).linear(rows, "silu", None)
    assert wide.dtype == torch.float32
    assert float((wide.double().cpu() - exact).abs().max() / exact.abs().max()) < 1e-5
    narrow = pack(gate, up).linear(rows, "silu", None)
    assert narrow.dtype == torch.float16
    assert bool(narrow.isinf().any())


def test_gated_products_on_the_cpu():
    check_gated(kernels.pack_gated, *gated_operands())


def test_gated_products_on_a_gpu(device):
    check_gated(packing.pack_gated, *gated_operands(device))
