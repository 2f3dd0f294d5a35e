"""One model over several processes: rank 0 schedules, the others compute the same in lockstep.

docs/explanations/shards.md says what is split how, what is sent, and what happens when a rank
fails. The launcher reads `exits` alone, so that no torch is loaded with this package.
"""
