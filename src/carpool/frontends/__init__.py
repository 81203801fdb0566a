"""The frontends: library and proxy. They convert types and decide nothing, so a new frontend is only a conversion."""
