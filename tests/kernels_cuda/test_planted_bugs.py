"""Bugs planted in the real sources: the host that the tests run on, or their assertions, see each.

The first three are what FasterTransformer's forks had to mend: a penalty that reads past the
vocabulary, ids past the vocabulary, and a finished row that goes on.
"""

from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch

from nightjar.kernels.cuda import launch
from nightjar.kernels.cuda.kernel import Kernel
from tests.cuda_host import KernelFault, RawModule
from tests.kernels_cuda import test_argmax as best
from tests.kernels_cuda import test_decode_attention as attention
from tests.kernels_cuda import test_embedding as embedding
from tests.kernels_cuda import test_fp8_cache as narrow
from tests.kernels_cuda import test_fp8_prompts as narrow_prompts
from tests.kernels_cuda import test_linear as product
from tests.kernels_cuda import test_norm as norm
from tests.kernels_cuda import test_paged_prefill as prompts
from tests.kernels_cuda import test_penalties as penalties
from tests.kernels_cuda import test_product_rows as narrow_product
from tests.kernels_cuda import test_sample as sampling
from tests.kernels_cuda import test_step_update as stepping
from tests.kernels_cuda.devices import SOURCES, random, run_on_host

pytestmark = pytest.mark.usefixtures("host")

FIRST_BARRIER = "    __syncthreads();  // the reads of an earlier call are over\n"
SECOND_BARRIER = "threadIdx.x / WARP] = x;\n    __syncthreads();\n    x = warp_sum"


def two_sums():
    """LayerNorm of a block: two sums through the same shared memory."""
    norm.test_layer_norm_adds_the_delta_and_normalises("cpu", 2, 1300)


def draw():
    sampling.sampled("cpu", random((1, 700)), sampling.parameters(1, 0.9, 20, 0.8))


def finished_heads():
    """Heads that are normalised and turned by the blocks that attend, several splits of a text."""
    problem = attention.Problem([attention.SPLIT + 1, 5], 8, 1, 64, torch.float16)
    attention.Step(problem, norms=True, turned=20).compare("cpu")


def asked_for_ahead():
    with pytest.MonkeyPatch.context() as patch:
        attention.test_what_is_asked_for_ahead_changes_nothing("cpu", patch, [1, 0, 31])


def sum_of_lengths():
    attention.test_lengths_around_the_split("cpu", attention.SPLIT + 1)


def shared_key_heads():
    """Heads of 80 channels: their last tile is not whole."""
    attention.test_shared_key_heads_of_every_size_and_storage("cpu", "float16", 80, 4)


def prompt_chunks(storage=torch.float16, head_size=64):
    """Chunks of several tiles of keys and of query rows, which end inside a cache block."""
    prompts.Prompts([(0, 3), (29, 75)], 3, 1, head_size, storage).compare("cpu")


prompt_floats = partial(prompt_chunks, torch.float32)


def fp8_attention(heads):
    """Heads of 80 channels over a cache in FP8, by rows or by tensor cores."""
    narrow.test_decode_attends_to_what_the_cache_keeps("cpu", "float16", 80, heads)


def fp8_prompts(storage="float16"):
    narrow_prompts.test_every_head_size_and_storage("cpu", 80, storage)


def sizes_of_values(name):
    narrow_prompts.test_values_of_very_different_sizes("cpu", "float16", name)


def codes_and_scales():
    narrow.test_codes_and_scales_are_those_of_the_definition("cpu", 64, "bfloat16")


def edges_of_codes():
    narrow.test_edges_of_codes_and_scales("cpu", "float32")


def rows_in_place():
    """Normalised rows of several turns of a warp."""
    narrow_product.test_the_norm_before_it("cpu", False, 2, 400)


def rows_by_the_block():
    narrow_product.test_every_channel_is_written_once_with_its_own_scale("cpu", 17, False, True)


def rounded_rows():
    narrow_product.test_codes_and_scales_are_those_of_the_definition("cpu", 33, 48)


def normed_rows():
    test = narrow_product.test_a_norm_rounds_its_rows_as_they_are_rounded_after_it
    test("cpu", True, 1040, torch.float32)


