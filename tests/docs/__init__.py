"""What the documentation shows is run as a reader would run it."""
