"""The house rules, as tests. `sources` reads the code, `layers` and `rules` hold the checkers, and every checker
answers with a list of sentences: empty when all is well. Each is also tried on a snippet that must fail."""
