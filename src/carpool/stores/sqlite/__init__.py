"""The store in one SQLite file, or in memory."""
