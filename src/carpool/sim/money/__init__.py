"""Replay traffic under virtual time and price it: what would each policy have paid, and who would have waited?

Nouns. A *trace* is recorded traffic: sessions of agents, and independent calls. A *session* is a sequence of turns,
each of which starts some time after the answer to the one before. A *world* says how a provider behaves: latencies,
limits, refusals and cache rules. A *policy* chooses lane and cache lifetime of each turn. A *run* is one policy on one
trace in one world with one seed. The *bound* is what somebody who knew all gaps and latencies in advance would have
paid.
"""
