"""llama.cpp through llama-cpp-python's low-level calls: parallel sequences in one batch.

The high-level class runs one sequence at a time; llama.cpp itself runs many, and can share a
query's cells among its documents, so this file drives it as its own `parallel` example does: a
place that a finished text leaves is taken at the next step.  Texts do not reuse each other's
prompts: that is the part of its server, not of the library.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import tokenizers
from safetensors.numpy import load_file

from .protocol import Generated, Generation, Ranking, System, cut, serve

TYPES = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0"}
CELLS = 16_384
"""Tokens of the cache, over all sequences."""
PLACES = 32
BATCH = 512
"""Tokens of one llama_decode."""
# Of the writer's method add_NAME: the key of GPT-2's config, and of Llama's.
SHAPE = (
    ("context_length", "n_positions", "max_position_embeddings"),
    ("embedding_length", "n_embd", "hidden_size"),
    ("block_count", "n_layer", "num_hidden_layers"),
    ("head_count", "n_head", "num_attention_heads"),
    ("feed_forward_length", "n_inner", "intermediate_size"),
    ("layer_norm_eps", "layer_norm_epsilon", None),
    ("layer_norm_rms_eps", None, "rms_norm_eps"),
    ("head_count_kv", None, "num_key_value_heads"),
    ("rope_dimension_count", None, "head_dim"),
    ("rope_freq_base", None, "rope_theta"),
    ("vocab_size", None, "vocab_size"),
)


@dataclass
class Text:
    """A text being continued in a sequence of the cache."""

    place: int
    request: Generation
    sequence: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""


@dataclass(frozen=True)
class Row:
    """One token of a batch."""

    token: int
    position: int
    sequence: int
    wants_logits: bool


class LlamaCpp(System):
    """One context whose sequences are texts, or a query and its documents."""

    def __init__(self) -> None:
        self.versions = {name: version(name) for name in ("llama-cpp-python", "gguf")}
        self.settings = (
            f"llama_decode with up to {PLACES} parallel sequences and batches of {BATCH}; int8 is "
            "Q8_0; ranking: the query once, its cells shared with the documents (seq_cp); a prompt "
            "does not reuse another's, which is the part of its server"
        )

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
        file = converted / f"llamacpp-{precision}.gguf"
        if not file.is_file():
            write_gguf(model, file, TYPES[precision])
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CELLS, BATCH, BATCH
        params.n_seq_max = PLACES + 1
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))

    def reset(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)

    def _decode(self, rows: Sequence[Row]) -> np.ndarray:
        """Compute up to BATCH rows; logits [wanted rows, V] in their order."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for place, row in enumerate(rows):
            batch.token[place] = row.token
            batch.pos[place] = row.position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = row.sequence
            batch.logits[place] = row.wants_logits
        if (code := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        wanted = sum(row.wants_logits for row in rows)
        if not wanted:
            return np.empty((0, self._vocab_size), dtype=np.float32)
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(wanted, self._vocab_size))

    def generate(self, requests: list[Generation]) -> list[Generated]:
        waiting = [Text(place, request, -1) for place, request in enumerate(requests)][::-1]
        free, running = list(range(PLACES)), list[Text]()
        done: dict[int, Generated] = {}
        while waiting or running:
            rows = [self._next_row(text) for text in running]
            heads = list(running)
            while waiting and free and len(rows) + len(waiting[-1].request.token_ids) <= BATCH:
                text = waiting.pop()
                text.sequence = free.pop()
                rows += _prompt_rows(text.request.token_ids, text.sequence, last=True)
                running.append(text)
                heads.append(text)
            if waiting and not rows:
                self._long_prompt(text := waiting.pop(), sequence := free.pop())
                text.sequence = sequence
                rows = _prompt_rows(text.request.token_ids, sequence, last=True)[-1:]
                running.append(text)
                heads.append(text)
            best = self._decode(rows).argmax(1).tolist()
            for text, token in zip(heads, best, strict=True):
                if self._append(text, token):
                    running.remove(text)
                    free.append(text.sequence)
                    llama_cpp.llama_memory_seq_rm(self._memory, text.sequence, -1, -1)
                    shown = cut(text.text, text.request.stop)
                    done[text.place] = Generated(shown, len(text.tokens))
        return [done[place] for place in range(len(requests))]

    def _next_row(self, text: Text) -> Row:
        position = len(text.request.token_ids) + len(text.tokens) - 1
        return Row(text.tokens[-1], position, text.sequence, wants_logits=True)

    def _long_prompt(self, text: Text, sequence: int) -> None:
        """All of a prompt but its last token, BATCH rows at a time."""
        rows = _prompt_rows(text.request.token_ids, sequence, last=False)[:-1]
        for start in range(0, len(rows), BATCH):
            self._decode(rows[start : start + BATCH])

    def _append(self, text: Text, token: int) -> bool:
        """Add a token; returns whether the text has ended."""
        text.tokens.append(token)
        text.text += self._tokenizer.decode([token], skip_special_tokens=False)
        stop = text.request.stop
        stopped = stop is not None and stop in text.text
        return stopped or len(text.tokens) >= text.request.max_tokens

    def rank(self, rankings: list[Ranking]) -> list[list[float]]:
        return [self._rank(ranking) for ranking in rankings]

    def _rank(self, ranking: Ranking) -> list[float]:
        """The query in the last sequence; documents take the others, which share its cells."""
        query_rows = _prompt_rows(ranking.query, PLACES, last=True)
        for start in range(0, len(query_rows), BATCH):
            first = self._decode(query_rows[start : start + BATCH])
        heads = [document[0] for document in ranking.documents]
        firsts = _nll(np.broadcast_to(first, (len(heads), self._vocab_size)), heads)
        scores: list[float] = []
        documents = list(ranking.documents)
        while documents:
            taken, rows = self._fit(documents, len(ranking.query))
            del documents[: len(taken)]
            later = [token for document in taken for token in document[1:]]
            nll = _nll(self._decode(rows), later) if rows else np.empty(0)
            ends = np.cumsum([len(document) - 1 for document in taken])
            for document, own in zip(taken, np.split(nll, ends[:-1]), strict=True):
                scores.append((firsts[len(scores)] + float(own.sum())) / len(document))
            for sequence in range(len(taken)):
                llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        llama_cpp.llama_memory_seq_rm(self._memory, PLACES, -1, -1)
        return scores

    def _fit(self, documents: list[list[int]], start: int) -> tuple[list[list[int]], list[Row]]:
        """As many documents as places and rows allow, each after the shared query."""
        taken, rows = list[list[int]](), list[Row]()
        for document in documents[:PLACES]:
            if rows and len(rows) + len(document) - 1 > BATCH:
                break
            sequence = len(taken)
            llama_cpp.llama_memory_seq_cp(self._memory, PLACES, sequence, -1, -1)
            rows += [
                Row(token, start + place, sequence, wants_logits=True)
                for place, token in enumerate(document[:-1])
            ]
            taken.append(document)
        return taken, rows


