"""What the mocks of all providers share: server, time, faults, batches, the bill."""
