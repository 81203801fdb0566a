"""Access: who may ask for what, and what a request gets. Pure.

`providers` decides which host names are answered and which provider a request is for, `virtual_keys` who holds a key
and what it allows, `options` what the client asked for, `rules` what the operator adds or limits, and how a request
becomes a call.
"""