def _prompt_rows(ids: Sequence[int], sequence: int, *, last: bool) -> list[Row]:
    """Rows of a prompt from position 0; logits of its last row only, if any."""
    end = len(ids) - 1
    return [
        Row(token, place, sequence, wants_logits=last and place == end)
        for place, token in enumerate(ids)
    ]


def _nll(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Negative log-likelihoods [n] of tokens [n] under logits [n, V]."""
    highest = logits.max(1)
    sums = np.exp(logits - highest[:, None]).sum(1, dtype=np.float64)
    found: np.ndarray = np.log(sums) + highest - logits[np.arange(len(tokens)), list(tokens)]
    return found


def write_gguf(model: Path, file: Path, kind: str) -> None:
    """Write a directory of the benchmarks' models with its matrices as kind: F32, BF16 or Q8_0."""
    config = json.loads((model / "config.json").read_text())
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, config["model_type"])
    _write_shape(writer, config)
    _write_tokenizer(writer, model)
    stored = gguf.GGMLQuantizationType[kind]
    architecture = gguf.MODEL_ARCH[config["model_type"].upper()]
    layers = config.get("n_layer") or config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, weight in load_file(model / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        array = _values(name, weight, config)
        if array.ndim == 1 or theirs.startswith("position_embd"):
            writer.add_tensor(theirs, array.astype(np.float32))
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    for name, of_gpt2, of_llama in SHAPE:
        key = of_gpt2 if config["model_type"] == "gpt2" else of_llama
        if key is not None:
            getattr(writer, f"add_{name}")(config[key])


def _write_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    described = json.loads((model / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    special = {token["content"] for token in described["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens
    ]
    merges = described["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _values(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """A tensor's values as llama.cpp wants them."""
    if ".h." in name and weight.ndim == 2:
        return np.ascontiguousarray(weight.T)  # GPT-2 stores its matrices as [in, out]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2])
    return weight if key is None else _interleaved(weight, config[key])


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [2, half] of each head as [half, 2]: llama.cpp rotates neighbouring pairs."""
    out, width = weight.shape
    halves = weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(out, width))


if __name__ == "__main__":
    serve(LlamaCpp())
