"""The compute process: one engine, fed over a pipe, `python -m nightjar.gpu_worker.compute`.

It ends when its worker does: the pipe closes. Nothing else reaches it.
"""

import argparse
import logging
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load as load_safetensors

from nightjar.checkpoints import PROMPT_TOKEN, CheckpointError, ModelDirectory
from nightjar.gpu_worker import messages
from nightjar.gpu_worker.engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    GenerateResult,
    RankRequest,
    RankResult,
    RequestFailed,
    SamplingParams,
)
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.models.precision import PRECISIONS, fastest_dtype

logger = logging.getLogger(__name__)

# How often a working engine says that it is alive.
_LIFE_SIGN_S = 1.0


def build_engine(directory: ModelDirectory, dtype: str) -> Engine:
    """Load the model and build its engine.

    Raises:
        CheckpointError: The weights do not fit the configuration.
    """
    tokenizer = directory.tokenizer()
    prompt_id = tokenizer.token_id(PROMPT_TOKEN)
    banned = () if prompt_id is None else (prompt_id,)
    model = load_model(directory, dtype)
    return Engine(model, tokenizer.token_bytes, EngineConfig(banned_token_ids=banned))


class ComputeLoop:
    """Moves messages between the pipe and the engine, a step at a time."""

    def __init__(self, engine: Engine, pipe: Connection) -> None:
        self._engine = engine
        self._pipe = pipe
        self._steps = 0
        self._busy_s = 0.0
        self._said_at = 0.0

    def run(self) -> None:
        """Serve until the worker closes the pipe."""
        while True:
            try:
                self._receive()
            except EOFError:
                return
            started = time.monotonic()
            outcomes = self._engine.step()
            self._busy_s += time.monotonic() - started
            self._steps += 1
            self._send(outcomes)

    def _receive(self) -> None:
        """Take every waiting message; block only when there is nothing to compute."""
        while not self._engine.has_work or self._pipe.poll():
            for message in messages.decode_to_compute(self._pipe.recv_bytes()):
                self._handle(message)

    def _handle(self, message: messages.ToCompute) -> None:
        match message:
            case messages.Generate():
                self._engine.submit(_generate_request(message))
            case messages.Rank():
                self._engine.submit(
                    RankRequest(
                        request_id=message.ticket,
                        query_ids=message.query_ids,
                        documents=message.documents,
                        prompt_vectors=message.prompt_vectors,
                    )
                )
            case messages.RegisterVectors():
                (vectors,) = load_safetensors(message.data).values()
                self._engine.register_prompt_vectors(message.key, vectors)
            case messages.Cancel():
                for ticket in message.tickets:
                    self._engine.cancel(ticket)

    def _send(self, outcomes: list[GenerateResult | RankResult | RequestFailed]) -> None:
        frame: list[messages.FromCompute] = [_answer(outcome) for outcome in outcomes]
        now = time.monotonic()
        if frame or now - self._said_at >= _LIFE_SIGN_S:
            frame.append(messages.Stepped(steps=self._steps, busy_s=self._busy_s))
            self._pipe.send_bytes(messages.encode(frame))
            self._said_at = now


def _generate_request(message: messages.Generate) -> GenerateRequest:
    return GenerateRequest(
        request_id=message.ticket,
        token_ids=message.token_ids,
        sampling=SamplingParams(
            max_tokens=message.max_tokens,
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            seed=message.seed,
            stop=tuple(message.stop),
            ignore_eos=message.ignore_eos,
        ),
        prompt_vectors=message.prompt_vectors,
    )


def _answer(outcome: GenerateResult | RankResult | RequestFailed) -> messages.Answer:
    match outcome:
        case GenerateResult():
            return messages.Generated(
                ticket=outcome.request_id,
                text=outcome.text,
                completion_tokens=len(outcome.token_ids),
                finish_reason=outcome.finish_reason,
            )
        case RankResult():
            return messages.Ranked(
                ticket=outcome.request_id,
                mean_nll=outcome.mean_nll,
                token_counts=outcome.token_counts,
            )
        case RequestFailed():
            return messages.Failed(
                ticket=outcome.request_id, code=outcome.code, message=outcome.message
            )


def main() -> int:
    """Entry point: load, report, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("auto", *PRECISIONS), default="auto")
    parser.add_argument("--pipe", type=int, required=True, help="file descriptor of the pipe")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    args = parser.parse_args()
    # Ctrl-C in a terminal reaches the whole group: the worker drains, and needs its engine for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s compute %(levelname)s %(message)s")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    pipe = Connection(args.pipe)
    started = time.monotonic()
    try:
        directory = ModelDirectory.open(args.model)
        dtype = fastest_dtype() if args.dtype == "auto" else args.dtype
        engine = build_engine(directory, dtype)
    except CheckpointError as error:
        pipe.send_bytes(messages.encode([messages.LoadFailed(message=str(error))]))
        return 1
    load_s = time.monotonic() - started
    logger.info(
        "serving %s in %s after %.1f s",
        directory.name,
        dtype,
        load_s,
        extra={"action": "model_loaded", "dtype": dtype},
    )
    ready = messages.Ready(model=directory.name, dtype=dtype, load_s=load_s)
    pipe.send_bytes(messages.encode([ready]))
    ComputeLoop(engine, pipe).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
