"""The mock of Anthropic's API."""
