"""OpenVINO GenAI: its continuous batching for texts, the plain OpenVINO runtime for scores.

GenAI gives no log-probabilities of a prompt, so ranking runs the exported model itself: sorted
batches, the log-softmax taken on the documents' positions alone.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
import tokenizers
import torch

from . import protocol
from .protocol import Generated, Generation, Pair, System

CACHE_GIB = 2
BATCH = 16


class OpenVino(System):
    """A pipeline with prefix caching, and a compiled model beside it once scores are asked for."""

    def __init__(self) -> None:
        names = ("openvino", "openvino-genai", "optimum-intel", "nncf")
        self.versions = {name: version(name) for name in names}
        self.settings = (
            f"ContinuousBatchingPipeline, prefix caching on, {CACHE_GIB} GB of cache, stop "
            f"strings; int8: weights by optimum-cli, activations by the runtime; ranking: the "
            f"exported model in sorted batches of {BATCH} through the runtime"
        )

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
        self._directory = converted / f"openvino-{precision}"
        if not (self._directory / "openvino_tokenizer.xml").is_file():
            command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
            command += ["--model", str(model), "--task", "text-generation-with-past"]
            command += ["--weight-format", precision, str(self._directory)]
            subprocess.run(command, check=True, stdout=sys.stderr)
        self._properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        torch.set_num_threads(threads)
        self._scorer: openvino.InferRequest | None = None
        self.reset()

    def reset(self) -> None:
        """Another pipeline, whose cache is empty."""
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = 64
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(self._directory), scheduler, "CPU", self._properties
        )
        self.generate([Generation([0] * 16, 2)])  # a new pipeline's first run is slow

    def generate(self, requests: list[Generation]) -> list[Generated]:
        configs = []
        for request in requests:
            config = genai.GenerationConfig()
            config.max_new_tokens = request.max_tokens
            config.do_sample = False
            config.ignore_eos = True
            if request.stop is not None:
                config.stop_strings = {request.stop}
                # Without it the token in which the stop begins is lost as a whole.
                config.include_stop_str_in_output = True
            configs.append(config)
        prompts = [
            openvino.Tensor(np.array([request.token_ids], dtype=np.int64)) for request in requests
        ]
        results = self._pipeline.generate(prompts, configs)
        found = {result.m_request_id: result.m_generation_ids[0] for result in results}
        rows = [found[number] for number in sorted(found)]
        return [self._generated(row, request) for row, request in zip(rows, requests, strict=True)]

    def _generated(self, row: list[int], request: Generation) -> Generated:
        """GenAI computes the token that completes a stop, but leaves it out where the stop ends
        before the token does: the text then ends in a part of the stop."""
        text = self._tokenizer.decode(row)
        if request.stop is None or request.stop in text or len(row) == request.max_tokens:
            return Generated(protocol.cut(text, request.stop), len(row))
        return Generated(protocol.without_part(text, request.stop), len(row) + 1)

    def score(self, pairs: list[Pair]) -> list[float]:
        if self._scorer is None:
            core = openvino.Core()
            compiled = core.compile_model(
                self._directory / "openvino_model.xml", "CPU", self._properties
            )
            self._scorer = compiled.create_infer_request()
        return protocol.in_batches(pairs, lambda pair: sum(map(len, pair)), BATCH, self._score)

    def _score(self, batch: list[Pair]) -> list[float]:
        """Mean NLL of each document; left padding puts every document at the end of its row."""
        scorer, rows = self._scorer, [query + document for query, document in batch]
        assert scorer is not None
        ids, mask = (np.array(part, dtype=np.int64) for part in protocol.pad_left(rows))
        scorer.reset_state()
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": np.maximum(mask.cumsum(1) - 1, 0),
            "beam_idx": np.arange(len(rows), dtype=np.int32),
        }
        scorer.infer(inputs)
        kept = max(len(document) for _, document in batch)
        logits = torch.from_numpy(scorer.get_tensor("logits").data)[:, -kept - 1 : -1]
        wanted = torch.from_numpy(ids)[:, -kept:, None]
        taken = logits.log_softmax(-1).gather(2, wanted).squeeze(2).double()
        return [
            -float(row[-len(document) :].mean())
            for row, (_, document) in zip(taken, batch, strict=True)
        ]


if __name__ == "__main__":
    protocol.serve(OpenVino())