PLANTED = {
    "a penalty past the vocabulary": (
        "penalties",
        "if (token >= vocab_size) break;",
        "",
        partial(penalties.test_bits_past_the_vocabulary_reach_nothing, "cpu"),
    ),
    "an id past the vocabulary": (
        "embedding",
        "min(id, vocab_size - 1)",
        "id",
        partial(embedding.test_an_id_past_the_vocabulary_without_vectors_reads_the_last_row, "cpu"),
    ),
    "a finished row goes on": (
        "step_update",
        "bool runs = row[REASON] == RUNNING;",
        "bool runs = true;",
        partial(stepping.test_a_finished_row_stays_as_it_was, "cpu"),
    ),
    "a token penalised by two threads": (
        "penalties",
        "const int word = blockIdx.y * blockDim.x + threadIdx.x;",
        "const int word = (blockIdx.y * blockDim.x + threadIdx.x) / 2;",
        partial(penalties.test_bits_past_the_vocabulary_reach_nothing, "cpu"),
    ),
    "no barrier before shared memory is used again": ("common", FIRST_BARRIER, "", two_sums),
    "no barrier before shared memory is read": (
        "common",
        SECOND_BARRIER,
        SECOND_BARRIER.replace("__syncthreads();", ""),
        two_sums,
    ),
    "positions asked for ahead that are not there": (
        "decode_attention",
        "last = min(first + SPLIT, length);",
        "last = first + SPLIT;",
        asked_for_ahead,
    ),
    "scores read before they are written": (
        "decode_attention",
        "    __syncthreads();\n    way.ask(values",
        "    way.ask(values",
        sum_of_lengths,
    ),
    "positions past the end": (
        "decode_attention",
        "min(first + u * step, end - 1)",
        "first + u * step",
        sum_of_lengths,
    ),
    "positions of a tile past the end": (
        "decode_attention",
        "min(first + lane % 4 * 2 + j % 2 + j / 2 * 8, end - 1)",
        "first + lane % 4 * 2 + j % 2 + j / 2 * 8",
        shared_key_heads,
    ),
    "channels of a tile past the head": (
        "decode_attention",
        "if (8 * piece < HEAD_SIZE) {",
        "{",
        shared_key_heads,
    ),
    "queries in another order than keys": (
        "decode_attention",
        "const int channel = CHUNK * c + lane % 4 * OWN_CHANNELS;",
        "const int channel = CHUNK * c + (lane + 1) % 4 * OWN_CHANNELS;",
        shared_key_heads,
    ),
    "a newest key that every block writes": (
        "decode_attention",
        "newest_block >= 0 && length > 0 &&",
        "newest_block >= 0 || length > 0 ||",
        finished_heads,
    ),
    "a newest key that is read before it is written": (
        "decode_attention",
        "  }\n  __syncthreads();\n  if (length <= 0) {",
        "  }\n  if (length <= 0) {",
        finished_heads,
    ),
    "a head turned over the one before it": (
        "decode_attention",
        "sums[threadIdx.x / WARP][0][0].at);",
        "sums[0][0][0].at);",
        finished_heads,
    ),
    "a head over the one before it, which is still read": (
        "decode_attention",
        "    __syncwarp();  // the reads of the head before are over\n",
        "",
        finished_heads,
    ),
    "splits past the end are merged": (
        "decode_attention",
        "stats + row * splits * 2, filled,",
        "stats + row * splits * 2, splits,",
        sum_of_lengths,
    ),
    "splits merged by the first block to come": (
        "decode_attention",
        "add_acq_rel(arrived, 1) == blocks - 1",
        "add_acq_rel(arrived, 1) == 0",
        sum_of_lengths,
    ),
    "splits that no block publishes or acquires": (
        "decode_attention",
        "add_acq_rel(arrived, 1)",
        "atomicAdd(arrived, 1)",
        sum_of_lengths,
    ),
    "an arrival while the block still writes": (
        "decode_attention",
        "  __shared__ bool last;\n  __syncthreads();\n",
        "  __shared__ bool last;\n",
        sum_of_lengths,
    ),
    "blocks counted on from the launch before": (
        "decode_attention",
        "    if (last) atomicExch(arrived, 0);\n",
        "",
        partial(attention.test_every_launch_leaves_its_counts_at_zero_for_the_next, "cpu"),
    ),
    "positions past the end of a prompt": (
        "paged_prefill",
        "const int last = min(position, end - 1),",
        "const int last = position,",
        prompt_chunks,
    ),
    "a prompt's row that sees the next one": (
        "paged_prefill",
        "causal ? seen + clamped(i)",
        "causal ? seen + 1 + clamped(i)",
        prompt_chunks,
    ),
    "keys over those that are read": (
        "paged_prefill",
        "next.store_keys(shared, turn ^ 1);",
        "next.store_keys(shared, turn);",
        prompt_chunks,
    ),
    "the next keys and values that are not there yet": (
        "paged_prefill",
        "next.store_values(shared, turn ^ 1);\n      __syncthreads();\n",
        "next.store_values(shared, turn ^ 1);\n",
        prompt_chunks,
    ),
    "values of the wrong positions": (
        "paged_prefill",
        "far = pair(quarter + 4);",
        "far = pair(quarter);",
        prompt_chunks,
    ),
    "earlier sums of a row that keep their size": (
        "paged_prefill",
        "        sums[s][i][2 * half + 1] *= factor;\n",
        "",
        prompt_chunks,
    ),
    "the weights of one lane's keys": (
        "paged_prefill",
        "      softmax[half].total = warp_sum<4>(softmax[half].total);\n",
        "",
        prompt_chunks,
    ),
    "channels of a prompt's row past the head": (
        "paged_prefill",
        "        if (channel >= HEAD_SIZE) continue;\n",
        "",
        partial(prompt_chunks, head_size=80),
    ),
    "values over keys that are still read": (
        "paged_prefill",
        "    __syncthreads();  // the keys are read\n",
        "",
        prompt_floats,
    ),
    "keys over values that are still read": (
        "paged_prefill",
        "    __syncthreads();  // the values before are read\n",
        "",
        prompt_floats,
    ),
    "a prompt's key that is weighed by the scale of another": (
        "paged_prefill",
        "score * (scale * shared.of_key(turn, i))",
        "score * (scale * shared.of_key(turn, 0))",
        fp8_prompts,
    ),
    "a prompt's value without its scale": (
        "paged_prefill",
        "weight * shared.of_value(turn, i) : 0.0f;",
        "weight : 0.0f;",
        fp8_prompts,
    ),
    "scales over those that are read": (
        "paged_prefill",
        "to.factors[turn][threadIdx.x] =",
        "to.factors[0][threadIdx.x] =",
        fp8_prompts,
    ),
    "scales of other positions": (
        "paged_prefill",
        "first + thread % KEYS)];",
        "first + thread)];",
        fp8_prompts,
    ),
    "a scale that is NaN to rows that do not see it": (
        "paged_prefill",
        "weight = sees(half, first + i) ? weight * shared.of_value(turn, i) : 0.0f;",
        "weight *= shared.of_value(turn, i);",
        partial(
            narrow_prompts.test_a_row_that_is_not_finite_reaches_what_sees_it_and_nothing_else,
            "cpu",
            "float16",
        ),
    ),
    "a prompt's weights too small for 16 bits": (
        "paged_prefill",
        "return min(max(__float_as_int(largest) >> 23, 1), 253);",
        "return 127;",
        partial(sizes_of_values, "small"),
    ),
    "a unit of weights that are past": (
        "paged_prefill",
        "largest = fmaxf(largest * earlier, next);",
        "largest = fmaxf(largest, next);",
        partial(sizes_of_values, "large that weigh nothing"),
    ),
    "earlier sums in the unit of before": (
        "paged_prefill",
        "return before * inverse();",
        "return earlier;",
        partial(sizes_of_values, "rising"),
    ),
    "weights rounded before they are multiplied by large scales": (
        "paged_prefill",
        "IS_FP8<S> ? shortened<T>(score) : widen(narrow<T>(score));",
        "widen(narrow<T>(score));",
        partial(sizes_of_values, "few large"),
    ),
    "a key in FP32 without its scale": (
        "paged_prefill",
        "weigh(first, scale * of_key, of_value);",
        "weigh(first, scale, of_value);",
        partial(fp8_prompts, "float32"),
    ),
    "a scale that is NaN to rows in FP32 that do not see it": (
        "paged_prefill",
        "sees ? weight * of_value : 0.0f;",
        "weight * of_value;",
        partial(
            narrow_prompts.test_a_row_that_is_not_finite_reaches_what_sees_it_and_nothing_else,
            "cpu",
            "float32",
        ),
    ),
    "a key that is weighed by the scale of another": (
        "decode_attention",
        "exponents[u] = scales[row];",
        "exponents[u] = scales[0];",
        partial(fp8_attention, 2),
    ),
    "a key of a tile that is weighed by the scale of another": (
        "decode_attention",
        "exponents[t][half] = scales[row];",
        "exponents[t][half] = scales[0];",
        partial(fp8_attention, 4),
    ),
    "a value's scale that is left out": (
        "decode_attention",
        "const float weight = weights[g][step + u * STEP + mine] * read.factor(u);",
        "const float weight = weights[g][step + u * STEP + mine];",
        partial(fp8_attention, 2),
    ),
    "the largest scale of a warp that is left out": (
        "decode_attention",
        "        factor = factors.largest;\n",
        "",
        partial(fp8_attention, 4),
    ),
    "weights too small for 16 bits": (
        "decode_attention",
        "const int relative = exponent - most + 127;\n    largest = factor_of(most);",
        "const int relative = exponent;\n    largest = 1.0f;",
        partial(narrow.test_weights_lose_nothing_in_tensor_cores, "cpu", 4),
    ),
    "codes of a tile in another order than queries": (
        "decode_attention",
        "(c / PIECES * 4 + lane % 4) * PIECES + c % PIECES;",
        "c / PIECES * 4 * PIECES + c % PIECES * 4 + lane % 4;",
        partial(fp8_attention, 4),
    ),
    "a newest key that is not rounded as prompts are": (
        "decode_attention",
        "      round_and_scale<T>(1.0f);\n",
        "",
        partial(narrow.test_heads_are_finished_on_the_way, "cpu", "bfloat16", 64, 2),
    ),
    "a scale of a lane and not of the head": (
        "qkv_post",
        "exponent_for(warp_max(peak))",
        "exponent_for(peak)",
        codes_and_scales,
    ),
    "halves rounded up": ("qkv_post", "0x7ffffu + (bits >> 20 & 1u)", "0x80000u", edges_of_codes),
    "a scale that is too small": ("qkv_post", "(1u << 21) - 1;", "(1u << 20) - 1;", edges_of_codes),
    "numbers below the least exponent": (
        "qkv_post",
        "bits < 0x3c800000u ? small : large",
        "large",
        edges_of_codes,
    ),
    "infinity taken for a number": (
        "qkv_post",
        "  if (peak >= INFINITE) return NAN_EXPONENT;\n",
        "",
        partial(narrow.test_a_row_that_is_not_finite_is_nan_throughout, "cpu", float("inf")),
    ),
    "a prompt that attends to what is not cached": (
        "qkv_post",
        "if (changed || (IS_FP8<S> && block >= 0)) own.store(place);",
        "if (changed) own.store(place);",
        codes_and_scales,
    ),
    "the last scores of a row": (
        "argmax",
        "  if (last + thread < end) visit(last + thread, row[last + thread]);\n",
        "",
        partial(best.test_the_reference_agrees, "cpu", 1),
    ),
    "a list that is begun before it is empty": (
        "sample",
        "  if (threadIdx.x == 0) listed = 0;\n  __syncthreads();\n",
        "  if (threadIdx.x == 0) listed = 0;\n  __syncwarp();\n",
        draw,
    ),
    "a list of the best that is too short for top-p": (
        "sample",
        "if (!whole && listed < wanted) known = 0;",
        "",
        partial(sampling.test_thresholds_on_and_past_the_list_of_the_best, "cpu", 0.5, 0, 0.9, 0.2),
    ),
    "a list of the best that is too short for top-k": (
        "sample",
        "if (!whole) known = 0;",
        "",
        partial(
            sampling.test_thresholds_on_and_past_the_list_of_the_best, "cpu", 0.5, 3000, 1.0, 0.2
        ),
    ),
    "pivots cleared while they are read": (
        "sample",
        "    __syncthreads();  // the reads of the last pass are over\n",
        "",
        draw,
    ),
    "sums of a tile over those of the last one": (
        "linear",
        "    turn ^= 1;\n",
        "",
        partial(product.test_every_channel_is_written_once, "cpu", 250, False),
    ),
    "one of a warp's two chains of sums": (
        "linear",
        "    for (int i = 0; i < 4; ++i) sums[i] += others[i];\n",
        "",
        partial(product.test_every_number_of_rows, "cpu", torch.float16, 3),
    ),
    "sums of warps that are not there yet": (
        "linear",
        "    __syncthreads();  // the other turn's sums are read by then\n",
        "",
        partial(product.test_every_number_of_rows, "cpu", torch.float16, 3),
    ),
    "normalised rows that are not there yet": (
        "linear",
        "peak, inputs, scale);\n    }\n  }\n  __syncthreads();\n",
        "peak, inputs, scale);\n    }\n  }\n",
        partial(product.test_the_norm_before_it, "cpu", torch.float16, True, 3, 8),
    ),
    "channels asked for ahead that are not there": (
        "linear",
        "* gridDim.x; channel < channels;",
        "* gridDim.x; channel <= channels;",
        partial(product.test_what_is_asked_for_ahead_changes_nothing, "cpu", (1, 8), False, 20),
    ),
    "inputs asked for ahead that are not there": (
        "linear",
        "min(row_bytes, SPAN_BYTES * WARPS * AHEAD);",
        "SPAN_BYTES * WARPS * AHEAD;",
        partial(product.test_what_is_asked_for_ahead_changes_nothing, "cpu", (40, 64), True, 20),
    ),
    "channels past the end": (
        "linear",
        "row < rows && channel < channels",
        "row < rows",
        partial(product.test_every_channel_is_written_once, "cpu", 17, False),
    ),
    "codes over numbers that other lanes still read": (
        "linear",
        "    __syncwarp();  // codes come to lie where other lanes' numbers lay\n",
        "",
        rows_in_place,
    ),
    "a scale of a lane and not of the normalised row": (
        "linear",
        "row_scale(warp_max(peak))",
        "row_scale(peak)",
        rows_in_place,
    ),
    "largest numbers of warps that are not there yet": (
        "linear",
        "    if (lane == row) peaks[warp][row] = most;\n  }\n  __syncthreads();\n",
        "    if (lane == row) peaks[warp][row] = most;\n  }\n",
        rows_by_the_block,
    ),
    "rounded rows that are not there yet": (
        "linear",
        "row_bytes) = found.scale;\n  }\n  __syncthreads();\n",
        "row_bytes) = found.scale;\n  }\n",
        rows_by_the_block,
    ),
    "the largest number of one warp": (
        "linear",
        "most = max(most, peaks[w][row]);",
        "most = peaks[w][row];",
        partial(narrow_product.test_every_number_of_rows, "cpu", 3),
    ),
    "codes of weights in another order than those of rows": (
        "linear",
        "two(highs[i]), two(lows[i] >> 16)",
        "two(highs[i] >> 16), two(lows[i])",
        rows_by_the_block,
    ),
    "a channel without its scale": (
        "linear",
        "scale = own * scales[channel];",
        "scale = own * scales[0];",
        rows_by_the_block,
    ),
    "a gate with the scales of the other weight": (
        "linear",
        "gate_scale = own * gate_scales[channel];",
        "gate_scale = scale;",
        partial(
            narrow_product.test_every_channel_is_written_once_with_its_own_scale,
            *("cpu", 9, True, True),
        ),
    ),
    "codes past the inputs that nobody writes": (
        "product_rows",
        "place < padded; place",
        "place < inputs; place",
        rounded_rows,
    ),
    "a row that is not finite taken for a number": (
        "product_rows",
        "  if (peak >= INFINITE) return {not_a_number(), 0.0f};\n",
        "",
        partial(
            narrow_product.test_a_row_that_is_not_finite_is_nan_by_its_scale, "cpu", float("nan")
        ),
    ),
    "a scale without the last numbers of a row": (
        "product_rows",
        "block_max<THREADS / WARP>(peak)",
        "warp_max(peak)",
        partial(
            narrow_product.test_codes_and_scales_are_those_of_the_definition, "cpu", 2056, 2064
        ),
    ),
    "a normalised row that is not rounded to 16 bits first": (
        "norm",
        "v[j][i] = widen(narrow<Rounded>(scaled[i]));",
        "v[j][i] = scaled[i];",
        normed_rows,
    ),
    "a stop in the first tokens counts": (
        "step_update",
        "found && generated > row[MIN_TOKENS]",
        "found",
        partial(stepping.test_a_stop_that_the_first_tokens_complete_does_not_count, "cpu"),
    ),
}


