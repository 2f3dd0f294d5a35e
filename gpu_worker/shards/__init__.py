"""One model over several processes: rank 0 schedules, the others compute the same in lockstep.

docs/explanations/shards.md says what is split how, what is sent, and what happens when a rank
fails. The launcher imports `startup`, `activity` and `exits` only, so this package itself loads no
torch.
"""
