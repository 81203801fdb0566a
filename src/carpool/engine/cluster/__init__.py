"""Several engines on one store: which of them are alive, and which one acts for an account.

- Member: an engine that has joined the store and is alive, that is, its pulse has not run out.
- Pulse: how long an engine counts as alive without renewing it.
- Lease: how long a create that an engine has begun may still be on its way.
- Leader: the one member that creates and polls the batches of an account, for all members.
- Takeover: a leader becomes the owner of the unfinished batches of a dead engine.
- Hint: a message from another engine that something may have changed. It saves time, and it may be lost; polling
  finds what it would have told.
"""
