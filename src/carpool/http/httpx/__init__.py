"""Adapters for the user's own httpx client."""
