"""Prompt caches: which prefixes a provider probably still has, and what a request should mark for it."""
