"""The lane `batch`: admit, buy, follow, collect, reconcile, rescue."""
