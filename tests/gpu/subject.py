"""One model three times: in the engine, in transformers in the same format beside it, and exact.

Oracle: transformers in FP64 over the weights as the format rounds them.  The measure of a right
answer is transformers in the same format on the same device: the engine, whose sums are FP32, may
not be further from the oracle than it is, save for what their roundings differ by.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import GenerateRequest, SamplingParams
from nightjar.gpu_worker.models import load_model
from tests.engines import run

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EPSILON = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}


@dataclass
class Subject:
    """One model: in the engine, in transformers beside it, and exact."""

    device: str
    precision: str
    directory: ModelDirectory

    def __post_init__(self):
        path, dtype = self.directory.path, DTYPES[self.precision]
        self.model = load_model(self.directory, self.precision, self.device)
        self.beside, self.exact = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval() for _ in range(2)
        )
        self.beside.to(self.device)
        self.exact.double().to(self.device)
        self.tokenizer = self.directory.tokenizer()

    def answers(self, requests, **config):
        return run(self.model, self.tokenizer.token_bytes, requests, **config)

    @torch.inference_mode()
    def log_probs(self, which, ids):
        """float64[n, V] of every next token."""
        logits = which(torch.tensor([ids], device=which.device)).logits[0]
        return logits.double().cpu().log_softmax(-1)

    def slack(self, log_probs):
        """What two roundings of the same sum differ by."""
        return 4 * EPSILON[self.precision] * float(log_probs.abs().max())

    def behind_the_best(self, prompt, tokens):
        """float64[n]: by how much each token of a text is less likely than the oracle's best; and
        the slack."""
        ids = [*prompt, *tokens]
        exact = self.log_probs(self.exact, ids)[len(prompt) - 1 : -1]
        chosen = exact.gather(1, torch.tensor(tokens).unsqueeze(1))[:, 0]
        return exact.max(-1).values - chosen, self.slack(exact)


def assert_greedy(subject, prompts, tokens, **config):
    """Every token is the best one of the oracle, or within a rounding of it."""
    params = SamplingParams(tokens, ignore_eos=True)
    requests = [GenerateRequest(i, prompt, params) for i, prompt in enumerate(prompts)]
    found = subject.answers(requests, **config)
    for i, prompt in enumerate(prompts):
        assert len(found[i].token_ids) == tokens
        behind, slack = subject.behind_the_best(prompt, found[i].token_ids)
        assert behind.max() <= 2 * slack


def assert_log_probabilities(subject, prompts, tokens):
    """Greedy texts with their log-probabilities, as near to the oracle as those of transformers."""
    params = SamplingParams(tokens, ignore_eos=True, logprobs=5)
    found = subject.answers([GenerateRequest(i, p, params) for i, p in enumerate(prompts)])
    ours, theirs, slack = [], [], 0.0
    for i, prompt in enumerate(prompts):
        output = found[i].outputs[0]
        ids = [*prompt, *output.token_ids]
        places = slice(len(prompt) - 1, len(ids) - 1)
        exact = subject.log_probs(subject.exact, ids)[places]
        beside = subject.log_probs(subject.beside, ids)[places]
        slack = max(slack, subject.slack(exact))
        for row, said in enumerate(output.logprobs):
            best = int(output.token_ids[row])
            assert exact[row].max() - exact[row, best] <= 2 * slack
            at = torch.tensor([token for token, _ in said.top])
            values = torch.tensor([value for _, value in said.top], dtype=torch.float64)
            ours.append((values - exact[row, at]).abs())
            theirs.append((beside[row, at] - exact[row, at]).abs())
    assert len(ours) == tokens * len(prompts)
    assert torch.cat(ours).mean() <= 1.5 * torch.cat(theirs).mean() + slack / 16
    assert torch.cat(ours).max() <= 2 * torch.cat(theirs).max() + slack