@pytest.fixture(autouse=True)
def _own_counts(monkeypatch):
    """What a bug leaves in the counts of arrived blocks is no other test's."""
    monkeypatch.setattr(attention.module, "_held", {})


HEADERS = (
    *("activation", "best_token", "decode_rows", "decode_tiles"),
    *("prompt_floats", "prompt_tiles", "prompt_rows"),
    *("heads", "product_rows", "fp8", "mma", "common"),  # which others include
)


def planting(source, old, new):
    """A backend that runs every kernel with one passage of one source changed."""

    @cache
    def compiled(kernel):
        text = (SOURCES / f"{kernel.source}.cu").read_text()
        for header in HEADERS:
            inner = (SOURCES / f"{header}.cuh").read_text().replace("#pragma once", "")
            include = f'#include "{header}.cuh"'
            text = text.replace(include, inner, 1).replace(include, "")
        if source in (kernel.source, "common"):
            assert text.count(old) == 1, f"{source} no longer holds {old!r}"
            text = text.replace(old, new)
        module = RawModule(code=text, name_expressions=(kernel.expression,))
        return module.get_function(kernel.expression)

    def run(kernel, grid, block, args, shared_bytes):
        compiled(kernel)(grid, block, args, shared_mem=shared_bytes)

    return run


# One bug of each source; `make test-all` plants the others, each of which is compiled.
FIRST = {source: name for name, (source, *_) in reversed(PLANTED.items())}.values()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.slow]) for name in PLANTED],
)
def test_a_planted_bug_is_seen(name):
    source, old, new, scenario = PLANTED[name]
    with (
        launch.using(planting(source, old, new)),
        pytest.raises((KernelFault, AssertionError)) as e,
    ):
        scenario()
    assert "no longer holds" not in str(e.value)


