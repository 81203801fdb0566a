"""The ways in. Doors convert types and decide nothing: a new door is a conversion."""
