"""How fast an account may send, and what happens when the provider refuses or fails.

- Throttle: limits the calls of one account and model on `now`, by rate and by the number in flight.
- Fair queue: the order in which calls that the throttle holds back are sent.
"""
