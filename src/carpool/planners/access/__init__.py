"""Access: the provider of a request, the profiles of virtual keys, and house keys. Pure."""