@pytest.mark.parametrize(
    ("lengths", "asks"),
    [
        ([31, 0, 0, 0], True),
        ([3 * attention.SPLIT + 1, 0, 0, 0], True),
        ([3 * attention.SPLIT + 1, 5, 0, 0], False),
        ([31, 31, 31, 31, 31], False),
    ],
)
def test_blocks_that_find_nothing_do_not_count_as_running(monkeypatch, lengths, asks):
    """Attention asks ahead by how long texts are, not by how wide tables: where it does, asking for
    what lies past a text is seen."""
    monkeypatch.setattr(attention.module, "RESIDENT_BLOCKS", 4)  # of the host's one multiprocessor
    problem = attention.Problem(lengths, 1, 1, 64, torch.float16, width=40)
    source, old, new, _ = PLANTED["positions asked for ahead that are not there"]
    seen = pytest.raises(KernelFault, match="out of bounds") if asks else nullcontext()
    with launch.using(planting(source, old, new)), seen:
        problem.run("cpu")


def test_a_kernel_that_is_not_in_the_catalogue_is_noticed():
    """Else the gate would not see what the engine runs."""
    with pytest.raises(AssertionError, match="not in the catalogue"):
        run_on_host(Kernel("merge", "merge_attention", ("double",)), (1,), (32,), (), 0)
