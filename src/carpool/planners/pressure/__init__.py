"""How fast an account may send, and what happens when the provider refuses or fails.

- Throttle: limits the calls of one account and model on `now`, by rate and by the number in flight.
- Meter: a copy of the provider's bucket of requests or tokens, kept up to date from rate-limit headers.
- Fair queue: the order in which calls that a throttle holds back are sent.
- Breaker: stops the calls of an account while the provider keeps failing.
- Retry budget: how many retries the calls of an account may make together.
- Batch quota: requests per minute on the batch API of an account, by token buckets.
- Enqueued limit: how much of a model an account may have enqueued in batches.
"""
