"""Every parser that reads what others wrote, under bytes that nobody would write."""
