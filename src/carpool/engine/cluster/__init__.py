"""Several engines on one store: leases, leadership, hints between processes."""
