"""The operations of a store, as functions on a session: they know no database."""
