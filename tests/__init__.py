"""The tests, in the folders of `src/carpool`; what several of them share is in `tests.support`."""
